"""A run on several machines: ``start``, ``join``, ``status``, ``stop``, ``kick``, ``ticket``."""

from __future__ import annotations

import asyncio
import dataclasses
import json as jsonlib
import os
import re
import secrets
import signal
import socket
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.cli.console import make_console
from muletrain.cli.session import Session
from muletrain.cli.status import Announced, status_of
from muletrain.cli.train import first_checkpoint, newest_checkpoint, opened, prepare, save_config
from muletrain.cli.view import printable
from muletrain.config.schema import DataConfig
from muletrain.data.corpus import Corpus, absolute
from muletrain.errors import AdmissionError, ConfigError, DataError, MuletrainError, NetworkError
from muletrain.events import PeerJoined
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.folder import ROOT, held, new_run_folder
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.ticket import Ticket
from muletrain.runs.worker_files import OWNER_FILE, TICKET_FILE, write_secret

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from types import FrameType

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.network.base import Network
    from muletrain.network.identity import Key
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.removal import Removal

STOP_TIMEOUT_S = 10.0


def start_run(
    path: Path | None,
    overrides: Sequence[str],
    *,
    listen: str,
    port: int,
    announce: tuple[str, ...],
    json: bool,
    resume: Path | None = None,
) -> None:
    """Found a run (or go on with one) and serve one of its peers; the report comes when it ends. Raises MuletrainError before
    anything starts."""
    with opened(path, overrides, "start", resume) as (folder, config):
        _start(folder, config, listen=listen, port=port, announce=announce, json=json, resumed=resume is not None)


def _start(
    folder: Path, config: RunConfig, *, listen: str, port: int, announce: tuple[str, ...], json: bool, resumed: bool
) -> None:
    from muletrain.runs.machine import free_memory_of_machine, own_devices

    devices = own_devices(config.compute.device)
    names = _names(_host(), devices)
    threads = config.compute.threads or max(1, (os.cpu_count() or 1) // len(devices))
    host_memory = free_memory_of_machine(len(devices))
    with LocalFleet(folder, threads) as fleet:
        fleet.spawn(names)
        given, config = config, prepare(config, quiet=json)
        run = Ticket.new_run(folder)
        checkpoint = newest_checkpoint(folder, config) if resumed else None
        if checkpoint is None and config.model.from_ is not None:
            checkpoint = first_checkpoint(folder, config, run.run_id, quiet=json)
        save_config(folder, given)
        session = Session(folder, fleet, json=json)
        port, announce = port or config.network.port, announce or config.network.announce
        founder, *others = [
            WorkerSpec(
                role="join",
                name=name,
                ticket="",
                folder=str(folder),
                threads=threads,
                data="config",
                device=own,
                memory_gib=config.compute.memory,
                host_memory=host_memory,
                listen=listen,
                port=_port(port, k),
                announce=_announced(announce, k),
            )
            for k, (name, own) in enumerate(zip(names, devices, strict=True))
        ]
        first = {
            "role": "found",
            "ticket": str(run),
            "config": config.model_dump_json(by_alias=True),
            "resume": None if checkpoint is None else str(checkpoint),
        }
        try:
            with session.interruptible("the run"), session.console:
                fleet.begin(founder.model_copy(update=first))
                ticket = session.wait_for_ticket(founder.name)
                for other in others:
                    fleet.begin(other.model_copy(update={"ticket": str(ticket)}))
                if json:
                    print(jsonlib.dumps({"kind": "ticket", "ticket": str(ticket)}), flush=True)
                session.say(f"on every other machine:\n\nmuletrain join {ticket}\n")
                session.watch()
            session.report()
        finally:
            session.close()


def join_run(
    ticket: str,
    *,
    data: str | None,
    stage: int | None,
    memory: float | None,
    device: str,
    threads: int | None,
    listen: str,
    port: int,
    json: bool,
    name: str | None = None,
    announce: tuple[str, ...] = (),
) -> None:
    """Serve until the run ends. Raises MuletrainError with the reason when the run does not take us."""
    from muletrain.runs.machine import free_memory_of_machine, own_devices

    Ticket.parse(ticket)
    if name is not None and not re.fullmatch(r"\w[\w.-]{0,63}", name):
        raise MuletrainError(f"--name {name!r}: up to 64 letters, digits, '.', '_' and '-', as it names files, too")
    where = "none" if data is None else _own_data(data)
    devices = own_devices(device)
    folder = new_run_folder("join")
    names = _names(name or f"{_host()}-{secrets.token_hex(2)}", devices)  # two machines may have one name
    host_memory = free_memory_of_machine(len(devices))
    threads = threads or max(1, (os.cpu_count() or 1) // len(devices))
    with LocalFleet(folder, threads) as fleet:
        fleet.spawn(names)
        session = JoinSession(folder, fleet, json=json)
        try:
            with session.interruptible("the run", orderly=False), session.leaving_before_the_start(), session.console:
                for k, (name, own) in enumerate(zip(names, devices, strict=True)):
                    fleet.begin(
                        WorkerSpec(
                            role="join",
                            name=name,
                            ticket=ticket,
                            folder=str(folder),
                            threads=threads,
                            data=where,
                            device=own,
                            stage=stage,
                            memory_gib=memory,
                            host_memory=host_memory,
                            listen=listen,
                            port=_port(port, k),
                            announce=_announced(announce, k),
                            keeps_ticket=True,
                        )
                    )
                session.watch()
            if not session.training and session.left:
                session.say("left before the run began")
        except KeyboardInterrupt:
            session.say("left the run")
        finally:
            session.close()


def _own_data(path: str) -> str:
    """``--data`` for any working directory. Raises DataError when there is no such corpus."""
    try:
        Corpus(DataConfig(path=absolute(path)))
    except DataError as e:
        raise DataError(f"--data {path}: {str(e).removeprefix('data.path: ')}") from e
    return absolute(path)


class JoinSession(Session):
    """Ends with the run, or by leaving it."""

    hears_all = False
    training = False
    left = False

    def show(self, event: Event) -> None:
        super().show(event)
        if isinstance(event, PeerJoined):  # the first event of a peer that trains
            self.training = True
            if self.left and self._asked is not None:
                self._asked = None
                self.say(
                    "the run began at that very moment: leaving it now counts as a machine that died; once more to leave"
                )

    @contextmanager
    def leaving_before_the_start(self) -> Iterator[None]:
        """Until training begins, Ctrl-C (or SIGTERM) gives our seat back; inside ``interruptible``, which knows what comes later."""
        later = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

        def interrupt(number: int, frame: FrameType | None) -> None:
            handler = later[signal.Signals(number)]
            if self._interrupts == 0 and not self.training:
                self._interrupts, self.left, self._asked = 1, True, time.monotonic()
                self.say("\nleaving before the run begins; once more to end at once")
                self.fleet.stop()
            elif callable(handler):
                handler(number, frame)

        for number in later:
            signal.signal(number, interrupt)
        yield  # interruptible puts everything back


def show_status(ticket: str | None, *, json: bool) -> None:
    """Print what the members announced in the directory; of a run that has not begun, what it waits for."""
    from muletrain.runs.lobby import ask_missing

    whole = _ticket(ticket)

    async def look(network: Network, run_id: str) -> tuple[list[Announced], tuple[str, ...]]:
        found = await network.lookup(f"{run_id}/peers")
        announced = [p for p in (Announced.read(peer, value) for peer, value in found.items()) if p is not None]
        missing = () if announced else await ask_missing(network, whole.addresses)
        return sorted(announced, key=lambda p: (p.stage, p.name)), tuple(map(printable, missing))

    peers, missing = asyncio.run(_as_member(whole, look))
    if json:
        furthest = max(peers, key=lambda p: p.step).model_dump() if peers else {}
        numbers = {key: furthest.get(key) for key in ("step", "steps", "stages", "loss", "tokens_per_s")}
        print(jsonlib.dumps({**numbers, "missing": missing, "peers": [p.model_dump() for p in peers]}))
    else:
        make_console().print(status_of(peers, missing))


def stop_run(ticket: str | None) -> None:
    """Ask any member; the request travels in the next step record, so that everyone stops after the same step."""
    from muletrain.swarm.messages import StopRun

    async def ask(network: Network, run_id: str) -> str:
        problems = []
        for peer in sorted(await network.lookup(f"{run_id}/peers")):
            try:
                await network.call(peer, StopRun.KIND, StopRun().pack(), timeout_s=STOP_TIMEOUT_S)
            except NetworkError as e:
                problems.append(str(e))
            else:
                return peer
        raise MuletrainError(
            "; ".join(problems) or "no peer has announced itself yet; end a waiting run with Ctrl-C at 'start'"
        )

    asyncio.run(_as_member(_ticket(ticket), ask))
    print("the run ends after the step it is in; the checkpoint goes to the run folder of 'start'")


def kick_peer(who: str, ticket: str | None) -> None:
    """Remove a member for good, where the run's owner is: the others go on without it, and the ticket is replaced."""
    from muletrain.network.identity import Key
    from muletrain.runs.removal import remove

    folder, given = _owned(ticket)
    with held(folder, OWNER_FILE, "another 'muletrain kick' is at work here; try again when it is done"):
        owner = Key.at(folder / OWNER_FILE)

        async def act(network: Libp2pNetwork, run_id: str) -> Removal:
            return await remove(network, given.addresses, who)

        done: Removal = asyncio.run(_as_member(given, act, owner))
        replaced = str(dataclasses.replace(given, secret=done.secret))
        write_secret(folder / TICKET_FILE, replaced)
    print(f"{done.name} ({done.id[-8:]}) is out: {done.told} of {done.kept} members know, the others hear it from them")
    if done.unproven:
        print(f"out, too, as no member that answered had met them: {', '.join(done.unproven)}; they may join again")
    print(f"the old ticket admits nobody any more; the new one:\n\nmuletrain join {replaced}")


def _owned(ticket: str | None) -> tuple[Path, Ticket]:
    """The folder with the owner's key, of the run of ``ticket`` or of the newest. Raises MuletrainError."""
    from muletrain.network.identity import Key

    found = sorted(ROOT.glob(f"*/{OWNER_FILE}"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in found:
        own = path.parent / TICKET_FILE
        if ticket is None and own.exists():
            return path.parent, Ticket.parse(own.read_text(encoding="utf-8"))
        if ticket is not None and Key.at(path).public == Ticket.parse(ticket).owner:
            return path.parent, Ticket.parse(ticket)
    raise MuletrainError(
        f"no key of {'this' if ticket else 'a running'} run's owner under {ROOT.resolve()}: only where 'muletrain start' (or 'run') "
        f"was called can a peer be removed"
    )


def own_ticket() -> str:
    """The newest ticket under ``runs/``. Raises MuletrainError when this machine is in no run."""
    found = sorted(ROOT.glob(f"*/{TICKET_FILE}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise MuletrainError(
            f"no running run under {ROOT.resolve()}; give the ticket, or call from where 'start' or 'join' was called"
        )
    return found[-1].read_text(encoding="utf-8").strip()


def _ticket(text: str | None) -> Ticket:
    return Ticket.parse(text or own_ticket())


async def _as_member(
    ticket: Ticket, work: Callable[[Libp2pNetwork, str], Awaitable[Any]], owner: Key | None = None
) -> Any:
    """Enter the run's network for one question. ``owner``: the run's key, where it is."""
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.worker import PROTOCOL

    if not ticket.addresses:  # with nobody to ask we would be a run of our own
        raise AdmissionError(
            "the ticket names no member of its run; ask for a ticket of 'muletrain start' or of any member"
        )
    with tempfile.TemporaryDirectory(prefix="mule-") as folder:
        network = await Libp2pNetwork.create(
            run_id=ticket.run_id,
            secret=ticket.secret,
            owner=owner or ticket.owner,
            protocol=PROTOCOL,
            folder=Path(folder),
            listen="0.0.0.0",
            initial_peers=ticket.addresses,
            visitor=True,
        )
        try:
            return await work(network, ticket.run_id)
        finally:
            await network.close()


def _names(host: str, devices: Sequence[str]) -> list[str]:
    return [host if len(devices) == 1 else f"{host}-{k}" for k in range(len(devices))]


def _port(port: int, peer: int) -> int:
    """A machine's peers listen on the ports from ``port`` on; 0: any free ones."""
    return port + peer if port else 0


def _announced(addresses: Sequence[str], peer: int) -> tuple[str, ...]:
    """What peer number ``peer`` of a machine says: its port is as much higher as the one it listens on. Raises ConfigError."""
    shifted = []
    for address in addresses:
        match = re.fullmatch(r"(/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/)(\d{1,5})", address)
        if match is None or int(match[2]) + peer > 65535:
            raise ConfigError(f"--announce {address}: write it as /ip4/1.2.3.4/tcp/4000 (or /dns4/NAME/tcp/PORT)")
        shifted.append(f"{match[1]}{int(match[2]) + peer}")
    return tuple(shifted)


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname().split(".")[0][:32], flags=re.ASCII) or "peer"
