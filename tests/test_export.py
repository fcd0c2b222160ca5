"""An export is a new folder in the type of weights that was asked for, or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from muletrain.errors import CheckpointError
from muletrain.model import hf_writing
from muletrain.model.finite import NAMES
from muletrain.model.hf import export_hf
from tests.decoders import tiny
from tests.whole_model import build_full

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

SPEC = tiny()
NAME = "model.layers.1.mlp.up_proj.weight"


def state(**values: float) -> dict[str, Tensor]:
    """Weights of ``SPEC``; the first of ``NAME`` are ``values``."""
    found = {name: p.detach().clone() for name, p in build_full(SPEC, 3).named_parameters()}
    for k, value in enumerate(values.values()):
        found[NAME].view(-1)[k] = value
    return found


@pytest.mark.parametrize("dtype", NAMES)
def test_weights_and_configuration_have_the_type_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    weights = state()
    assert export_hf(weights, SPEC, None, tmp_path / "out", dtype=dtype, shard_bytes=20_000) is None
    stored = {k: t for file in (tmp_path / "out").glob("*.safetensors") for k, t in load_file(file).items()}
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name].to(NAMES[dtype])) for name in weights)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in stored.values())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == NAMES[dtype]
    assert {p.dtype for p in theirs.parameters()} == {NAMES[dtype]}


def test_values_beyond_the_type_are_refused_by_name_and_small_ones_counted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=rf"--dtype fp16: {NAME}: 2 of .* beyond 65504.* use bf16 or fp32"):
        export_hf(state(a=1e5, b=-1e6), SPEC, None, out, dtype="fp16")
    assert not out.exists()
    with pytest.raises(CheckpointError, match=f"{NAME}: 1 of .* NaN or infinite"):
        export_hf(state(a=float("inf")), SPEC, None, out, dtype="bf16")
    small = state(a=1e-9, b=-1e-9, c=0.0)
    total = sum(t.numel() for t in small.values())
    assert (
        export_hf(small, SPEC, None, out, dtype="fp16") == f"2 of {total:,} weights are too small for fp16 and became 0"
    )
    assert export_hf(small, SPEC, None, tmp_path / "bf16", dtype="bf16") is None


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path) -> None:
    """Such as the model that training started from."""
    source = tmp_path / "source"
    export_hf(state(), SPEC, None, source)
    before = contents(source)
    for out in (source, tmp_path / "." / "source", tmp_path / "link"):
        (tmp_path / "link").is_symlink() or (tmp_path / "link").symlink_to(source)
        with pytest.raises(CheckpointError, match="is not empty, and an export replaces nothing; choose a new folder"):
            export_hf(state(), SPEC, None, out, source=source)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is no folder; choose a new one"):
        export_hf(state(), SPEC, None, tmp_path / "file")
    assert contents(source) == before


@pytest.mark.parametrize("exists", [False, True])
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    out = tmp_path / "a" / "out"
    if exists:
        out.mkdir(parents=True)

    def full(*given: object) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(hf_writing, "save_file", full)
    with pytest.raises(CheckpointError, match=r"--hf: cannot write .*out: No space left on device; free space"):
        export_hf(state(), SPEC, None, out)
    assert out.exists() == exists
    assert not exists or not list(out.iterdir())
    monkeypatch.undo()
    export_hf(state(), SPEC, None, out)


def test_the_command_refuses_the_folder_before_it_reads_the_run(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "muletrain", "export", "nosuchrun", "--hf", "out", "--dtype", "bf16"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "out is not empty" in done.stderr


def contents(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
