"""From a configuration to a run: a start from another model, and what a resumed run may change."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from muletrain.compute.estimate import Offer
from muletrain.config.dump import dump_toml
from muletrain.config.load import load_config
from muletrain.config.schema import Precision, RunConfig
from muletrain.data.samples import SampleData
from muletrain.errors import CheckpointError, ConfigError
from muletrain.model.chain import Compression, TensorType
from muletrain.model.hf import export_hf
from muletrain.model.make import make_stage
from muletrain.model.spec import ModelSpec
from muletrain.runs.assemble import RunFacts, build_compute, initial_weights, resolve_start
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.measure.machine import Machine
from muletrain.runs.resuming import checked
from muletrain.runs.summary import _start
from tests.whole_model import build_full

if TYPE_CHECKING:
    from pathlib import Path

SIZES = ["model.layers=4", "model.width=32", "model.heads=2", "model.context=16", "model.vocab=64"]
TOKENIZER = Tokenizer(WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>")).to_str().encode()
MACHINE = Machine(torch.device("cpu"), Precision.FP32, Offer(1 << 30))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A Hugging Face folder of a model whose layers all differ."""
    return export(tmp_path / "hf", *SIZES)


def export(folder: Path, *overrides: str) -> Path:
    spec = ModelSpec.from_config(load_config(None, overrides).model)
    state = {name: p.detach() for name, p in build_full(spec, 0, spec.cut(2)).named_parameters()}
    export_hf(state, spec, TOKENIZER, folder)
    return folder


def test_a_start_from_a_model_takes_its_sizes_and_keeps_the_rest(exported: Path) -> None:
    asked = load_config(None, [f"model.from={exported}", "model.share_layers=true", "model.context=8"])
    model = resolve_start(asked).model
    assert (model.layers, model.width, model.vocab, model.context, model.dropout) == (4, 32, 64, 8, 0.0)
    assert model.share_layers
    assert RunFacts.of(load_config(None, ["model.preset=gpt3-125m", "model.share_layers=true"])).spec.share_layers


def test_a_start_from_a_model_keeps_the_asked_compression(exported: Path) -> None:
    asked = load_config(None, [f"model.from={exported}", "model.compression=bottleneck", "fleet.stages=2"])
    facts = RunFacts.of(resolve_start(asked))
    assert facts.spec.compression == Compression("bottleneck", 2, (facts.cut[0][1] - 1,))
    load, shapes = initial_weights(facts, 0), make_stage(facts.spec, 0, facts.cut).shapes()
    assert load is not None
    assert (
        _start(facts)
        == f"{facts.config.model.from_}; 1.07k of model.compression by seed 0, so the model begins worse than that"
    )
    assert tuple(load("compression.1.down.matrix").shape) == shapes["compression.1.down.matrix"] == (16, 32)


def test_what_a_start_from_a_model_became_is_found_again_on_resume(exported: Path, tmp_path: Path) -> None:
    asked = load_config(None, [f"model.from={exported}"])
    (tmp_path / "config.toml").write_text(dump_toml(asked))  # as the run folder keeps it
    first, again = resolve_start(asked), resolve_start(load_config(tmp_path / "config.toml"))
    assert again == first
    assert resolve_start(first) == first
    assert checked(checkpoint_of(first), again) == []
    moved = shutil.copytree(exported, tmp_path / "moved")
    found = resolve_start(load_config(tmp_path / "config.toml", [f"model.from={moved}"]))
    assert [change.field for change in checked(checkpoint_of(first), found)] == ["model.from", "data.tokenizer"]


@pytest.mark.parametrize(
    ("override", "has"),
    [("model.layers=12", "4"), ("model.activation=silu", "'gelu'"), ("model.preset=llama-7b", "sizes")],
)
def test_other_sizes_beside_a_model_are_refused(exported: Path, override: str, has: str) -> None:
    with pytest.raises(ConfigError, match=rf"{override.split('=')[0]}: .*checkpoint has '?{has}.*leave it out"):
        resolve_start(load_config(None, [f"model.from={exported}", override]))


def test_layers_are_shared_only_where_they_are_equal(exported: Path, tmp_path: Path) -> None:
    facts = RunFacts.of(resolve_start(load_config(None, [f"model.from={exported}", "model.share_layers=true"])))
    with pytest.raises(CheckpointError, match=r"share_layers: layers 0 and 1 of .* differ"):
        build_compute(facts, 0, MACHINE, None)
    alike = export(tmp_path / "alike", *SIZES, "model.share_layers=true")
    facts = RunFacts.of(resolve_start(load_config(None, [f"model.from={alike}", "model.share_layers=true"])))
    for stage, (first, end) in enumerate(facts.cut):
        compute = build_compute(facts, stage, MACHINE, None)
        assert compute.n_params == facts.spec.stage_params(facts.cut, stage)
        assert end - first > 1


def test_the_data_go_on_at_an_offset() -> None:
    """Tokens and samples: after 4 sequences, two microbatches further."""
    side = [(np.float32(k), np.int64(k)) for k in range(50)]
    samples = SampleData("own", side, side, TensorType("float32", ()), TensorType("int64", ()), "")
    plain, later = (
        RunFacts.of(load_config(None, [*SIZES, "train.batch=8", "train.microbatch=2", f"train.data_offset={offset}"]))
        for offset in (0, 4)
    )
    ours, theirs = later.source_of(np.arange(1000)), plain.source_of(np.arange(1000))
    for begun, whole in ((ours, theirs), (later.source(samples), plain.source(samples))):
        for index, other in (((0, 0), (0, 2)), ((0, 2), (1, 0)), ((1, 3), (2, 1))):
            assert np.array_equal(begun.microbatch(*index), whole.microbatch(*other))
        assert not np.array_equal(begun.microbatch(0, 0), whole.microbatch(0, 0))


def checkpoint_of(config: RunConfig, **manifest: object) -> Checkpoint:
    """A checkpoint's description of a run, without the files."""
    facts = RunFacts.of(config)
    return Checkpoint(None, {**facts.manifest("run"), **manifest}, facts.spec, config)  # type: ignore[arg-type]
