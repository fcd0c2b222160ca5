"""``muletrain run``: a local fleet from a configuration to a final report."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.progress import Progress

from muletrain.cli.commands.planned import check_many, indices_of, names_of, planned
from muletrain.cli.commands.session import Session
from muletrain.cli.show.console import make_console
from muletrain.config.dump import dump_toml
from muletrain.config.fleet import load_fleet
from muletrain.config.load import load_located, located
from muletrain.data.corpus import absolute
from muletrain.errors import ConfigError, MuletrainError
from muletrain.events import EventTail
from muletrain.policy.chaos import Bounds, draw, parse
from muletrain.runs.chaos import Injector
from muletrain.runs.fleet import LocalFleet, threads_per_peer
from muletrain.runs.folder import ROOT, held, new_run_folder
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.worker_files import OWNER_FILE, TICKET_FILE
from muletrain.timeline import check_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from muletrain.config.schema import RunConfig, Section
    from muletrain.policy.chaos import Fault


def run_local(
    path: Path | None,
    overrides: Sequence[str],
    *,
    json: bool,
    resume: Path | None = None,
    chaos: str | None = None,
    seed: int | None = None,
    trace: Path | None = None,
    plan: Path | None = None,
    strategy: str | None = None,
) -> None:
    """``plan``: a file with strategy, stages and machines, of which ``strategy`` is taken (default: the recommended
    one). ``chaos``: faults to inject (``policy/chaos.py``). ``trace``: where to write a timeline. Raises MuletrainError
    for what cannot run, before anything is started."""
    if trace is not None:
        check_trace(trace)
        overrides = [*overrides, "fleet.trace=true"]
    if chaos is None and seed is not None:
        raise ConfigError("--seed draws the faults of --chaos; for the run's own seed use --set train.seed=N")
    with opened(path, overrides, "run", resume, plan, strategy) as (folder, config):
        config = config.local()
        check_many(config)
        faults = _chaos_plan(chaos, seed or 0, config) if chaos is not None else ()
        try:
            _run_local(folder, config, json=json, resumed=resume is not None, plan=faults, seed=seed or 0)
        finally:
            if trace is not None:
                write_trace(trace, EventTail(folder).poll())


def _chaos_plan(chaos: str, seed: int, config: RunConfig) -> tuple[Fault, ...]:
    bounds = Bounds(tuple(names_of(config)), config.fleet.stages, config.train.steps)
    return draw(seed, bounds) if chaos.strip() == "random" else parse(chaos, bounds)


def _run_local(
    folder: Path, config: RunConfig, *, json: bool, resumed: bool, plan: tuple[Fault, ...], seed: int
) -> None:
    from muletrain.runs.checkpoint import Checkpoint

    names = names_of(config)
    threads = threads_per_peer(config.compute.threads, len(names))
    with LocalFleet(folder, threads) as fleet:
        fleet.spawn(names)  # they import while we tokenise
        workers = _workers(config, folder, names, threads)
        given, config = config, placed(prepare(config, quiet=json), folder)
        checkpoint = newest_checkpoint(folder, config) if resumed else None
        if checkpoint is not None:
            config = Checkpoint.open(checkpoint).same_precision(config)
        save_config(folder, given)
        session = Session(folder, fleet, json=json)
        session.chaos = Injector(plan, seed, fleet, folder, names) if plan else None
        try:
            with session.interruptible(), session.console:
                _begin(session, config, workers, checkpoint)
                session.watch(whole=True)
            session.report()
        finally:
            session.close()


@contextmanager
def opened(
    path: Path | None,
    overrides: Sequence[str],
    name: str,
    resume: Path | None,
    plan: Path | None = None,
    choice: str | None = None,
) -> Iterator[tuple[Path, RunConfig]]:
    """The run folder, ours until the end, and the configuration: of a new run (as ``plan`` says, if there is one), or
    of the one to go on with. Raises MuletrainError."""
    if resume is not None and plan is not None:
        raise ConfigError(f"--plan {plan}: a run goes on with the plan that it has; begin another one, or leave it out")
    if choice is not None and plan is None:
        raise ConfigError("--strategy chooses among those of a plan: give it by --plan")
    if resume is not None and path is not None:
        raise ConfigError(f"{path}: a run goes on with its own configuration; change what may change by --set")
    if resume is not None and not (resume / "config.toml").is_file():
        raise MuletrainError(f"{resume}: not a run folder (it has no config.toml); give one from {ROOT}/")
    given, origins = load_located(path if resume is None else resume / "config.toml", overrides)
    with located(origins):
        config = anchored(given if plan is None else planned(given, plan, choice, spares=name == "run"))
    folder = new_run_folder(path.stem if path is not None else name) if resume is None else resume
    try:
        with held(folder), located(origins):
            for secret in (TICKET_FILE, OWNER_FILE):
                (folder / secret).unlink(missing_ok=True)  # of a process that was killed
            if resume is None:
                save_config(folder, config)
            yield folder, config
    finally:
        if resume is None and not any(folder.glob("*.jsonl")):  # nobody was told to begin: nothing worth keeping
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                ROOT.rmdir()  # unless other runs are in it


def anchored(config: RunConfig) -> RunConfig:
    """``config`` with every path absolute: a run goes on, and its model is evaluated, from any working directory."""
    model, data, profile = config.model, config.data, config.fleet.profile
    own: dict[str, str | None] = {"path": absolute(data.path), "cache": data.cache and _absolute(data.cache)}
    if os.path.exists(os.path.expanduser(data.tokenizer)):  # else a Hugging Face name
        own["tokenizer"] = _absolute(data.tokenizer)
    sections: dict[str, Section] = {"data": data.model_copy(update=own)}
    if model.from_ is not None:
        sections["model"] = model.model_copy(update={"from_": _absolute(model.from_)})
    if profile is not None and os.path.exists(profile):  # else a shipped one
        sections["fleet"] = config.fleet.model_copy(update={"profile": _absolute(profile)})
    if config.checkpoint.place is not None and "://" not in config.checkpoint.place:
        sections["checkpoint"] = config.checkpoint.model_copy(update={"place": _absolute(config.checkpoint.place)})
    return config.model_copy(update=sections)


def placed(config: RunConfig, folder: Path) -> RunConfig:
    """``checkpoint.place`` may be many runs' place: this one's part of it has the name of the run folder."""
    place = config.checkpoint.place
    if place is None:
        return config
    own = {"place": f"{place.rstrip('/')}/{folder.resolve().name}"}
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=own)})


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def save_config(folder: Path, config: RunConfig) -> None:
    """What the next ``--resume`` goes by; never half written."""
    partial = folder / ".config.toml.partial"
    partial.write_text(dump_toml(config), encoding="utf-8")
    partial.replace(folder / "config.toml")


def newest_checkpoint(folder: Path, config: RunConfig) -> Path | None:
    """Where the run goes on from; None: from the beginning. Raises MuletrainError if it is over or ``config`` is
    another run's."""
    from muletrain.runs.checkpoint import Checkpoint, bring_newest_home

    console = make_console(sys.stderr)
    if config.checkpoint.place is not None:
        bring_newest_home(config.checkpoint.place, folder)
    checkpoint = Checkpoint.newest_intact(folder, lambda text: console.print(text, soft_wrap=True))
    if checkpoint is None and any((folder / "checkpoints").glob("step-*")):
        raise MuletrainError(f"{folder}: none of its checkpoints can be used (see above); begin another run")
    if checkpoint is None:
        console.print(f"{folder} has no complete checkpoint: the run begins again", soft_wrap=True)
        return None
    checkpoint.check_same_run(config)
    if checkpoint.step >= config.train.steps:
        raise MuletrainError(
            f"{folder}: all {checkpoint.step} steps are done; give more by --set train.steps=N (the learning rate's schedule stretches)"
        )
    console.print(f"going on after step {checkpoint.step} ({checkpoint.folder})", soft_wrap=True)
    return checkpoint.folder


def prepare(config: RunConfig, *, quiet: bool) -> RunConfig:
    """Check that the model can be built and cut, its device and profile are there, and tokenise the corpus. The
    configuration with nothing left to look up."""
    from muletrain.compute.probe import pick_device
    from muletrain.data.tokens import TokenCache
    from muletrain.runs.assemble import RunFacts, resolve_start

    config = resolve_start(config)
    facts = RunFacts.of(config)
    pick_device(config.compute.device)
    if config.fleet.profile is not None:
        try:
            load_fleet(config.fleet.profile, peers=config.fleet.local_peers)
        except ConfigError as e:
            raise ConfigError(f"fleet.profile: {e}") from e
    console = make_console(sys.stderr)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("tokenising the corpus", total=1.0)
        cache = TokenCache.build(config.data, facts.spec.vocab, lambda done: progress.update(task, completed=done))
    facts.source(cache)  # raises where the corpus is shorter than one sequence
    return config


def first_checkpoint(folder: Path, config: RunConfig, run_id: str, *, quiet: bool) -> Path:
    """What ``model.from`` holds, in parts for machines that do not have it. Raises CheckpointError."""
    from muletrain.data.tokens import TokenCache
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.first_weights import write_first_checkpoint

    facts = RunFacts.of(config)
    cache = TokenCache.build(config.data, facts.spec.vocab)
    with Progress(transient=True, disable=quiet) as progress:
        task = progress.add_task("cutting the first weights into stages", total=1.0)
        return write_first_checkpoint(
            facts, cache, folder / "checkpoints", run_id, lambda done: progress.update(task, completed=done)
        )


def _workers(config: RunConfig, folder: Path, names: list[str], threads: int) -> list[WorkerSpec]:
    """Every process's work, before there is a ticket. Raises CapacityError when a stage fits none of them."""
    from muletrain.runs.assemble import RunFacts, resolve_start
    from muletrain.runs.measure.machine import check_local, dealt, free_memory_of_machine, own_devices

    devices = dealt(own_devices(config.compute.device), len(names))
    host = free_memory_of_machine(len(names))
    indices = indices_of(config)
    check_local(RunFacts.of(resolve_start(config)).needs(), devices, config.compute.memory, host)
    return [
        WorkerSpec(
            role="join",
            name=name,
            ticket="",
            folder=str(folder),
            threads=threads,
            data="config",
            place=config.checkpoint.place,
            device=device,
            sharing=devices.count(device),
            precision=config.compute.precision.value,
            memory_gib=config.compute.memory,
            host_memory=host,
            listen=config.network.listen,
            fleet_index=index,
        )
        for index, name, device in zip(indices, names, devices, strict=True)
    ]


def _begin(session: Session, config: RunConfig, workers: list[WorkerSpec], checkpoint: Path | None) -> None:
    """Give every process its work: the first founds the run, the others join it by its ticket."""
    founder = {
        "role": "found",
        "ticket": str(Ticket.new_run(session.folder)),
        "config": config.model_dump_json(by_alias=True),
        "port": config.network.port,
        "announce": config.network.announce,
        "resume": None if checkpoint is None else str(checkpoint),
    }
    if session.chaos is not None:
        workers = [worker.model_copy(update={"faults": True}) for worker in workers]
    session.fleet.begin(workers[0].model_copy(update=founder))
    ticket = str(session.wait_for_ticket(workers[0].name))
    for worker in workers[1:]:
        session.fleet.begin(worker.model_copy(update={"ticket": ticket}))
    if session.chaos is not None:
        session.chaos.newcomer = workers[-1].model_copy(update={"ticket": ticket})
