"""Benchmarks of a trained model by ``lm-eval``, the harness of EleutherAI (extra ``eval``).

``lm-eval`` computes everything, with the model's class of ``transformers``: a checkpoint is exported to a temporary
folder first, an adapter merged.
"""

from __future__ import annotations

import difflib
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.compute.probe import pick_device
from muletrain.errors import CheckpointError, ConfigError, MuletrainError
from muletrain.model.traced.adapter import CONFIG
from muletrain.runs.exporting import export
from muletrain.runs.pretrained import Pretrained, trained_in
from muletrain.runs.result import check_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BATCH = 8
"""Requests that a CPU computes at once; on a GPU, lm-eval finds how many fit."""
INSTALL = 'pip install "muletrain[eval]"'


@dataclass(frozen=True)
class Score:
    """One figure of one task."""

    task: str
    metric: str
    value: float
    error: float | None
    """Standard error; None: ``lm-eval`` gives none."""
    shots: int
    """Examples before each question."""
    samples: int
    """Questions that were asked."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def benchmarks(
    where: Path,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    source: Path | None = None,
) -> list[Score]:
    """The scores of the model in ``where`` (see ``trained_in``).

    ``tasks``: names of ``lm-eval``, or of YAML files in the folder ``include``. ``shots``: examples before each question;
    default: as the task says. ``limit``: most questions of each task. ``source``: see ``Checkpoint.weights``.

    Raises MuletrainError: without ``lm-eval``, for an unknown task before anything is loaded, and with the reason if a task
    cannot be measured.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as e:
        raise ConfigError(f"--tasks: it needs the package lm-eval ({e}); {INSTALL}") from None
    if include is not None and not include.is_dir():
        raise ConfigError(f"--include {include}: no such folder; give the one that has the tasks' YAML files")
    known = _known(tasks, include)
    device = str(pick_device("auto"))
    size: int | str = "auto" if device.startswith("cuda") else BATCH
    with _as_pretrained(where, source) as about:
        try:
            lm = HFLM(**about, dtype="float32", device=device, batch_size=size)
            found = simple_evaluate(
                lm, tasks=list(tasks), task_manager=known, num_fewshot=shots, limit=limit, log_samples=False
            )
        except MuletrainError:
            raise
        except Exception as e:  # of the task's data, of the Hub, of metrics
            reason = (str(e).strip() or type(e).__name__).splitlines()[0]
            raise MuletrainError(f"--tasks {','.join(tasks)}: lm-eval fails: {type(e).__name__}: {reason}") from e
    return _scores(found)


def _known(tasks: Sequence[str], include: Path | None) -> Any:
    """An index that has all of ``tasks``; that of lm-eval's own takes seconds, and is made if it is needed. Raises
    ConfigError."""
    from lm_eval.tasks import TaskManager

    if include is not None:
        own = TaskManager(include_path=str(include), include_defaults=False)
        if {*tasks} <= {*own.all_tasks}:
            return own
    known = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in known.all_tasks:
            near = difflib.get_close_matches(task, known.all_tasks, n=3)
            like = f"; the nearest are {', '.join(near)}" if near else ""
            raise ConfigError(
                f"--tasks: lm-eval has no task '{task}'{like}; 'lm-eval ls tasks' lists all, --include FOLDER adds yours"
            )
    return known


@contextmanager
def _as_pretrained(where: Path, source: Path | None) -> Iterator[dict[str, str]]:
    """The model as ``HFLM`` takes it: 'pretrained', and 'peft' of an adapter's folder."""
    checkpoint = trained_in(where)
    check_memory(checkpoint.params)
    if isinstance(checkpoint, Pretrained):
        adapter = {"peft": str(where)} if (where / CONFIG).is_file() else {}
        yield {"pretrained": str(checkpoint.folder), **adapter}
        return
    if checkpoint.spec.own_loss:
        raise CheckpointError("--tasks: lm-eval measures causal language models, and the run trained a module of yours")
    with tempfile.TemporaryDirectory(prefix="mule-eval-") as folder:
        export(checkpoint, Path(folder) / "model", merge=checkpoint.config.adapter.rank is not None, source=source)
        yield {"pretrained": str(Path(folder) / "model")}


def _scores(found: dict[str, Any]) -> list[Score]:
    """The scores of ``simple_evaluate``'s results, in which 'acc,none' and 'acc_stderr,none' are a figure and its error."""
    scores = []
    for task, figures in found["results"].items():
        for name, value in figures.items():
            metric, _, filtered = name.partition(",")
            if not isinstance(value, int | float) or not filtered or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            label = metric if filtered == "none" else f"{metric} ({filtered})"
            asked = found.get("n-samples", {}).get(task, {}).get("effective", 0)
            shots = int(found.get("n-shot", {}).get(task, 0) or 0)
            scores.append(
                Score(task, label, float(value), error if isinstance(error, float) else None, shots, int(asked))
            )
    return scores
