"""The process of one peer: ``python -m muletrain.runs.worker`` with a ``WorkerSpec`` on standard input.

Later lines on standard input are commands. ``stop`` ends the run in order (a joiner on a machine without the founder
leaves the run); ``cut NAME NAME`` drops all traffic with the named peers, ``cut`` alone ends that; ``corrupt`` damages
the next frame and gradient; ``probe`` measures the fleet; ``expect N`` begins the run once N peers are there; ``move
STAGE`` asks to serve another stage; ``at STEP PHASE EVENT`` injects a fault at that point (``runs/chaos.py``). At end
of file the starting command is gone, and the process ends at once. Signals that ask for an end are ignored
(``runs/signals.py``). All reports go to the event log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.clock import LoopClock
from muletrain.config.trusted import trust
from muletrain.errors import AdmissionError, MuletrainError, of_the_disk
from muletrain.events import (
    EventLog,
    FrameRefused,
    JoinRefused,
    MemberRemoved,
    PeerBanned,
    ProbeFailed,
    RunFinished,
)
from muletrain.network.identity import Key
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.network.memory import MemoryHub
from muletrain.network.offences import BAN_S
from muletrain.runs import signals
from muletrain.runs.chaos import Points, spoil_next
from muletrain.runs.client import Help, Helping
from muletrain.runs.guard import Guard, where_it_hangs
from muletrain.runs.host import Host
from muletrain.runs.join.founder import found
from muletrain.runs.join.newcomer import join
from muletrain.runs.join.patience import patiently
from muletrain.runs.join.removal import serve_members
from muletrain.runs.measure.vicinity import serve_sight
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.training import Training
from muletrain.runs.worker_files import (
    EXIT_ERROR,
    EXIT_NO_CHECKPOINT,
    EXIT_SKIPPED,
    LEFT,
    OWNER_FILE,
    PROTOCOL,
    SCRATCH,
)
from muletrain.runtime.core.meter import DeviceHung
from muletrain.script import look_in
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from muletrain.network.base import Network, PeerId


class Worker:
    """Builds one peer from a spec and runs the peer to the end."""

    def __init__(self, spec: WorkerSpec, log: EventLog) -> None:
        self._host = host = Host(spec, log, LoopClock())
        self._owner = Key.at(Path(spec.folder) / OWNER_FILE) if spec.role == "found" else None
        self._network: Libp2pNetwork | None = None
        self._main: asyncio.Task[None] | None = None
        self._removed = False
        self._stop = asyncio.Event()
        self._code = 0
        self._points = Points(log)
        self._training = Training(host, self._points)
        self._helping = Helping(host)

    def stop(self) -> None:
        """End in order: after the current step, or at once before training begins."""
        self._stop.set()
        self._training.stop()
        self._helping.stop()

    def at(self) -> str:
        """The current work of the device's threads, in words for an error; empty: nothing. Callable from any thread."""
        compute = self._host.compute
        jobs = () if compute is None else compute.jobs.running()
        return f" while the device is at {', '.join(repr(job.what) for job in jobs)}" if jobs else ""

    def obey(self, line: str) -> None:
        """Carry out a line from the command that started us."""
        host, peer = self._host, self._training.peer
        match line.split():
            case ["stop"]:
                self.stop()
            case ["cut", *names] if host.shaped is not None and host.roster is not None:
                host.shaped.set_partition(frozenset(m.id for m in host.roster.members() if m.name in names))
            case ["corrupt"] if self._network is not None:
                self._network.damage_next()
                if host.compute is not None:
                    spoil_next(host.compute)
            case ["probe"]:
                self._measure()
            case ["move", stage] if peer is not None and stage.isdecimal():
                peer.rebalancer.settled = False  # the rebalancer did not decide this move
                peer.move(int(stage))
            case ["at", step, phase, *_] if self._network is not None:
                self._points.add(self._network, step, phase, line.split(maxsplit=3)[-1])
            case ["expect", peers] if peers.isdecimal():
                if host.rendezvous is not None:
                    host.rendezvous.expect(int(peers))
            case _:
                host.log.note(f"not obeyed: {line.strip()[:100]!r}", "warning")

    def _measure(self) -> None:
        """Measure all peers that are ready."""
        if self._host.survey is None:
            reason = "the run has begun, or gets ready: measure before ('muletrain start --probe')"
            self._host.log.emit(ProbeFailed(reason=reason))
        else:
            self._measuring = asyncio.create_task(self._host.survey.measure())

    async def run(self) -> int:
        """Run the peer to the end. Returns the process' exit code."""
        begin = self._host.clock.now()
        with tempfile.TemporaryDirectory(prefix="mule-") as sockets:
            self._main = main = asyncio.create_task(self._run(Path(sockets)))
            early = asyncio.create_task(self._stop.wait())
            await asyncio.wait({main, early}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done() and self._training.peer is None and not self._helping.begun:
                main.cancel()
            early.cancel()
            with suppress(asyncio.CancelledError):
                await main
        if self._removed:
            raise AdmissionError(
                "the run's owner removed this peer, or renewed the ticket while it was joining; ask the owner for the "
                "current one"
            )
        if self._helping.begun:
            return self._code
        training = self._training
        reason = "all steps done" if training.complete else training.reason
        if training.unlearned and reason != LEFT:
            reason = f"{plural(training.unlearned, 'update')} in a row skipped"
            self._code = EXIT_SKIPPED
        self._host.log.emit(
            RunFinished(
                steps=training.steps,
                seconds=self._host.clock.now() - begin,
                reason=reason,
                skipped=training.skipped,
            )
        )
        return self._code

    async def _run(self, sockets: Path) -> None:
        host, spec = self._host, self._host.spec
        network: Network = MemoryHub().join(Key.new().peer_id) if spec.alone else await self._connected(sockets)
        links = host.limited(network)
        try:
            seat = await (found(host, links) if spec.role == "found" else join(host, links))
            if isinstance(seat, Help):
                await self._helping.run(seat)
                return
            written = await self._training.run(seat)
            if not written and not spec.keeps_ticket:
                self._code = EXIT_NO_CHECKPOINT
        finally:
            await host.close()
            await network.close()

    async def _connected(self, sockets: Path) -> Libp2pNetwork:
        host, spec, ticket = self._host, self._host.spec, self._host.ticket
        create = functools.partial(
            Libp2pNetwork.create,
            run_id=ticket.run_id,
            secret=ticket.secret,
            owner=self._owner or ticket.owner,
            protocol=PROTOCOL,
            folder=sockets,
            listen=spec.listen,
            port=spec.port,
            announce=spec.announce,
            initial_peers=ticket.addresses,
            on_refusal=self._refused,
            on_renewal=self._renewed,
            on_ban=lambda peer: host.log.emit(PeerBanned(peer_id=peer, seconds=BAN_S)),
            on_relay=self._relayed,
            private=spec.private,
            carries=spec.bandwidth_bytes_per_s is None,
        )
        self._network = network = await patiently(create, host.log.note)
        serve_members(network, host.names, self._stages, host.clients)
        serve_sight(network, carries=spec.bandwidth_bytes_per_s is None)
        return network

    def _stages(self) -> dict[PeerId, int]:
        """The stages of members that this peer believes alive; empty before the run begins."""
        roster = self._host.roster
        return {} if roster is None else {m.id: m.stage for m in roster.members() if roster.is_alive(m.id)}

    def _refused(self, remote: str, reason: str) -> None:
        begun = self._training.peer is not None or self._helping.begun
        kind = FrameRefused if begun else JoinRefused
        self._host.log.emit(kind(remote=remote, reason=reason))

    def _relayed(self, peer: PeerId, relay: PeerId) -> None:
        names = self._host.names()
        who, via = (names.get(p, p[-6:]) for p in (peer, relay))
        self._host.log.note(f"{who} cannot be reached directly, only through {via}", "info")

    def _renewed(self, gone: frozenset[PeerId]) -> None:
        """The owner removed peers, perhaps us."""
        if self._network is None or self._main is None:
            return  # our admitter did not know of the removal yet
        names, trust = self._host.names() | self._host.clients(), self._network.trust
        for peer in gone & names.keys():
            self._host.log.emit(MemberRemoved(peer_id=peer, name=names[peer]))
        if not trust.belongs:
            self._removed = True
            self._main.cancel()
        elif trust.secret is not None:
            self._host.hand_out(dataclasses.replace(self._host.ticket, secret=trust.secret))


async def _listen_to_parent(reader: asyncio.StreamReader, worker: Worker) -> None:
    """Obey lines on standard input. The end of the input means that the starting command is gone, and ends this
    process."""
    while line := await reader.readline():
        worker.obey(line.decode(errors="replace"))
    _tidy_up()
    os._exit(EXIT_ERROR)  # the daemon ends with us, and no process reads a report


def _tidy_up() -> None:
    """Remove the temporary folder, since a killed parent cannot."""
    if scratch := os.environ.get(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)


async def _main() -> int:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    line = await reader.readline()
    if not line:
        _tidy_up()
        return EXIT_ERROR
    spec = WorkerSpec.model_validate_json(line)
    trust(*spec.factories)
    look_in(Path(spec.folder))
    return await work(spec, lambda worker: _listen_to_parent(reader, worker))


async def work(spec: WorkerSpec, listen: Callable[[Worker], Coroutine[Any, Any, None]]) -> int:
    """Run the peer of ``spec`` to the end, while ``listen`` passes commands on. Returns the process' exit code."""
    with EventLog(Path(spec.folder) / f"{spec.name}.jsonl", spec.name) as log:
        try:
            worker = Worker(spec, log)
            beating = asyncio.create_task(Guard(log, worker.at).beat())
            parent = asyncio.create_task(listen(worker))
            code = await worker.run()
            parent.cancel()
            beating.cancel()
        except MuletrainError as e:
            log.note(str(e), "error")
            if isinstance(e, DeviceHung):
                where_it_hangs()
            return EXIT_ERROR
        except BaseException as e:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the enclosing command ends at once
            full = of_the_disk(e)
            whose = "an operation of your module failed, or this is a bug" if spec.factories else "a bug"
            log.note(full or f"{type(e).__name__}: {e} ({whose}; {spec.name}.log has the traceback)", "error")
            if full is None:
                raise
            return EXIT_ERROR
    return code


def main() -> None:
    signals.ignore()
    code = asyncio.run(_main())
    sys.stdout.flush()
    os._exit(code)  # do not wait for threads of torch and of the data loader


if __name__ == "__main__":
    main()
