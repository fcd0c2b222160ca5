"""First weights that are NaN, infinite, or too large for the precision are refused by name before anything starts."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from muletrain.cli.actions.opening import Wanted, opened, placed, prepare
from muletrain.config.load import load_config
from muletrain.config.schema import Precision
from muletrain.config.trusted import trust
from muletrain.errors import CheckpointError, MuletrainError
from muletrain.model.finite import NAMES, unfit
from muletrain.runs.assemble import RunFacts, build_compute, resolve_start
from muletrain.runs.checkpoint import Checkpoint, newest_checkpoint
from muletrain.runs.parts import write_first_checkpoint
from tests.test_assemble import MACHINE
from tests.traced_models import write_folder, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.config.schema import RunConfig

NAME = "model.layers.1.mlp.up_proj.weight"
BROKEN = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Cache:
    tokenizer_json, digest = b"{}", "ab"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a text and a native model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "llama", write_text(tmp_path / "mine.txt"), "llama")
    return tmp_path


def put(file: Path, value: float, name: str = NAME, dtype: torch.dtype | None = None) -> None:
    """Replace one value of a tensor in ``file``; ``dtype``: and the type of all."""
    state = load_file(file)
    state[name].view(-1)[5] = value
    save_file({n: t if dtype is None else t.to(dtype) for n, t in state.items()}, file, {"format": "pt"})


def settings(*more: str) -> list[str]:
    return ["model.from=llama", "data.path=mine.txt", "model.context=16", "fleet.stages=1", *more]


def refusal(*more: str) -> str:
    """What 'muletrain run' is told."""
    with pytest.raises(MuletrainError) as caught, opened(Wanted(None, settings(*more)), "run") as (_, config):
        prepare(config, reads=True)
    assert not Path("runs").exists()
    return str(caught.value)


@given(st.lists(st.floats(width=32), max_size=9), st.sampled_from(sorted(NAMES)))
def test_what_a_type_cannot_hold_is_what_becomes_infinite_in_it(values: list[float], name: str) -> None:
    tensor, dtype = torch.tensor(values, dtype=torch.float32), NAMES[name]
    held = bool(tensor.to(dtype).isfinite().all())
    if (why := unfit(tensor, dtype)) is None:
        assert held
    else:  # what is rounded down to the largest number is refused, too
        assert not held or tensor.abs().max() > torch.finfo(dtype).max
        assert f"of {len(values)} values" in why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN.keys())
def test_a_run_with_a_weight_that_is_not_finite_is_refused_by_name(
    here: Path, value: float, dtype: torch.dtype
) -> None:
    put(here / "llama" / "model.safetensors", value, dtype=dtype)
    error = refusal()
    assert f"model.from: {NAME}: 1 of 2,048 values are NaN or infinite; begin with other weights" in error
    assert not [*(here / "cache").rglob("tokens")], "nothing was tokenised"


def test_a_weight_that_overflows_in_half_precision_is_refused(here: Path) -> None:
    put(here / "llama" / "model.safetensors", -70000.0)
    error = refusal("compute.precision=fp16")
    assert f"{NAME}: 1 of 2,048 values are beyond 65504, the largest of fp16 (up to 70000); set compute.pr" in error
    facts = RunFacts.of(resolve_start(load_config(None, settings())))
    build_compute(facts, 0, MACHINE, None).close()
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: 1 of .* beyond 65504"):  # chosen by the machine
        build_compute(facts, 0, replace(MACHINE, precision=Precision.FP16), None)


def test_double_precision_that_overflows_is_refused(here: Path) -> None:
    state = {n: t.double() for n, t in load_file(here / "llama" / "model.safetensors").items()}
    state[NAME].view(-1)[5] = 1e300
    save_file(state, here / "llama" / "model.safetensors", {"format": "pt"})
    assert f"{NAME}: 1 of 2,048 values are NaN or infinite" in refusal()


def test_weights_for_machines_that_join_are_refused_before_the_run(here: Path) -> None:
    facts = RunFacts.of(resolve_start(load_config(None, settings())))
    put(here / "llama" / "model.safetensors", math.nan)
    with pytest.raises(CheckpointError, match=f"{NAME}: 1 of 2,048 values are NaN"):
        write_first_checkpoint(facts, Cache, here / "checkpoints", "run", lambda share: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", BROKEN)
def test_a_factorys_weights_are_checked_too(value: str) -> None:
    trust("tests.own_models:unset", "tests.own_models:images_with_numbers")
    given = ["model.factory=tests.own_models:unset", "data.factory=tests.own_models:images_with_numbers"]
    facts = RunFacts.of(resolve_start(load_config(None, [*given, f'model.arguments={{value = "{value}"}}'])))
    with pytest.raises(CheckpointError, match=r"model\.factory: .* 1 of .* values are NaN or infinite"):
        build_compute(facts, 0, MACHINE, None)


def checkpoints(here: Path) -> tuple[Path, list[Path]]:
    """A run folder with the checkpoints of steps 4 and 8, with moments."""
    facts = RunFacts.of(resolve_start(load_config(None, settings())))
    run = here / "runs" / "one"
    folders = []
    for step in (4, 8):
        made = write_first_checkpoint(facts, Cache, run / "checkpoints", "run", lambda share: None)  # type: ignore[arg-type]
        folder = made.with_name(f"step-{step:08d}")
        made.rename(folder)
        about = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(about | {"step": step}))
        change(folder, lambda state: {**state, **{f"moment2/{n[6:]}": t.square() for n, t in state.items()}})
        folders.append(folder)
    (run / "config.toml").write_text("")
    return run, folders


def change(folder: Path, edit: Any) -> None:
    """``edit`` the state of the last stage of a checkpoint, and name its content in the manifest."""
    about = json.loads((folder / "manifest.json").read_text())
    part = folder / about["parts"][-1]["file"]
    state: dict[str, Tensor] = load_file(part)
    save_file(edit(state), part)
    about["parts"][-1]["sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(about))


def newest(run: Path, config: RunConfig) -> Path:
    """The folder of the checkpoint from which a resumed run goes on."""
    found = newest_checkpoint(run, placed(config, run).checkpoint.place, print)
    assert found is not None
    return found.folder


@pytest.mark.parametrize("kind", ["model", "moment2"])
@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN.keys())
def test_a_resumed_run_passes_over_a_checkpoint_that_is_not_finite(
    here: Path, capsys: pytest.CaptureFixture[str], kind: str, value: float
) -> None:
    run, (older, newer) = checkpoints(here)
    config = Checkpoint.open(older).config

    def broken(state: dict[str, Tensor]) -> dict[str, Tensor]:
        state[f"{kind}/{NAME}"].view(-1)[5] = value
        return state

    assert newest(run, config) == newer
    change(newer, broken)
    assert newest(run, config) == older
    said = "".join(capsys.readouterr().out.split("\n"))
    assert f"{kind}/{NAME}: 1 of 2,048 values are NaN or infinite; use another checkpoint of the run" in said
    change(older, broken)
    with pytest.raises(MuletrainError, match="none of its checkpoints can be used"):
        newest(run, config)
    if kind == "model":
        with pytest.raises(CheckpointError, match=f"{NAME}: 1 of 2,048 values are NaN or infinite"):
            Checkpoint.open(older).weights()


def test_the_command_ends_with_the_name_and_leaves_nothing(here: Path) -> None:
    put(here / "llama" / "model.safetensors", math.nan)
    sets = [word for value in settings() for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "muletrain", "run", *sets],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert f"model.from: {NAME}: 1 of 2,048 values are NaN or infinite" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (here / "runs").exists()
