"""``muletrain run``, ``start`` and ``join``: serve a run with the peers of this machine, in one of three roles, and report."""

from __future__ import annotations

import dataclasses
import functools
import json as jsonlib
import secrets
import signal
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from muletrain.cli.actions.opening import chosen, first_checkpoint, opened, ready, tell_of
from muletrain.cli.actions.planned import check_many, clients_of, indices_of, names_of
from muletrain.cli.actions.reading import data_table
from muletrain.cli.show.console import JsonConsole, LiveConsole, make_console
from muletrain.cli.show.final_report import final_report
from muletrain.cli.show.summary import stages_table, summary_table
from muletrain.compute.probe import pick_device
from muletrain.config.trusted import trusted
from muletrain.dashboard.sources import follow_session
from muletrain.data.corpus import Corpus, absolute
from muletrain.data.files import EveryColumn
from muletrain.data.tokens import TokenCache
from muletrain.errors import CheckpointError, ConfigError, DataError, MuletrainError
from muletrain.events import EventTail
from muletrain.model.hf_files import check_folder
from muletrain.policy.chaos import Bounds, draw, parse
from muletrain.runs.alone import Alone
from muletrain.runs.asked import cleaned_up
from muletrain.runs.assemble import RunFacts
from muletrain.runs.chaos import Injector
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.fleet import LocalFleet, threads_per_peer
from muletrain.runs.folder import held, new_run_folder
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure.machine import check_local, memory_of
from muletrain.runs.metrics import MetricsServer
from muletrain.runs.own_peers import Listening, OwnPeers, check_name, host_name
from muletrain.runs.session import Limits, Session, Silent
from muletrain.runs.signals import ENDING
from muletrain.runs.summary import summary_of
from muletrain.runs.trackers import check_packages
from muletrain.runs.worker_files import TICKET_FILE
from muletrain.timeline import check_trace, write_trace
from muletrain.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from muletrain.cli.actions.opening import Ready, Wanted
    from muletrain.config.schema import RunConfig
    from muletrain.dashboard.server import Dashboard
    from muletrain.policy.chaos import Fault
    from muletrain.runs.measure.quality import Quality
    from muletrain.runs.spec import WorkerSpec
    from muletrain.runs.view import RunView


REPORT = "report.txt"
"""File in the run folder with the whole report."""


def run_local(
    wanted: Wanted,
    *,
    json: bool,
    chaos: str | None = None,
    seed: int | None = None,
    trace: Path | None = None,
    metrics: str | None = None,
    board: Dashboard | None = None,
    verbose: bool = False,
) -> None:
    """Train with a local fleet and print the report, with its tables if ``verbose``. ``trace``: where to write a
    timeline. ``metrics``: see ``MetricsServer``. ``board``: shows the run. Raises MuletrainError before
    anything starts if the run is not possible."""
    if trace is not None:
        check_trace(trace)
        wanted = dataclasses.replace(wanted, overrides=[*wanted.overrides, "fleet.trace=true"])
    if chaos is None and seed is not None:
        raise ConfigError("--seed draws the faults of --chaos; the seed of the run is --set train.seed=N")
    with (
        _monitored(metrics) as server,
        board or nullcontext(),
        local_session(wanted, _console(json), chaos, seed or 0, metrics=server) as session,
    ):
        try:
            _serve(session, _greeting(server, board), board, verbose=verbose)
        finally:
            if trace is not None:
                write_trace(trace, EventTail(session.folder).poll())
                session.say(f"timeline of every peer: {trace} (open it at https://ui.perfetto.dev)")


def _monitored(where: str | None) -> AbstractContextManager[MetricsServer | None]:
    """The server of ``--metrics``, which serves while the context lasts."""
    return nullcontext() if where is None else MetricsServer(where)


def _greeting(server: MetricsServer | None, board: Dashboard | None, first: str = "") -> str:
    """The first lines: addresses of the servers of this command."""
    metrics = "" if server is None else f"metrics: {server.url}"
    return "\n".join(filter(None, (first, metrics, "" if board is None else f"dashboard: {board.url}")))


@contextmanager
def local_session(
    wanted: Wanted,
    console: Callable[[RunView], Silent] = Silent,
    chaos: str | None = None,
    seed: int = 0,
    *,
    metrics: MetricsServer | None = None,
) -> Iterator[Session]:
    """A session of a local fleet, ready to begin. ``chaos``: faults to inject (``policy/chaos.py``). ``metrics`` serves
    the session's."""
    began_s = time.monotonic()
    with opened(wanted, "run") as (folder, config):
        local = _Local.of(config, chaos, seed, folder)
        plan, servers, clients = local.plan, local.servers, local.clients
        with (Alone if local.alone else LocalFleet)(folder, local.threads) as fleet:
            fleet.spawn(servers + clients)  # the processes import while we tokenise
            run = ready(folder, local.config, wanted, local.check_room, reads=True).of(config.fleet)
            config, network, peers = run.prepared.config, run.prepared.config.network, local.peers
            founder, *others = _founding(peers, Listening(network.listen, 0, ()), folder, run)
            founder = founder.model_copy(
                update={"port": network.port, "announce": network.announce, "alone": local.alone}
            )
            workers = [
                worker.model_copy(update={"client": worker.name in clients, "fleet_index": n, "faults": bool(plan)})
                for worker, n in zip((founder, *others), indices_of(config), strict=True)
            ]
            session = Session(
                "run",
                folder,
                fleet,
                workers,
                console,
                stages=config.fleet.stages,
                begun=run.save,
                config=config,
                metrics=metrics,
            )
            session.chaos = Injector(plan, seed, fleet, folder, servers, clients) if plan else None
            tell_of(run.prepared, folder, peers.devices, run.first_step, "run", time.monotonic() - began_s)
            yield session


@dataclasses.dataclass(frozen=True)
class _Local:
    """A local fleet in ``folder``, before anything is read or started. ``alone``: its one peer works in this process."""

    folder: Path
    config: RunConfig
    plan: Sequence[Fault]
    servers: list[str]
    clients: list[str]

    @classmethod
    def of(cls, config: RunConfig, chaos: str | None, seed: int, folder: Path) -> _Local:
        """Raises ConfigError."""
        config = config.local()
        check_many(config)
        check_packages(config)
        plan = _chaos_plan(chaos, seed, config) if chaos is not None else ()
        return cls(folder, config, plan, names_of(config), clients_of(config))

    @property
    def alone(self) -> bool:
        return len(self.servers + self.clients) == 1 and not self.plan  # else a newcomer may join

    @property
    def threads(self) -> int:
        """CPU threads per peer."""
        return threads_per_peer(self.config.compute.threads, len(self.servers + self.clients))

    @functools.cached_property
    def peers(self) -> OwnPeers:
        """The peers, with the memory that is free at the first look."""
        return OwnPeers.dealt(self.servers + self.clients, self.config.compute.device, self.threads)

    def check_room(self, config: RunConfig) -> None:
        """Raises CapacityError if the peers cannot serve all stages of ``config``, the resolved configuration."""
        place = Path(config.swap.folder or self.folder)
        while not place.exists():  # a folder that is to be made
            place = place.parent
        devices = self.peers.devices[: len(self.servers)]
        needs = RunFacts.of(config, alone=self.alone).needs()
        check_local(needs, devices, config.compute.memory, self.peers.host_memory, place)


def dry_run(
    wanted: Wanted, command: Literal["run", "start"], *, json: bool, chaos: str | None = None, seed: int = 0
) -> None:
    """Print what ``command`` would train, in which stages, and on what data; start and keep nothing. Raises
    MuletrainError where the run would."""
    began_s = time.monotonic()
    with opened(wanted, command) as (folder, config):
        alone = False
        if command == "run":
            local = _Local.of(config, chaos, seed, folder)
            peers, alone = local.peers, local.alone
            run = ready(folder, local.config, wanted, local.check_room, reads=True)
        else:
            check_packages(config)
            peers = OwnPeers.on(host_name(), config.compute.device, config.compute.threads)
            run = ready(folder, config, wanted)
        facts, data, config = (
            dataclasses.replace(run.prepared.facts, alone=alone),
            run.prepared.data,
            run.prepared.config,
        )
        seconds = time.monotonic() - began_s
        summary = summary_of(facts, data, chosen(peers.devices), run.first_step, command, seconds)
        if json:
            print(summary.to_json())
            return
        device = pick_device(peers.devices[0])
        offer = memory_of(device, config.compute.memory, peers.devices.count(peers.devices[0]), peers.host_memory)
        console = make_console()
        console.print(summary_table(summary), "", stages_table(facts, offer))
        if isinstance(data, TokenCache):
            console.print("", data_table(facts, data))
        console.print(f"a dry run: nothing was started (prepared in {format_duration(seconds)})")


def _chaos_plan(chaos: str, seed: int, config: RunConfig) -> tuple[Fault, ...]:
    bounds = Bounds(tuple(names_of(config)), config.fleet.stages, config.train.steps, tuple(clients_of(config)))
    return draw(seed, bounds) if chaos.strip() == "random" else parse(chaos, bounds)


def start_run(
    wanted: Wanted,
    *,
    listening: Listening,
    json: bool,
    name: str | None = None,
    probe: bool = False,
    metrics: str | None = None,
    board: Dashboard | None = None,
    verbose: bool = False,
) -> None:
    """Found or continue a run, and serve with this machine's peers; print the report at the end, with its tables if
    ``verbose``. ``metrics``: see ``MetricsServer``. ``board``: shows the run. Raises MuletrainError before anything starts."""
    check_name(name)
    began_s = time.monotonic()
    with _monitored(metrics) as server, board or nullcontext(), opened(wanted, "start") as (folder, config):
        check_packages(config)
        name = name or config.network.name
        peers = OwnPeers.on(name or host_name(), config.compute.device, config.compute.threads)
        _check_planned(peers.names, config.pipeline.machines, "pipeline.seats")
        _check_planned(peers.names, config.hub.servers, "hub.seats")
        named = bool(listening.port)
        listening = listening._replace(
            port=listening.port or config.network.port, announce=listening.announce or config.network.announce
        )
        if wanted.resume is not None and not named and not listening.free(len(peers.names)):
            text = f"port {listening.port} is taken: this machine listens on another one (--port chooses)"
            make_console(sys.stderr).print(text, soft_wrap=True)
            listening = listening._replace(port=0)
        with LocalFleet(folder, peers.threads) as fleet:
            fleet.spawn(peers.names)  # the processes import while we tokenise
            run = ready(folder, config, wanted)
            founder, *others = _founding(peers, listening, folder, run, joinable=True)
            workers = [founder.model_copy(update={"probe": probe}), *others]

            def begun() -> None:
                port = listening.port or (0 if listening.announce else _port_of(folder))
                run.save(name=name, port=port, announce=listening.announce)

            session = Session(
                "start",
                folder,
                fleet,
                workers,
                _console(json),
                begun=begun,
                config=run.prepared.config,
                metrics=server,
            )
            tell_of(run.prepared, folder, peers.devices, run.first_step, "start", time.monotonic() - began_s)
            _serve(session, _greeting(server, board), board, verbose=verbose)


def _port_of(folder: Path) -> int:
    """The port in the first address of the ticket in ``folder``: of the founder, which wrote it."""
    founder, *_ = Ticket.parse((folder / TICKET_FILE).read_text(encoding="utf-8")).addresses
    return int(founder.split("/")[4])


def _check_planned(names: list[str], planned: list[str], field: str) -> None:
    if unknown := [name for name in names if planned and name not in planned]:
        raise ConfigError(
            f"{field}: the plan has no machine '{unknown[0]}' there; give this machine's name in the plan by --name NAME "
            f"(several GPUs are NAME-0, NAME-1 ...). The plan has {', '.join(planned)}"
        )


def _invite(session: Session, ticket: Ticket) -> None:
    """Tell people how machines join."""
    if isinstance(session.console, JsonConsole):
        print(jsonlib.dumps({"kind": "ticket", "ticket": str(ticket)}), flush=True)
    names = ", ".join(worker.name for worker in session.workers)
    session.say(f"This machine is {names}. Run this on every other one:\n\nmuletrain join {ticket}\n")
    if (place := session.workers[0].place) is not None:
        session.say(f"On machines that can write to {place} themselves, add: --place {place}\n")
    session.say(
        f"Other machines must reach {ticket.ports()}: open that port, or forward it and start with --announce.\n"
    )


def _founding(
    peers: OwnPeers, listening: Listening, folder: Path, run: Ready, *, joinable: bool = False
) -> list[WorkerSpec]:
    """The work of a founding machine's peers, the founder's first. ``joinable``: further machines may join, and lack the
    source of the model's first weights."""
    config, checkpoint, ticket = run.prepared.config, run.checkpoint, Ticket.new_run(folder)
    if joinable and checkpoint is None and config.model.given is not None:
        checkpoint = first_checkpoint(folder, config, ticket.run_id)
    founder, *others = peers.specs(
        listening,
        ticket=str(ticket),
        folder=str(folder),
        data="config",
        place=config.checkpoint.place,
        precision=config.compute.precision.value,
        memory_gib=config.compute.memory,
        swap_folder=config.swap.folder,
    )
    resume = None if checkpoint is None else str(checkpoint)
    own = {"role": "found", "config": config.model_dump_json(by_alias=True), "resume": resume}
    return [founder.model_copy(update=own), *others]


def join_run(
    ticket: str,
    *,
    listening: Listening,
    json: bool,
    name: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    data: str | None = None,
    private: bool = False,
    limits: Limits | None = None,
    metrics: str | None = None,
    board: Dashboard | None = None,
    **work: Any,
) -> None:
    """Serve until the run ends, or as long as ``limits`` allow. ``metrics``: see ``MetricsServer``. ``work``: further
    fields of ``WorkerSpec``. Raises MuletrainError with the reason if the run does not admit this machine."""
    Ticket.parse(ticket)
    check_name(name)
    if private and (listening.port or listening.announce):
        raise ConfigError("--private opens no port; leave out --port and --announce, or --private")
    where = "none" if data is None else _own_data(data)
    if work.get("model") is not None:
        work["model"] = _own_model(work["model"])
    limits = limits or Limits()
    # two machines may have one host name
    peers = OwnPeers.on(name or f"{host_name()}-{secrets.token_hex(2)}", device, threads)
    specs = peers.specs(
        listening,
        ticket=ticket,
        folder="",
        data=where,
        bandwidth_bytes_per_s=limits.share(len(peers.names)),
        private=private,
        keeps_ticket=True,
        **work,
    )
    hint = "; --name chooses another name" if name is None else ""
    comes_back = True
    with cleaned_up(), _monitored(metrics) as server, board or nullcontext():
        while comes_back and limits.wait_until_free(lambda text: make_console(sys.stderr).print(text, soft_wrap=True)):
            folder = new_run_folder("join")
            workers = [spec.model_copy(update={"folder": str(folder)}) for spec in specs]
            with held(folder), LocalFleet(folder, peers.threads) as fleet:
                fleet.spawn(peers.names)
                session = Session("join", folder, fleet, workers, _console(json), limits=limits, metrics=server)
                greeting = f"this machine is {', '.join(peers.names)}{hint}"
                _serve(session, _greeting(server, board, greeting), board)
            comes_back = session.comes_back


def _own_data(path: str) -> str:
    """``--data`` for any working directory. Raises DataError if there is no such corpus."""
    try:
        Corpus(absolute(path), EveryColumn())
    except DataError as e:
        raise DataError(f"--data {path}: {str(e).removeprefix('data.path: ')}") from e
    return absolute(path)


def _own_model(path: str) -> str:
    """``--model`` for any working directory. Raises CheckpointError if it is no folder with a model's weights."""
    try:
        check_folder(Path(absolute(path)), weights=True)
    except CheckpointError as e:
        raise CheckpointError(
            f"--model: {str(e).partition(';')[0]}; give the folder of the run's model, or leave --model out: other peers send the "
            f"weights"
        ) from e
    return absolute(path)


def _console(json: bool) -> type[JsonConsole] | type[LiveConsole]:
    return JsonConsole if json else LiveConsole


def _serve(session: Session, greeting: str = "", board: Dashboard | None = None, *, verbose: bool = False) -> None:
    """Show a session from the beginning to the end, and report. Raises SystemExit with an exit code that is not 0, and
    the errors of ``Session.check``."""
    try:
        if board is not None:
            board.show(follow_session(session))
        with session.interruptible():
            with session.console:
                if isinstance(session.console, JsonConsole):
                    print(jsonlib.dumps({"kind": "folder", "folder": str(session.folder.resolve())}), flush=True)
                if greeting:
                    session.say(greeting)
                ticket = session.begin()
                if session.role == "start" and ticket is not None:
                    _invite(session, ticket)
                session.watch()
            report(session, verbose=verbose)
            if board is not None and not isinstance(session.console, JsonConsole):
                again = f"muletrain dashboard {session.folder}"
                make_console().print(
                    f"the page ended with the command; {again} shows it again", soft_wrap=True, markup=False
                )
        session.check()
    finally:
        session.close()
    if code := session.exit_code():
        raise SystemExit(code)


def report(session: Session, *, verbose: bool = False) -> None:
    """Print the final report, with an evaluation of the last checkpoint, and write the report to the run folder.
    ``verbose``: print its tables, too. A machine that joined only says how its part ended."""
    if session.role == "join":
        for text in filter(None, (session.goodbye(), session.go_on())):
            session.say(text)
        return
    session.bring_home()
    session.asked.at_once = ENDING
    hurries = session.asked.number not in (0, signal.SIGINT)  # a machine that is taken away kills slow processes
    evaluation, texts = None, list[str]()
    if session.checkpoint is not None and not hurries:
        session.say("measuring the model on held-out data, for a minute or two at most (Ctrl-C leaves that out)")
        evaluation, texts = session.evaluate()
    folder = session.folder
    paths = {
        "run folder": folder,
        "events": folder / "*.jsonl",
        "logs": folder / "*.log",
        **({} if session.board is None else {"tensorboard": session.board}),
        **({} if session.newest is None else {"checkpoint": session.newest}),
    }
    commands = _next(session, evaluation)
    with suppress(OSError), (folder / REPORT).open("w", encoding="utf-8") as file:
        make_console(file).print(final_report(session.view, evaluation, texts, paths, commands), crop=False)
        paths["report"] = folder / REPORT
    if not isinstance(session.console, JsonConsole):
        shown = final_report(session.view, evaluation, texts, paths, commands, tables=verbose)
        make_console().print(shown, crop=False)


def _next(session: Session, evaluation: Quality | None) -> list[str]:
    """Commands that go on with the run, or use its model."""
    if session.newest is None or session.unlearned:
        return []
    folder, checkpoint = session.folder, _readable(session.newest)
    compressed = checkpoint is not None and checkpoint.spec.compression is not None
    own_loss = evaluation is not None and evaluation.own_loss
    commands = [how] if (how := session.go_on()) else []
    if not own_loss:
        prompt, gives = (
            ("Hello!", "get an answer") if checkpoint and checkpoint.config.data.counts else ("The ", "more text")
        )
        commands.append(f'muletrain generate {folder} "{prompt}"  # {gives}')
    if not compressed:
        named = "".join(f" --factory {name}" for name in trusted()) if own_loss else ""
        adapter = checkpoint is not None and checkpoint.config.adapter.rank is not None
        to, gives = (
            ("my-adapter", "for peft; --merge: for transformers") if adapter else ("my-model", "for transformers")
        )
        commands.append(f"muletrain export {folder} --hf {to}{named}  # {'its state_dict' if own_loss else gives}")
    return commands


def _readable(folder: Path) -> Checkpoint | None:
    """The checkpoint; None if it cannot be read."""
    try:
        return Checkpoint.open(folder)
    except MuletrainError:
        return None
