"""``muletrain status``, ``stop``, ``kick`` and ``ticket``: enter a run for one question."""

from __future__ import annotations

import asyncio
import dataclasses
import json as jsonlib
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.cli.show.console import make_console
from muletrain.cli.show.status import Announced, Down, announced_by, furthest, gone, state_of, status_of
from muletrain.errors import AdmissionError, MuletrainError, NetworkError, PeerUnreachable, Refused
from muletrain.events import RunFinished, RunStarted, events_in
from muletrain.network.answers import NOT_SERVED
from muletrain.runs.again import ended_early
from muletrain.runs.folder import ROOT, held, temporary_folder
from muletrain.runs.here import Found, ask_command, find, has_ended, state_in
from muletrain.runs.join.ticket import PREFIX, Ticket
from muletrain.runs.worker_files import OWNER_FILE, REMOVED_FILE, TICKET_FILE, write_secret
from muletrain.units import plural, printable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from muletrain.network.base import Network
    from muletrain.network.identity import Key
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.join.removal import Removal

STOP_TIMEOUT_S = 10.0
"""Seconds that one member has to accept a stop."""
ENDS_S, POLL_S = 2.0, 0.1
"""Longest wait for a run's last event once all members are gone, and the time between two looks [s]."""


def show_status(run: str | None, *, json: bool, verbose: bool = False) -> None:
    """Print the state of a run that this machine began alone by its events, else the members' announcements in the
    directory; before training starts, the missing conditions. ``verbose``: see ``status_of``. Raises MuletrainError if
    no member answers."""
    try:
        found = found_run(run)
        peers, unheard, missing = _told_here(found) or _told_by_members(found)
    except MuletrainError as e:
        if run is not None and folder_of(run) is None:
            raise
        if not (how := ended_early(folder_of(run) or ROOT)):
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


Told = tuple[list[Announced], list[Down], tuple[str, ...]]
"""Announcements, serving members without one, and before training starts the missing conditions."""


def _told_here(found: Found) -> Told | None:
    """The state of a run whose peers all report into this machine's folder; None: others know more."""
    if found.preparing:
        return [], [], ("this machine prepares model and data",)
    if found.folder is None or not found.whole_here:
        return None
    view = state_in(found.folder)
    if view.started is None:
        return [], [], tuple(map(printable, view.missing)) or ("peers load the model and the data",)
    return announced_by(view, time.time()), [], ()


def _told_by_members(found: Found) -> Told:
    whole = ticket_of(found)

    async def look(network: Libp2pNetwork, run_id: str) -> Told:
        return await announced(network, whole)

    told: Told = asyncio.run(as_member(whole, look))
    return told


def stop_run(run: str | None) -> None:
    """End a run in order: ask the command of this machine that began the run, or else one member, whose next step record
    takes the request to all, so that all stop after the same step. A run that ends meanwhile, or has ended, needs no
    stop."""
    try:
        print(_stopped(found_run(run)))
    except MuletrainError:
        if not _has_ended(folder_of(run)):
            raise
        print("the run has ended")


def _stopped(found: Found) -> str:
    """The result of a stop, in words. Raises MuletrainError."""
    if found.folder is None or not found.begun_here:
        whole = ticket_of(found)
        where = asyncio.run(as_member(whole, ask_to_stop))
        return (
            f"run {whole.run_id} ends after the current step, with a checkpoint {where}"
            if where
            else "the run has ended"
        )
    begun = not found.preparing and state_in(found.folder).started is not None
    match ask_command(found.folder):
        case "ended":
            return "the run has ended"
        case "silent":
            raise MuletrainError(f"{found.folder}: the command of the run does not answer; is it suspended?")
    if not begun:
        return f"the run in {found.folder} ends before its first step"
    return f"the run in {found.folder} ends after the current step, with a checkpoint in that folder"


async def announced(network: Libp2pNetwork, whole: Ticket) -> Told:
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


async def ask_to_stop(network: Network, run_id: str) -> str:
    """Ask the members one by one until one takes the request. Returns where the checkpoint will be, in words; empty: the
    run has ended, since all announced members are gone, or serve the run no more. Raises MuletrainError if this is
    unknown."""
    from muletrain.runtime.peer.messages import StopRun

    ended, problems = False, list[str]()
    told = sorted((await network.lookup(f"{run_id}/peers")).items())
    read = {peer: Announced.read(peer, value) for peer, value in told}
    for peer, who in read.items():
        try:
            await network.call(peer, StopRun.KIND, StopRun().pack(), timeout_s=STOP_TIMEOUT_S)
        except NetworkError as e:
            if isinstance(e, PeerUnreachable) or (isinstance(e, Refused) and NOT_SERVED in e.why):
                ended = True
                continue
            problems.append(f"{peer[-6:] if who is None else who.name}: {e.why}")
        else:
            collects = [a.name for a in read.values() if a is not None and a.collects and not a.left]
            return f"in the run folder of the machine of {collects[0] if collects else 'a member'}"
    if problems or not ended:
        raise MuletrainError(
            "; ".join(problems) or "no peer has announced itself yet; to end a run that waits, press Ctrl-C at 'start'"
        )
    return ""


def _has_ended(folder: Path | None) -> bool:
    """Does the run in ``folder``, default: this machine's newest one, end within ``ENDS_S``?"""
    logs = _newest(TICKET_FILE) or _newest("*.jsonl")
    newest = folder or (logs[-1].parent if logs else None)
    for _ in range(int(ENDS_S / POLL_S)):
        if newest is None or not events_in(newest, RunStarted, RunFinished):
            return False
        if has_ended(newest):
            return True
        time.sleep(POLL_S)
    return False


def _newest(file: str) -> list[Path]:
    """Such files in the run folders, the newest one last."""
    return sorted(ROOT.glob(f"*/{file}"), key=lambda p: p.stat().st_mtime)


def kick_peer(who: str, run: str | None) -> None:
    """Remove a member for good, and replace the ticket. Raises MuletrainError if the owner's key is not here."""
    from muletrain.network.identity import Key
    from muletrain.runs.join.removal import remove

    folder, given = _owned(run)
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


def _owned(run: str | None) -> tuple[Path, Ticket]:
    """The folder with the owner's key of the run that ``run`` names, and the run's ticket. Raises MuletrainError."""
    from muletrain.network.identity import Key

    found = found_run(run)
    ticket = ticket_of(found)
    folders = [path.parent for path in _newest(OWNER_FILE)] if found.folder is None else [found.folder]
    for folder in reversed(folders):
        if (folder / OWNER_FILE).exists() and Key.at(folder / OWNER_FILE).public == ticket.owner:
            return folder, ticket
    raise MuletrainError(
        f"no owner's key of this run under {ROOT.resolve()}: remove peers on the machine, and in the folder, where 'muletrain start' "
        f"(or 'run') was called"
    )


def folder_of(run: str | None) -> Path | None:
    """The folder that an argument RUN names; None: a ticket, or no argument."""
    return None if run is None or run.startswith(PREFIX) else Path(run)


def found_run(run: str | None) -> Found:
    """Finds the run of an argument RUN: a ticket or a run folder. None stands for the run that goes on here. Raises
    MuletrainError."""
    folder = folder_of(run)
    return find(folder) if run is None or folder is not None else Found(None, Ticket.parse(run))


def ticket_of(found: Found) -> Ticket:
    """The run's ticket. Raises MuletrainError."""
    if found.ticket is None:
        why = (
            "it is not in the run yet"
            if not found.begun_here or found.preparing
            else "a 'run' with one peer has no ticket"
        )
        raise MuletrainError(f"{found.folder}: no machine can join by this one: {why}")
    return found.ticket


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
