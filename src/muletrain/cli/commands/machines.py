"""A run on several machines: ``start``, ``join``, ``status``, ``stop``, ``kick``, ``ticket``."""

from __future__ import annotations

import asyncio
import dataclasses
import json as jsonlib
import os
import re
import secrets
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from muletrain.cli.commands.planned import machines_of
from muletrain.cli.commands.session import POLL_S, Session
from muletrain.cli.commands.train import first_checkpoint, newest_checkpoint, opened, placed, prepare, save_config
from muletrain.cli.show.console import make_console
from muletrain.cli.show.status import Announced, furthest, status_of
from muletrain.cli.show.view import printable
from muletrain.config.schema import DataConfig
from muletrain.data.corpus import Corpus, absolute
from muletrain.errors import AdmissionError, ConfigError, DataError, MuletrainError, NetworkError, PeerUnreachable
from muletrain.events import PeerJoined, PeerLeft
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.folder import ROOT, held, new_run_folder, temporary_folder
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.worker_files import OWNER_FILE, REMOVED_FILE, TICKET_FILE, write_secret

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.network.base import Network
    from muletrain.network.identity import Key
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.join.removal import Removal

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
    plan: Path | None = None,
    strategy: str | None = None,
    name: str | None = None,
    probe: bool = False,
    share_data: bool = False,
) -> None:
    """Found a run (or go on with one) and serve one of its peers; the report comes when it ends. ``plan``,
    ``strategy``: see ``run_local``; ``share_data``: sets ``data.share``. Raises MuletrainError before anything
    starts."""
    _check_name(name)
    overrides = (*overrides, "data.share=true") if share_data else overrides
    with opened(path, overrides, "start", resume, plan, strategy) as (folder, config):
        _start(
            folder,
            config,
            listen=listen,
            port=port,
            announce=announce,
            json=json,
            resumed=resume is not None,
            name=name or _host(),
            probe=probe,
        )


def _start(
    folder: Path,
    config: RunConfig,
    *,
    listen: str,
    port: int,
    announce: tuple[str, ...],
    json: bool,
    resumed: bool,
    name: str,
    probe: bool,
) -> None:
    from muletrain.runs.measure.machine import free_memory_of_machine, own_devices

    devices = own_devices(config.compute.device)
    names = _names(name, devices)
    if unknown := _unknown(names, config):
        raise ConfigError(
            f"pipeline.seats: the plan has no machine '{unknown[0]}', as this one is called: say which it is, by --name NAME (several "
            f"GPUs are NAME-0, NAME-1 ...). It has {', '.join(machines_of(config))}"
        )
    threads = config.compute.threads or max(1, (os.cpu_count() or 1) // len(devices))
    host_memory = free_memory_of_machine(len(devices))
    with LocalFleet(folder, threads) as fleet:
        fleet.spawn(names)
        given, config = config, placed(prepare(config, quiet=json), folder)
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
                place=config.checkpoint.place,
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
            "probe": probe,
        }
        session.founder = founder.name
        try:
            with session.interruptible(), session.console:
                fleet.begin(founder.model_copy(update=first))
                ticket = session.wait_for_ticket(founder.name)
                for other in others:
                    fleet.begin(other.model_copy(update={"ticket": str(ticket)}))
                if json:
                    print(jsonlib.dumps({"kind": "ticket", "ticket": str(ticket)}), flush=True)
                session.say(f"on every other machine:\n\nmuletrain join {ticket}\n")
                if (place := config.checkpoint.place) is not None:
                    session.say(f"machines that can write to {place} themselves: --place {place}\n")
                session.say(
                    f"they must reach {ticket.ports()}: open that port, or forward it and say so (--announce)\n"
                )
                session.watch()
            session.report()
        finally:
            session.close()


def join_run(
    ticket: str,
    *,
    data: str | None,
    tokens: float = 1.0,
    place: str | None,
    stage: int | None,
    memory: float | None,
    device: str,
    threads: int | None,
    listen: str,
    port: int,
    json: bool,
    name: str | None = None,
    announce: tuple[str, ...] = (),
    private: bool = False,
    limits: Limits | None = None,
) -> None:
    """Serve until the run ends, or as long as ``limits`` allow. Raises MuletrainError with the reason when the run does
    not take us."""
    from muletrain.runs.measure.machine import free_memory_of_machine, own_devices

    Ticket.parse(ticket)
    _check_name(name)
    if private and (port or announce):
        raise ConfigError("--private: this machine opens no port then; leave --port and --announce out, or --private")
    where = "none" if data is None else _own_data(data)
    devices = own_devices(device)
    limits = limits or Limits()
    names = _names(name or f"{_host()}-{secrets.token_hex(2)}", devices)  # two machines may have one name
    host_memory = free_memory_of_machine(len(devices))
    threads = threads or max(1, (os.cpu_count() or 1) // len(devices))
    specs = [
        WorkerSpec(
            role="join",
            name=name,
            ticket=ticket,
            folder="",
            threads=threads,
            data=where,
            tokens_gib=tokens,
            place=place,
            device=own,
            stage=stage,
            memory_gib=memory,
            bandwidth_bytes_per_s=limits.share(len(devices)),
            host_memory=host_memory,
            listen=listen,
            port=_port(port, k),
            announce=_announced(announce, k),
            private=private,
            keeps_ticket=True,
        )
        for k, (name, own) in enumerate(zip(names, devices, strict=True))
    ]
    while limits.wait_until_free() and _serve(specs, limits, json=json):
        pass


def _serve(specs: list[WorkerSpec], limits: Limits, *, json: bool) -> bool:
    """Until the run ends or we leave it. True: for a pause, so that we are to come back."""
    folder = new_run_folder("join")
    with LocalFleet(folder, specs[0].threads) as fleet:
        fleet.spawn([spec.name for spec in specs])
        session = JoinSession(folder, fleet, limits, json=json)
        try:
            with session.interruptible(), session.console:
                for spec in specs:
                    fleet.begin(spec.model_copy(update={"folder": str(folder)}))
                session.watch()
            session.say(session.ended())
        except KeyboardInterrupt:
            session.say("ended at once: the others take this machine for one that died")
        finally:
            session.close()
    return session.comes_back


class Limits:
    """What a machine's owner allows."""

    def __init__(
        self, hours: float | None = None, bandwidth_mbps: float | None = None, pause_file: Path | None = None
    ) -> None:
        self.bandwidth_bytes_per_s = None if bandwidth_mbps is None else bandwidth_mbps * 1e6 / 8
        self._end = None if hours is None else time.monotonic() + hours * 3600
        self._hours, self._pause_file = hours, pause_file

    def share(self, processes: int) -> float | None:
        """Of the bandwidth, for each process of this machine [bytes/s]."""
        return None if self.bandwidth_bytes_per_s is None else self.bandwidth_bytes_per_s / processes

    @property
    def paused(self) -> bool:
        return self._pause_file is not None and self._pause_file.exists()

    def exceeded(self) -> str | None:
        """Why this machine should not train now."""
        if self._end is not None and time.monotonic() >= self._end:
            return f"the {self._hours:g} hours are over"
        return f"{self._pause_file} is there" if self.paused else None

    def wait_until_free(self) -> bool:
        """Until no pause file is there; False when the time is over, or on Ctrl-C."""
        if self.paused:
            make_console(sys.stderr).print(f"paused: joins when {self._pause_file} is gone", soft_wrap=True)
        try:
            while self.paused and (self._end is None or time.monotonic() < self._end):
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return False
        return self.exceeded() is None


def _own_data(path: str) -> str:
    """``--data`` for any working directory. Raises DataError when there is no such corpus."""
    try:
        Corpus(DataConfig(path=absolute(path)))
    except DataError as e:
        raise DataError(f"--data {path}: {str(e).removeprefix('data.path: ')}") from e
    return absolute(path)


class JoinSession(Session):
    """Ends with the run, or by leaving it in order: on Ctrl-C, or when the owner's limits say so."""

    hears_all = False

    def __init__(self, folder: Path, fleet: LocalFleet, limits: Limits, *, json: bool) -> None:
        super().__init__(folder, fleet, json=json)
        self.paused = False
        """It leaves because of the pause file."""
        self._limits = limits
        self._training = self._leaving = False
        self._left: int | None = None

    def show(self, event: Event) -> None:
        super().show(event)
        if isinstance(event, PeerJoined):  # the first event of a peer that trains
            self._training, self._asked = True, None  # a step takes the time it takes
            self._left = None  # it may have left one stage for another
        if isinstance(event, PeerLeft):
            self._left = event.step

    def poll(self) -> None:
        super().poll()
        if not self._leaving and (reason := self._limits.exceeded()) is not None:
            self.paused = self._limits.paused
            self.end_in_order(f"{reason}: ")

    def end_in_order(self, why: str = "\n") -> None:
        self._leaving = True
        self._asked = None if self._training else time.monotonic()
        self.say(
            f"{why}leaving {'after this step' if self._training else 'before the run begins'}; Ctrl-C ends at once"
        )
        self.fleet.stop()

    @property
    def comes_back(self) -> bool:
        """It left for a pause: the run may go on without it meanwhile."""
        return self.paused and not self.interrupted and (self._left is not None or not self._training)

    def ended(self) -> str:
        if self._left is not None:
            return f"left the run in order after step {self._left}"
        return "left before the run began" if self._leaving and not self._training else "the run has ended"


def show_status(ticket: str | None, *, json: bool) -> None:
    """Print what the members announced in the directory; of a run that has not begun, what it waits for. Raises
    MuletrainError when no member answers."""
    from muletrain.runs.join.client import ask_missing
    from muletrain.runtime.peer.peer import HOLDS_S

    whole = _ticket(ticket)

    async def look(network: Libp2pNetwork, run_id: str) -> tuple[list[Announced], tuple[str, ...]]:
        found = await network.directory.lookup_left(f"{run_id}/peers")
        read = (Announced.read(peer, value, HOLDS_S - left_s) for peer, (value, left_s) in found.items())
        announced = [p for p in read if p is not None and not p.left]
        missing: tuple[str, ...] = ()
        if not announced:
            with suppress(AdmissionError):  # the run ends: its members admit nobody any more
                missing = await ask_missing(network, whole.addresses)
        return sorted(announced, key=lambda p: (p.stage, p.name, p.age_s)), tuple(map(printable, missing))

    peers, missing = asyncio.run(_as_member(whole, look))
    if json:
        at = furthest(peers).model_dump() if peers else {}
        numbers = {key: at.get(key) for key in ("step", "steps", "stages", "loss", "tokens_per_s")}
        listed = [p.model_dump(exclude={"loss", "tokens_per_s", "left"}) for p in peers]
        print(jsonlib.dumps({**numbers, "missing": missing, "peers": listed}))
    else:
        make_console().print(status_of(peers, missing))


def stop_run(ticket: str | None) -> None:
    """Ask any member; the request travels in the next step record, so that everyone stops after the same step."""
    from muletrain.runtime.peer.messages import StopRun

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
    from muletrain.runs.join.removal import remove

    folder, given = _owned(ticket)
    with held(folder, OWNER_FILE, "another 'muletrain kick' is at work here; try again when it is done"):
        owner, removed = Key.at(folder / OWNER_FILE), folder / REMOVED_FILE
        before = removed.read_text(encoding="utf-8").split() if removed.exists() else []

        async def act(network: Libp2pNetwork, run_id: str) -> Removal:
            return await remove(network, given.addresses, who, frozenset(before))

        done: Removal = asyncio.run(_as_member(given, act, owner))
        replaced = str(dataclasses.replace(given, secret=done.secret))
        write_secret(folder / TICKET_FILE, replaced)
        with suppress(OSError):  # only what a later kick says depends on it
            removed.write_text("\n".join((*before, *sorted(done.out))), encoding="utf-8")
    print(f"{done.name} ({done.id[-8:]}) is out: {done.told} of {done.kept} members know, the others hear it from them")
    if done.emptied is not None:
        print(
            f"it was the only peer of stage {done.emptied}: the run steps back to its newest checkpoint when a peer of another stage can "
            f"serve that one ('fleet.adopt_after'); else it waits for a machine that joins"
        )
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
    """Enter the run's network for one question. ``owner``: the run's key, where it is. Raises PeerUnreachable when no
    member answers, and AdmissionError."""
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.worker import PROTOCOL

    if not ticket.addresses:  # with nobody to ask we would be a run of our own
        raise AdmissionError(
            "the ticket names no member of its run; ask for a ticket of 'muletrain start' or of any member"
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
                f"nobody answers at {ticket.ports()}: the run is over, or this machine cannot connect there"
            ) from None
        try:
            return await work(network, ticket.run_id)
        finally:
            await network.close()


def _names(host: str, devices: Sequence[str]) -> list[str]:
    return [host if len(devices) == 1 else f"{host}-{k}" for k in range(len(devices))]


def _check_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"\w[\w.-]{0,63}", name):
        raise MuletrainError(f"--name {name!r}: up to 64 letters, digits, '.', '_' and '-', as it names files, too")


def _unknown(names: Sequence[str], config: RunConfig) -> list[str]:
    """Of these, those that the run's plan does not have; none where nothing is planned."""
    planned = machines_of(config)
    return [name for name in names if planned and name not in planned]


def _port(port: int, peer: int) -> int:
    """A machine's peers listen on the ports from ``port`` on; 0: any free ones."""
    return port + peer if port else 0


def _announced(addresses: Sequence[str], peer: int) -> tuple[str, ...]:
    """What peer number ``peer`` of a machine says: its port is as much higher as the one it listens on. Raises
    ConfigError."""
    shifted = []
    for address in addresses:
        match = re.fullmatch(r"(/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/)(\d{1,5})", address)
        if match is None or int(match[2]) + peer > 65535:
            raise ConfigError(f"--announce {address}: write it as /ip4/1.2.3.4/tcp/4000 (or /dns4/NAME/tcp/PORT)")
        shifted.append(f"{match[1]}{int(match[2]) + peer}")
    return tuple(shifted)


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname().split(".")[0][:32], flags=re.ASCII) or "peer"
