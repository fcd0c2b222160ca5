"""Before a run begins: its folder is ours, its configuration is complete, its data and first weights are ready."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from muletrain.cli.actions.asked import cleaned_up
from muletrain.cli.actions.planned import follows, planned
from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.config.dump import dump_toml
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_located, located
from muletrain.data.corpus import absolute
from muletrain.errors import ConfigError, MuletrainError
from muletrain.events import EventLog
from muletrain.model.hf_hub import is_hub_name
from muletrain.runs.folder import ROOT, held, new_run_folder, run_folder
from muletrain.runs.worker_files import OWNER_FILE, TICKET_FILE
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from muletrain.config.schema import RunConfig
    from muletrain.config.section import Section
    from muletrain.data.samples import Data
    from muletrain.runs.assemble import RunFacts


@contextmanager
def opened(
    path: Path | None,
    overrides: Sequence[str],
    name: str,
    resume: Path | None,
    plan: Path | None = None,
    choice: str | None = None,
) -> Iterator[tuple[Path, RunConfig]]:
    """The run folder, locked while the context lasts, and the configuration of the run in it.

    It is a new run, or the run in the folder ``resume`` (``ROOT``: the newest one there). A new one follows ``plan``,
    with the strategy ``choice`` of it, or just that strategy, if given. Raises MuletrainError."""
    if resume is not None and plan is not None:
        raise ConfigError(f"--plan {plan}: a resumed run keeps its plan; start a new run, or leave --plan out")
    if resume is not None and choice is not None:
        raise ConfigError(f"--strategy {choice}: a resumed run keeps its strategy; start a new run, or leave it out")
    if resume is not None and path is not None:
        raise ConfigError(
            f"{path}: a resumed run keeps its configuration; leave the file out, and use --set for fields that may change"
        )
    if resume is not None and (newest := run_folder(resume)) != resume:
        resume = newest
        make_console(sys.stderr).print(f"resuming {resume}, the newest run in {resume.parent}/", soft_wrap=True)
    given, origins = load_located(path if resume is None else resume / "config.toml", overrides)
    with located(origins):
        config = anchored(_chosen(given, plan, choice, local=name == "run"))
    folder = new_run_folder(path.stem if path is not None else name) if resume is None else resume
    try:
        with held(folder), located(origins), cleaned_up():
            for secret in (TICKET_FILE, OWNER_FILE):
                (folder / secret).unlink(missing_ok=True)  # left by a process that was killed
            if resume is None:
                save_config(folder, config)
            yield folder, config
    finally:
        if resume is None and not any(folder.glob("*.jsonl")):  # no process began: nothing worth keeping
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                ROOT.rmdir()  # unless other runs are in it


def _chosen(config: RunConfig, plan: Path | None, choice: str | None, *, local: bool) -> RunConfig:
    """``config`` as plan and strategy want it. Raises ConfigError."""
    if plan is not None:
        return planned(config, plan, choice, spares=local)
    return config if choice is None else follows(config, choice, local=local)


def anchored(config: RunConfig) -> RunConfig:
    """``config`` with absolute paths, so that a run can be resumed and evaluated from any working directory."""
    model, data, profile = config.model, config.data, config.fleet.profile
    own: dict[str, str | None] = {"path": absolute(data.path), "cache": data.cache and _absolute(data.cache)}
    own["validation"] = data.validation and absolute(data.validation)
    if os.path.exists(os.path.expanduser(data.tokenizer)):  # else a Hugging Face name
        own["tokenizer"] = _absolute(data.tokenizer)
    sections: dict[str, Section] = {"data": data.model_copy(update=own)}
    if model.from_ is not None and not is_hub_name(model.from_):
        sections["model"] = model.model_copy(update={"from_": _absolute(model.from_)})
    if profile is not None and os.path.exists(profile):  # else a shipped one
        sections["fleet"] = config.fleet.model_copy(update={"profile": _absolute(profile)})
    if config.checkpoint.place is not None and "://" not in config.checkpoint.place:
        sections["checkpoint"] = config.checkpoint.model_copy(update={"place": _absolute(config.checkpoint.place)})
    if config.swap.folder is not None:
        sections["swap"] = config.swap.model_copy(update={"folder": _absolute(config.swap.folder)})
    return config.model_copy(update=sections)


def placed(config: RunConfig, folder: Path) -> RunConfig:
    """``config`` with this run's part of ``checkpoint.place``, which several runs may share: the run folder's name."""
    place = config.checkpoint.place
    if place is None:
        return config
    own = {"place": f"{place.rstrip('/')}/{folder.resolve().name}"}
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=own)})


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def save_config(folder: Path, config: RunConfig) -> None:
    """Write the configuration for the next ``--resume``, atomically."""
    partial = folder / ".config.toml.partial"
    partial.write_text(dump_toml(config), encoding="utf-8")
    partial.replace(folder / "config.toml")


def newest_checkpoint(folder: Path, config: RunConfig) -> Path | None:
    """The checkpoint that the run continues from; None: there is none. Raises MuletrainError if the run is complete, or
    ``config`` belongs to another run."""
    from muletrain.runs.checkpoint import Checkpoint, bring_newest_home

    console = make_console(sys.stderr)
    if config.checkpoint.place is not None:
        bring_newest_home(config.checkpoint.place, folder)
    checkpoint = Checkpoint.newest_intact(folder, lambda text: console.print(text, soft_wrap=True))
    if checkpoint is None and any((folder / "checkpoints").glob("step-*")):
        raise MuletrainError(f"{folder}: none of its checkpoints can be used (see above); start a new run")
    if checkpoint is None:
        console.print(f"{folder} has no complete checkpoint: the run starts over", soft_wrap=True)
        return None
    checkpoint.check_same_run(config)
    if checkpoint.step >= config.train.steps:
        raise MuletrainError(
            f"{folder}: all {plural(checkpoint.step, 'step')} are done; for more, add --set train.steps=N (which stretches the learning "
            f"rate's schedule)"
        )
    console.print(f"continuing after step {checkpoint.step} ({checkpoint.folder})", soft_wrap=True)
    return checkpoint.folder


class Prepared(NamedTuple):
    """A run that can begin."""

    config: RunConfig
    """With nothing left to look up."""
    facts: RunFacts
    data: Data


def prepare(config: RunConfig, *, reads: bool = False) -> Prepared:
    """Check model, device and profile, and tokenise the corpus. ``reads``: the peers will read the weights of ``model.from``,
    so check them all."""
    from muletrain.compute.probe import pick_device
    from muletrain.runs.assemble import RunFacts, check_first_weights, resolve_start

    with doing("reading the model"):
        config = resolve_start(config)
        facts = RunFacts.of(config)
    pick_device(config.compute.device)
    if config.fleet.profile is not None:
        try:
            load_fleet(config.fleet.profile, peers=config.fleet.local_peers + (config.hub.clients or 0))
        except ConfigError as e:
            raise ConfigError(f"fleet.profile: {e}") from e
    if reads and config.model.from_ is not None:
        with doing("checking the first weights") as tell:
            check_first_weights(facts, tell)
    with doing("reading the text" if config.data.factory is None else "reading samples") as tell:
        data = facts.data(lambda done: tell(done, None if config.data.factory else "tokenising the text"))
    facts.source(data)  # raises if the corpus is shorter than one sequence
    facts.heldout(data)  # raises if a module's own loss could not be measured
    return Prepared(config, facts, data)


def tell_of(prepared: Prepared, folder: Path, first_step: int = 0) -> None:
    """Write what the run is about to do to its events, of which the session tells."""
    from muletrain.runs.summary import summary_of

    with EventLog(folder / "summary.jsonl", "summary") as log:
        log.emit(summary_of(prepared.facts, prepared.data, first_step))


def first_checkpoint(folder: Path, config: RunConfig, run_id: str) -> Path:
    """The weights of ``model.from`` or ``model.factory`` as a checkpoint, for machines that lack them. Raises CheckpointError."""
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.first_weights import write_first_checkpoint

    facts = RunFacts.of(config)
    with doing("cutting the first weights into stages") as tell:
        return write_first_checkpoint(facts, facts.data(), folder / "checkpoints", run_id, tell)
