"""Before a run begins: lock the folder, complete the configuration, prepare data and first weights."""

from __future__ import annotations

import functools
import math
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from muletrain.cli.actions.planned import follows, planned
from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.config.dump import dump_toml
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_located, located
from muletrain.data.chat import resolved, with_format
from muletrain.data.corpus import absolute
from muletrain.data.shown import examples
from muletrain.errors import CheckpointError, ConfigError, MuletrainError
from muletrain.events import EventLog, RunStarted, events_in
from muletrain.model.hf_hub import is_hub_name
from muletrain.runs.asked import cleaned_up
from muletrain.runs.folder import ROOT, held, new_run_folder, run_folder
from muletrain.runs.worker_files import OWNER_FILE, STOP_FILE, TICKET_FILE
from muletrain.script import look_in
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from muletrain.config.locate import Origins
    from muletrain.config.peer_sections import FleetConfig
    from muletrain.config.schema import RunConfig
    from muletrain.config.section import Section
    from muletrain.data.samples import Data
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.checkpoint import Checkpoint


@dataclass(frozen=True)
class Wanted:
    """A run as its user asks for it: a new one, or the one in the folder ``resume`` (``ROOT``: the newest one there)."""

    path: Path | None = None
    """The configuration; default: of the folder, or of the newest checkpoint."""
    overrides: Sequence[str] = ()
    resume: Path | None = None
    plan: Path | None = None
    """A plan to follow."""
    strategy: str | None = None
    """The strategy of the plan to follow, default: the recommended one; without a plan, the run's."""

    @property
    def names_data(self) -> bool:
        """Does a configuration file, or one of the overrides, name the data of the run?"""
        return self.path is not None or any(text.strip().startswith("data.") for text in self.overrides)


@contextmanager
def opened(wanted: Wanted, name: Literal["run", "start"]) -> Iterator[tuple[Path, RunConfig]]:
    """The run folder, locked while the context lasts, and the configuration of the run in it. Raises MuletrainError."""
    path, overrides, resume, plan = wanted.path, wanted.overrides, wanted.resume, wanted.plan
    console = make_console(sys.stderr)
    if resume is not None and (found := run_folder(resume, lambda text: console.print(text, soft_wrap=True))) != resume:
        console.print(f"resuming {found}, the newest run in {found.parent}/", soft_wrap=True)
        resume = found
    given, origins = _given(path, overrides, resume)
    if resume is not None and plan is not None:
        given = _free_for_plan(given, overrides)
    with located(origins):
        config = anchored(_chosen(given, plan, wanted.strategy, local=name == "run"))
    folder = new_run_folder(path.stem if path is not None else name) if resume is None else resume
    look_in(folder)
    failed = False
    try:
        say = functools.partial(console.print, soft_wrap=True, markup=False)
        with held(folder, say=say), located(origins), cleaned_up():
            for secret in (TICKET_FILE, OWNER_FILE, STOP_FILE):
                (folder / secret).unlink(missing_ok=True)  # left by a process that was killed
            if resume is None:
                save_config(folder, config)
            yield folder, config
    except MuletrainError:
        failed = True
        raise
    finally:
        begun = bool(events_in(folder, RunStarted)) if failed else any(folder.glob("*.jsonl"))
        if resume is None and not begun and not any(f.stat().st_size for f in folder.glob("*.log")):
            # no process began, or none had more to say than the error: nothing worth keeping
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                ROOT.rmdir()  # unless other runs are in it


def _given(path: Path | None, overrides: Sequence[str], resume: Path | None) -> tuple[RunConfig, Origins]:
    """The user's configuration. Raises ConfigError or CheckpointError."""
    if path is not None or resume is None or (resume / "config.toml").is_file():
        return load_located(
            path or (resume and resume / "config.toml"), overrides, kept=path is None and resume is not None
        )
    from muletrain.runs.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(resume)  # the folder of a member that the founder left the run to
    config = checkpoint.config
    if config.checkpoint.place is not None:  # the place ends with the founder's run folder
        update = {"place": config.checkpoint.place.rpartition("/")[0]}
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=update)})
    return load_located(None, overrides, base=config)


def _free_for_plan(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """``config`` of a run folder. A plan may replace batch and devices unless set in ``overrides``."""
    named = {override.partition("=")[0].strip() for override in overrides}
    free = {"train": {"batch", "microbatch"}, "optimizer": {"state_device"}}
    sections = {}
    for section, fields in free.items():
        old = getattr(config, section)
        kept = old.model_fields_set - {field for field in fields if f"{section}.{field}" not in named}
        sections[section] = type(old).model_construct(_fields_set=kept, **dict(old))
    return config.model_copy(update=sections)


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


class Ready(NamedTuple):
    """A run that can begin in ``folder``."""

    folder: Path
    prepared: Prepared
    given: RunConfig
    """The configuration that the next resume begins with."""
    checkpoint: Path | None
    """The folder of the checkpoint that the run goes on from; None: it begins."""
    first_step: int

    def of(self, fleet: FleetConfig) -> Ready:
        """The same run, with the user's ``fleet`` for the next resume: the counts of a local fleet follow from its fields."""
        return self._replace(given=self.given.model_copy(update={"fleet": fleet}))

    def save(self, **network: object) -> None:
        """Save ``given`` for the next resume, with these fields of ``network``."""
        save_config(self.folder, _with(self.given, "network", **network))


def ready(
    folder: Path,
    given: RunConfig,
    wanted: Wanted,
    fits: Callable[[RunConfig], None] = lambda config: None,
    *,
    reads: bool = False,
) -> Ready:
    """Prepare the run of ``folder``, tokenise its data, and find the checkpoint that a resumed one goes on from. ``fits``
    raises for a model that this machine has no room for; ``reads``: see ``prepare``. Changes no file in the folder, but
    may add some. Raises MuletrainError."""
    from muletrain.runs.again import last_step
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.checkpoint import newest_checkpoint
    from muletrain.runs.parts import fitting
    from muletrain.runs.resuming import continued

    console = make_console(sys.stderr)
    checkpoint = None
    if wanted.resume is not None:
        place = placed(given, folder).checkpoint.place
        checkpoint = newest_checkpoint(folder, place, functools.partial(console.print, soft_wrap=True))
    if checkpoint is None:
        if wanted.resume is not None:
            given = _with(given, "train", data_offset=0)
        prepared = prepare(given, fits, reads=reads)
        return Ready(folder, prepared._replace(config=placed(prepared.config, folder)), given, None, 0)
    given = _by_checkpoint(given, checkpoint, folder)
    config, _, data = prepare(given, fits, checkpoint)
    differs = data.digest != checkpoint.manifest.get("data")
    if differs and given.data.tokenizer == "train":  # another version of the library trains another one
        given = _with(given, "data", tokenizer=_own_tokenizer(checkpoint, folder))
        config, _, data = prepare(given, fits, checkpoint)
    config, changes = continued(checkpoint, config, data, meant=wanted.names_data)
    for text in changes:
        console.print(text, soft_wrap=True, markup=False)
    if checkpoint.step >= config.train.steps:
        raise MuletrainError(
            f"{folder}: all {plural(checkpoint.step, 'step')} are done; for more, add --set train.steps=N (which stretches the learning "
            f"rate's schedule)"
        )
    with doing("cutting the checkpoint into other stages") as tell:
        checkpoint = fitting(checkpoint, RunFacts.of(config), tell)
    reached = last_step(folder)
    again = f"; {_again(checkpoint.step + 1, reached)}" if reached > checkpoint.step else ""
    console.print(f"continuing after step {checkpoint.step} ({checkpoint.folder}){again}", soft_wrap=True)
    given = _with(given, "train", data_offset=config.train.data_offset)
    prepared = Prepared(placed(config, folder), RunFacts.of(config), data)
    return Ready(folder, prepared, given, checkpoint.folder, checkpoint.step)


def _again(first: int, last: int) -> str:
    """The steps that a crash costs, in words."""
    if first == last:
        return f"step {first} is computed again"
    return f"steps {first} to {last} are computed again ({last - first + 1} steps)"


def _by_checkpoint(config: RunConfig, checkpoint: Checkpoint, folder: Path) -> RunConfig:
    """``config`` with the checkpoint's tokenizer if the configured one is gone, or would be trained on different
    text."""
    from muletrain.runs.resuming import changes

    data = config.data
    gone = os.path.isabs(data.tokenizer) and not os.path.exists(data.tokenizer)
    looked_up = {"data.format": "auto", "data.chat_template": None}

    other = any(
        c.field.startswith("data.") and c.rule.may != "yes" and looked_up.get(c.field, ...) != c.now
        for c in changes(checkpoint.config, config)
    )
    if data.factory is None and (gone or (data.tokenizer == "train" and other)):
        return _with(config, "data", tokenizer=_own_tokenizer(checkpoint, folder))
    return config


def _own_tokenizer(checkpoint: Checkpoint, folder: Path) -> str:
    """A copy of the checkpoint's tokenizer in the run folder, which later resumes find. Raises CheckpointError."""
    path = folder.resolve() / "tokenizer.json"
    path.write_bytes(checkpoint.tokenizer_json)
    return str(path)


def _with(config: RunConfig, section: str, **fields: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=fields)})


class Prepared(NamedTuple):
    """Findings of ``prepare``."""

    config: RunConfig
    """With nothing left to look up."""
    facts: RunFacts
    data: Data


def prepare(
    config: RunConfig,
    fits: Callable[[RunConfig], None] = lambda config: None,
    checkpoint: Checkpoint | None = None,
    *,
    reads: bool = False,
) -> Prepared:
    """Check model, device and profile, and tokenise the corpus. ``checkpoint``: of a resumed run; contains a model to
    use if the configured one is gone. ``reads``: the peers will read the weights of ``model.from``, so check all."""
    from muletrain.compute.probe import pick_device
    from muletrain.model.traced.adapter import check_tensors
    from muletrain.runs.assemble import RunFacts, attending, check_first_weights, resolve_start

    if checkpoint is None:  # a mistake in the data is cheap to find, and the model takes seconds
        config = config.model_copy(update={"data": with_format(config.data)})
    given, source = config, config.model.from_
    later = checkpoint is None and source is not None and is_hub_name(source)  # the data may be wrong, too
    console = make_console(sys.stderr)
    say = functools.partial(console.print, soft_wrap=True, markup=False)

    def check_weights(config: RunConfig) -> None:
        if reads and source is not None:
            with doing("checking the first weights") as tell:
                check_first_weights(RunFacts.of(config), tell)

    with doing("reading the model"):
        try:
            config = resolve_start(given, weights=not later, note=say, attends=checkpoint is None)
        except CheckpointError as e:
            if checkpoint is None or checkpoint.config.model.given != config.model.given or checkpoint.spec.base:
                raise
            say(f"{e}; its sizes are taken from {checkpoint.folder}")
            config = config.model_copy(update={"model": checkpoint.config.model})
        facts = RunFacts.of(config)
        if config.adapter.from_ is not None and checkpoint is None:
            check_tensors(Path(config.adapter.from_), facts.spec)
    pick_device(config.compute.device)
    fits(config)
    if config.fleet.profile is not None:
        try:
            load_fleet(config.fleet.profile, peers=config.fleet.local_peers + (config.hub.clients or 0))
        except ConfigError as e:
            raise ConfigError(f"fleet.profile: {e}") from e
    if config.train.data_offset < 0 and checkpoint is None:
        raise ConfigError(f"train.data_offset: {config.train.data_offset} lies before the data; give 0 or more")
    if later and config.data.tokenizer == "train":
        config = _with(config, "data", tokenizer=source)
    reading = "reading the text" if config.data.factory is None else "reading samples"
    with doing(reading):
        before = None if checkpoint is None else checkpoint.config.data.chat_template
        config = config.model_copy(update={"data": resolved(config.data, before)})
        if source is not None and checkpoint is None and config.data.factory is None:
            next(examples(config.data, 1, 1), None)  # raises if columns or template do not fit the first row
    if checkpoint is None:
        config = attending(config, say)
    elif config.model.attention == "auto" and (decided := checkpoint.config.model.attention) != "auto":
        config = attending(_with(config, "model", attention=decided))  # ``model.from`` was read anew
    if not later:
        check_weights(config)
    facts = RunFacts.of(config)
    with doing(reading) as tell:
        data = facts.data(lambda done: tell(done, None if config.data.factory else "tokenising the text"))
    windows = facts.source(data).windows  # raises if the corpus is shorter than one sequence
    if later:
        with doing("fetching the model"):
            config = resolve_start(given, note=say, attends=True)
            config = attending(config.model_copy(update={"data": resolved(config.data)}))
        fits(config)
        check_weights(config)
    if config.train.epochs is not None:
        config = with_epochs(config, windows)
    facts = RunFacts.of(config)
    facts.heldout(data)  # raises if a module's own loss could not be measured
    return Prepared(config, facts, data)


def with_epochs(config: RunConfig, sequences: int) -> RunConfig:
    """``config`` with the steps of ``train.epochs`` passes over so many sequences. The last step is a whole one."""
    assert config.train.epochs is not None
    steps = max(1, math.ceil(config.train.epochs * sequences / config.train.batch))
    return _with(config, "train", steps=steps)


def tell_of(
    prepared: Prepared,
    folder: Path,
    devices: Sequence[str],
    first_step: int = 0,
    command: str = "run",
    seconds: float = 0.0,
) -> None:
    """Write the run's next actions as events, which the session reports. The arguments are those of ``summary_of``."""
    from muletrain.runs.summary import summary_of

    with EventLog(folder / "summary.jsonl", "summary") as log:
        log.emit(summary_of(prepared.facts, prepared.data, chosen(devices), first_step, command, seconds))


def chosen(devices: Sequence[str]) -> list[str]:
    """The devices that torch takes: 'auto' tells people nothing."""
    from muletrain.compute.probe import pick_device

    return [str(pick_device(device)) for device in devices]


def first_checkpoint(folder: Path, config: RunConfig, run_id: str) -> Path:
    """The weights of ``model.from`` or ``model.factory`` as a checkpoint, for machines without the source. Raises
    CheckpointError."""
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.parts import write_first_checkpoint

    facts = RunFacts.of(config)
    with doing("cutting the first weights into stages") as tell:
        return write_first_checkpoint(facts, facts.data(), folder / "checkpoints", run_id, tell)
