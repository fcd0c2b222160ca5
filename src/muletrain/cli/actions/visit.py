"""``muletrain status``, ``stop``, ``kick`` and ``ticket``: enter a run for one question."""

from __future__ import annotations

import asyncio
import dataclasses
import json as jsonlib
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from muletrain.cli.show.console import make_console
from muletrain.cli.show.status import Announced, Down, furthest, gone, state_of, status_of
from muletrain.errors import AdmissionError, MuletrainError, NetworkError, PeerUnreachable, Refused
from muletrain.events import RunFinished, RunStarted, events_in
from muletrain.network.answers import NOT_SERVED
from muletrain.runs.again import ended_early
from muletrain.runs.folder import ROOT, held, temporary_folder
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.worker_files import LEFT, OWNER_FILE, REMOVED_FILE, TICKET_FILE, write_secret
from muletrain.units import plural, printable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from muletrain.network.base import Network
    from muletrain.network.identity import Key
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.join.removal import Removal

STOP_TIMEOUT_S = 10.0
"""Seconds that one member has to accept a stop."""
ENDS_S, POLL_S = 2.0, 0.1
"""Longest wait for a run's last event once all members are gone, and the time between two looks [s]."""


def show_status(ticket: str | None, *, json: bool, verbose: bool = False) -> None:
    """Print the members' announcements in the directory; before training starts, the missing conditions. ``verbose``:
    see ``status_of``. Raises MuletrainError if no member answers."""
    try:
        whole = ticket_of(ticket)

        async def look(network: Libp2pNetwork, run_id: str) -> tuple[list[Announced], list[Down], tuple[str, ...]]:
            return await announced(network, whole)

        peers, unheard, missing = asyncio.run(as_member(whole, look))
    except MuletrainError as e:
        if ticket is not None or not (how := ended_early()):
            raise
        raise MuletrainError(f"{e}\n{how}") from None
    if json:
        at = furthest(peers).model_dump() if peers else {}
        numbers = {key: at.get(key) for key in ("step", "steps", "stages", "loss", "tokens_per_s")}
        own = [p.model_dump(exclude={"loss", "tokens_per_s", "left", "down"}) for p in peers]
        listed = [{**dump, "state": state_of(p, peers)} for dump, p in zip(own, peers, strict=True)]
        lost, silent = ([d.model_dump() for d in downs] for downs in (gone(peers), unheard))
        print(jsonlib.dumps({**numbers, "missing": missing, "peers": listed, "gone": lost, "unannounced": silent}))
    else:
        make_console().print(status_of(peers, missing, unheard, verbose=verbose))


def stop_run(ticket: str | None) -> None:
    """Ask one member to stop the run. The request travels in the next step record, so all stop after the same step. A run
    that ends meanwhile, or has ended, needs no stop."""
    try:
        told = asyncio.run(as_member(ticket_of(ticket), ask_to_stop))
    except MuletrainError:
        if ticket is not None or not _own_has_ended():
            raise
        told = False
    if told:
        print(
            "the run ends after the current step, with a checkpoint, which a member collects: 'start', unless it is gone"
        )
    else:
        print("the run has ended")


async def announced(network: Libp2pNetwork, whole: Ticket) -> tuple[list[Announced], list[Down], tuple[str, ...]]:
    """The members' announcements, serving members without one, and before training starts the missing conditions."""
    from muletrain.runs.join.client import ask_missing, members_in
    from muletrain.runs.join.removal import serving
    from muletrain.runtime.peer.messages import HOLDS_S

    found = await network.directory.lookup_left(f"{whole.run_id}/peers")
    read = (Announced.read(peer, value, HOLDS_S - left_s) for peer, (value, left_s) in found.items())
    told = [p for p in read if p is not None]
    present = [p for p in told if not p.left]
    known = await serving(network, [*(p.id for p in present), *members_in(whole.addresses)])
    unheard = [Down(id=m.id, name=m.name, stage=m.stage or 0) for m in known if m.id not in {p.id for p in told}]
    missing: tuple[str, ...] = ()
    if not present and not unheard:
        with suppress(AdmissionError, NetworkError):  # the run ends: members admit no peer
            missing = await ask_missing(network, whole.addresses)
    return sorted(present, key=lambda p: (p.stage, p.name, p.age_s)), unheard, tuple(map(printable, missing))


async def ask_to_stop(network: Network, run_id: str) -> bool:
    """Ask the members one by one until one takes the request. False: the run has ended, since all announced members are
    gone, or serve the run no more. Raises MuletrainError if this is unknown."""
    from muletrain.runtime.peer.messages import StopRun

    ended, problems = False, list[str]()
    for peer, announced in sorted((await network.lookup(f"{run_id}/peers")).items()):
        who = Announced.read(peer, announced)
        try:
            await network.call(peer, StopRun.KIND, StopRun().pack(), timeout_s=STOP_TIMEOUT_S)
            return True
        except NetworkError as e:
            if isinstance(e, PeerUnreachable) or (isinstance(e, Refused) and NOT_SERVED in e.why):
                ended = True
                continue
            problems.append(f"{peer[-6:] if who is None else who.name}: {e.why}")
    if problems or not ended:
        raise MuletrainError(
            "; ".join(problems) or "no peer has announced itself yet; to end a run that waits, press Ctrl-C at 'start'"
        )
    return False


def _own_has_ended() -> bool:
    """Do the events here say that the run of this machine has ended? Processes write that event last. If this machine
    only left, the run may go on."""
    for _ in range(int(ENDS_S / POLL_S)):
        logs = _newest(TICKET_FILE) or _newest("*.jsonl")
        told = events_in(logs[-1].parent, RunStarted, RunFinished) if logs else []
        if not told:
            return False
        if isinstance(told[-1], RunFinished):
            return told[-1].reason != LEFT
        time.sleep(POLL_S)
    return False


def _newest(file: str) -> list[Path]:
    """Such files in the run folders, the newest one last."""
    return sorted(ROOT.glob(f"*/{file}"), key=lambda p: p.stat().st_mtime)


def kick_peer(who: str, ticket: str | None) -> None:
    """Remove a member for good, and replace the ticket. Raises MuletrainError if the owner's key is not here."""
    from muletrain.network.identity import Key
    from muletrain.runs.join.removal import remove

    folder, given = _owned(ticket)
    with held(folder, OWNER_FILE, "another 'muletrain kick' is running here; try again when it is done"):
        owner, removed = Key.at(folder / OWNER_FILE), folder / REMOVED_FILE
        before = removed.read_text(encoding="utf-8").split() if removed.exists() else []

        async def act(network: Libp2pNetwork, run_id: str) -> Removal:
            return await remove(network, given.addresses, who, frozenset(before))

        done: Removal = asyncio.run(as_member(given, act, owner))
        replaced = str(dataclasses.replace(given, secret=done.secret))
        write_secret(folder / TICKET_FILE, replaced)
        with suppress(OSError):  # only the message of a later kick needs the file
            removed.write_text("\n".join((*before, *sorted(done.out))), encoding="utf-8")
    print(
        f"removed {printable(done.name)} ({done.id[-8:]}): told {done.told} of {plural(done.kept, 'member')}; they tell the others"
    )
    if done.emptied is not None:
        print(
            f"it was the only peer of stage {done.emptied}: after fleet.adopt_after, a peer of another stage takes that stage over from "
            f"the newest checkpoint, if one can; otherwise the run waits for a machine to join"
        )
    if done.unproven:
        print(
            f"also removed, because no member that answered knows them: {printable(', '.join(done.unproven))}; they may join again"
        )
    print(f"the old ticket is void; the new one:\n\nmuletrain join {replaced}")


def _owned(ticket: str | None) -> tuple[Path, Ticket]:
    """The folder with the owner's key of ``ticket``'s run, or of the newest run. Raises MuletrainError."""
    from muletrain.network.identity import Key

    for path in reversed(_newest(OWNER_FILE)):
        own = path.parent / TICKET_FILE
        if ticket is None and own.exists():
            return path.parent, Ticket.parse(own.read_text(encoding="utf-8"))
        if ticket is not None and Key.at(path).public == Ticket.parse(ticket).owner:
            return path.parent, Ticket.parse(ticket)
    raise MuletrainError(
        f"no owner's key of {'this' if ticket else 'a running'} run under {ROOT.resolve()}: remove peers on the machine, and in the "
        f"folder, where 'muletrain start' (or 'run') was called"
    )


def own_ticket() -> str:
    """The newest ticket under ``runs/``. Raises MuletrainError if this machine is in no run."""
    if not (found := _newest(TICKET_FILE)):
        raise MuletrainError(
            f"no running run under {ROOT.resolve()} that others can join (a 'run' with one peer is none); give a ticket, or use the folder "
            f"where 'start' or 'join' was called"
        )
    return found[-1].read_text(encoding="utf-8").strip()


def ticket_of(text: str | None) -> Ticket:
    """The ticket in ``text``, or the newest one under ``runs/``. Raises MuletrainError."""
    return Ticket.parse(text or own_ticket())


async def as_member(
    ticket: Ticket, work: Callable[[Libp2pNetwork, str], Awaitable[Any]], owner: Key | None = None
) -> Any:
    """Enter the run's network, and do ``work`` there. ``owner``: the run's key, if stored here. Raises PeerUnreachable
    if no member answers, and AdmissionError."""
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.worker_files import PROTOCOL

    if not ticket.addresses:  # alone, we would found a run of our own
        raise AdmissionError(
            "the ticket names no member of its run; ask for one that 'muletrain start' or 'muletrain ticket' printed"
        )
    with temporary_folder() as folder:
        try:
            network = await Libp2pNetwork.create(
                run_id=ticket.run_id,
                secret=ticket.secret,
                owner=owner or ticket.owner,
                protocol=PROTOCOL,
                folder=folder,
                listen="0.0.0.0",
                initial_peers=ticket.addresses,
                visitor=True,
            )
        except PeerUnreachable:
            raise PeerUnreachable(
                f"nobody answers at {ticket.ports()}: the run is over, or this machine cannot connect to that address"
            ) from None
        try:
            return await work(network, ticket.run_id)
        finally:
            await network.close()
