"""``muletrain eval --tasks``: lm-eval measures what was trained, with a task that this file makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.cli.main import app
from muletrain.errors import CheckpointError, ConfigError, MuletrainError
from muletrain.runs.harness import Score, benchmarks

from .chats import SMOLLM_3, chat_tokenizer
from .traced_models import new_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and datasets
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no"]
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def own_task(folder: Path, name: str = "mules") -> Path:
    """A folder with a task of eight questions of which each has two answers."""
    folder.mkdir()
    rows = [{"question": f"Does mule {k} carry {k} bags?", "answer": k % 2} for k in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / "data.jsonl"))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    chat_tokenizer(folder, SMOLLM_3, 400)
    new_model("qwen2", vocab_size=400, bos_token_id=0, eos_token_id=1, pad_token_id=0).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def test_a_folder_of_hugging_face_is_measured_as_lm_eval_does(model: Path, tmp_path: Path) -> None:
    (score,) = benchmarks(model, ["mules"], include=own_task(tmp_path / "tasks"))
    assert (score.task, score.metric, score.samples, score.shots) == ("mules", "acc", 8, 0)
    assert 0 <= score.value <= 1
    assert score.error is not None


def test_a_table_or_json_and_a_limit(model: Path, tmp_path: Path) -> None:
    words = ["eval", str(model), "--tasks", "mules", "--include", str(own_task(tmp_path / "tasks")), "--limit", "4"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "mules" in shown.output
    found = CliRunner().invoke(app, [*words, "--json"])
    answer = json.loads(found.stdout.splitlines()[-1])
    assert answer["model"] == str(model)
    assert answer["scores"][0]["samples"] == 4


def test_a_run_its_checkpoint_and_its_adapter_are_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one trained adapter: alike."""
    import muletrain

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = muletrain.train(
        model=str(model),
        data=[f"Does mule {k} carry {k} bags? {'no' if k % 2 else 'yes'}\n" * 9 for k in range(60)],
        adapter={"rank": 4},
        train={"steps": 2, "batch": 4, "microbatch": 2},
        fleet={"peers": 1, "stages": 1},
        compute={"threads": 1, "precision": "fp32"},
        show=False,
    )
    assert run.folder is not None
    tasks = own_task(tmp_path / "tasks")
    places = (run.folder, run.checkpoint.folder, run.export("adapter"), run.export("whole", merge=True))
    found = [benchmarks(Path(where), ["mules"], include=tasks) for where in places]
    assert found == [found[0]] * 4
    assert muletrain.evaluate(run.folder, ["mules"], include=tasks) == [score.to_dict() for score in found[0]]


def test_an_unknown_task_is_an_error_that_names_near_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task 'mule'; the nearest are .*mules"):
        benchmarks(tmp_path, ["mule"], include=own_task(tmp_path / "tasks"))


def test_folders_that_are_not_there_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: no such folder"):
        benchmarks(model, ["mules"], include=tmp_path / "absent")
    with pytest.raises(MuletrainError, match="absent"):
        benchmarks(tmp_path / "absent", ["mules"], include=own_task(tmp_path / "tasks"))


def test_a_task_whose_data_are_gone_is_an_error_that_names_it(model: Path, tmp_path: Path) -> None:
    tasks = own_task(tmp_path / "tasks")
    (tasks / "data.jsonl").unlink()
    with pytest.raises(MuletrainError, match=r"--tasks mules: lm-eval fails: FileNotFoundError: .*data.jsonl"):
        benchmarks(model, ["mules"], include=tasks)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tasks", "a", "--data", "b"], "leave out --data and --tokens"),
        (["--tasks", ","], "names no task"),
        (["--limit", "3"], "are about --tasks"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["eval", "x", *words])
    assert isinstance(result.exception, ConfigError)
    assert why in str(result.exception)


def test_without_lm_eval_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['lm_eval'] = None; from pathlib import Path; from muletrain.runs.harness import benchmarks; "
        "benchmarks(Path('x'), ['hellaswag'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "muletrain[eval]"' in done.stderr.splitlines()[-1]


def test_scores_have_a_row_for_each_metric() -> None:
    from muletrain.runs.harness import _scores

    found = {
        "results": {
            "t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 1, "f1_stderr,strict": "N/A"}
        },
        "n-samples": {"t": {"original": 9, "effective": 4}},
        "n-shot": {"t": 2},
    }
    assert _scores(found) == [Score("t", "acc", 0.5, 0.1, 2, 4), Score("t", "f1 (strict)", 1.0, None, 2, 4)]


def test_a_module_of_ones_own_is_refused() -> None:
    """lm-eval has no use for it."""
    from unittest.mock import MagicMock, patch

    with (
        patch("muletrain.runs.harness.trained_in", return_value=MagicMock(params=1)),
        patch("muletrain.runs.harness._known"),
        pytest.raises(CheckpointError, match="the run trained a module of yours"),
    ):
        benchmarks(Path("x"), ["mules"])
