"""A user's own module, as its user meets it: the example of the docs, and the commands that take it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import muletrain
from muletrain.cli.main import app
from muletrain.config import trusted
from muletrain.errors import MuletrainError
from muletrain.events import EventTail, StepDone, Validated
from tests.test_docs import PAGES
from tests.test_factory import of

SOURCE = Path(muletrain.__file__).parents[1]


def page(start: str) -> str:
    """The code block of docs/models.md that begins with ``start``."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", PAGES["docs/models.md"], re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if block.startswith(start))


def typed(line: str, folder: Path, code: int = 0) -> str:
    """What a command says that is typed in ``folder``, where a package lies."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"}
    words = [sys.executable, "-P", "-m", "muletrain.cli.main", *shlex.split(line, comments=True)[1:]]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_example_of_the_docs_runs_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package, its configuration, its commands; what is trained comes out again, with its own names."""
    (tmp_path / "mypackage").mkdir()
    for name in ("models.py", "data.py"):
        (tmp_path / "mypackage" / name).write_text(page(f"# mypackage/{name}"))
    (tmp_path / "shapes.toml").write_text(page("# shapes.toml"))
    run, *use = [line for line in page("muletrain run shapes.toml").splitlines() if line.startswith("muletrain")]
    assert "loss" in typed(run, tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventTail(folder).poll()
    first, *_, last = [e.loss for e in events if isinstance(e, StepDone)]
    assert last < 0.8 * first
    measured = [(e.step, e.loss, e.perplexity, e.tokens) for e in events if isinstance(e, Validated)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr(trusted, "_named", set())  # as a process that has just begun
    refused, *said = (
        CliRunner().invoke(app, shlex.split(line.replace("FOLDER", folder.name), comments=True)[1:])
        for line in ("muletrain eval runs/FOLDER", *use)
    )
    assert "add --factory mypackage.models:build" in str(refused.exception)
    assert [done.exit_code for done in said] == [0, 0], said
    assert "Loss" in said[0].output
    state = safetensors.torch.load_file(tmp_path / "my-weights" / "model.safetensors")
    torch.manual_seed(0)
    models, data = (
        SourceFileLoader(n, str(tmp_path / "mypackage" / f"{n}.py")).load_module() for n in ("models", "data")
    )
    module, (_, heldout) = models.build(width=32), data.build()
    images, labels = zip(*(heldout[k] for k in range(len(heldout))), strict=True)
    loss = float(module(torch.stack(images), torch.tensor(labels)).detach())
    assert measured[0] == (0, pytest.approx(loss, rel=0.01), None, 200), "before the first update, perhaps in bf16"
    assert [step for step, *_ in measured] == [0, 20]
    assert measured[1][1] < loss
    module.load_state_dict(state)


def test_trace_takes_a_factorys_configuration(tmp_path: Path) -> None:
    own = ["tests.own_models:vit", "tests.own_models:images_with_classes"]
    (file := tmp_path / "vit.toml").write_text(
        f'[model]\nfactory = "{own[0]}"\nvocab = 5\n[data]\nfactory = "{own[1]}"\n'
    )
    answer = CliRunner().invoke(app, ["trace", str(file), "--out", str(tmp_path), "--json"])
    assert answer.exit_code == 0, answer.output
    about = json.loads(answer.stdout)
    assert about["parameters"] == of("vit").spec.params
    assert [row["class"] for row in about["parts"]] == ["Embedding", "Block", "Block", "Block", "Head"]
    refused = CliRunner().invoke(app, ["trace", own[0], "--out", str(tmp_path)])
    assert isinstance(refused.exception, MuletrainError)
    assert "give that file: muletrain trace FILE.toml" in str(refused.exception)


@pytest.mark.slow
def test_a_fleet_is_planned_for_a_factorys_model() -> None:
    own = ["model.factory=tests.own_models:vit", "data.factory=tests.own_models:images_with_classes", "model.vocab=5"]
    options = [word for setting in own for word in ("--set", setting)]
    answer = CliRunner().invoke(app, ["plan", *options, "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["params"] == of("vit").spec.params
    simulated = CliRunner().invoke(
        app, ["simulate", "fleet", *options, "--set", "fleet.stages=2", "--hours", "0.01", "--json"]
    )
    assert simulated.exit_code == 0, simulated.output
    assert json.loads(simulated.stdout)["steps"] > 0
