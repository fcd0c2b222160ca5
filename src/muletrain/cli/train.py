"""``muletrain run``: a local fleet from a configuration to a final report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import Progress

from muletrain.cli.session import Session
from muletrain.config.dump import dump_toml
from muletrain.config.load import load_config
from muletrain.runs.fleet import LocalFleet, threads_per_peer
from muletrain.runs.folder import new_run_folder
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from muletrain.config.schema import RunConfig


def run_local(path: Path | None, overrides: Sequence[str], *, json: bool) -> None:
    """Raises MuletrainError for what cannot run, before anything is started."""
    config = load_config(path, overrides)
    names = [f"peer-{i}" for i in range(config.fleet.peers)]
    threads = threads_per_peer(config.compute.threads, len(names))
    folder = new_run_folder(path.stem if path is not None else "run")
    (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    with LocalFleet(folder, threads) as fleet:
        fleet.spawn(names)  # they import while we tokenise
        config = prepare(config, quiet=json)
        session = Session(folder, fleet, json=json)
        try:
            with session.interruptible("the run"), session.console:
                _begin(session, config, names, threads)
                session.watch()
            session.report()
        finally:
            session.close()


def prepare(config: RunConfig, *, quiet: bool) -> RunConfig:
    """Check that the model can be built and cut, and tokenise the corpus. The configuration with nothing left to look up."""
    from muletrain.data.tokens import TokenCache
    from muletrain.runs.assemble import RunFacts, resolve_start

    config = resolve_start(config)
    facts = RunFacts.of(config)
    with Progress(transient=True, disable=quiet) as progress:
        task = progress.add_task("tokenising the corpus", total=1.0)
        cache = TokenCache.build(config.data, facts.spec.vocab, lambda done: progress.update(task, completed=done))
    facts.source(cache)  # raises where the corpus is shorter than one sequence
    return config


def _begin(session: Session, config: RunConfig, names: list[str], threads: int) -> None:
    """Give every process its work: the first founds the run, the others join it by its ticket."""
    common = WorkerSpec(
        role="join",
        name="",
        ticket="",
        folder=str(session.folder),
        threads=threads,
        data="config",
        device=config.compute.device,
        precision=config.compute.precision.value,
        memory_gib=config.compute.memory,
        listen=config.network.listen,
    )
    founder = {
        "role": "found",
        "name": names[0],
        "ticket": str(Ticket.new_run()),
        "config": config.model_dump_json(by_alias=True),
        "port": config.network.port,
        "announce": config.network.announce,
        "fleet_index": 0,
    }
    session.fleet.begin(common.model_copy(update=founder))
    ticket = str(session.wait_for_ticket(names[0]))
    for index, name in enumerate(names[1:], start=1):
        session.fleet.begin(common.model_copy(update={"name": name, "ticket": ticket, "fleet_index": index}))
