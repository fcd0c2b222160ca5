"""The outline of a traced chain: memory as autograd needs it, and what the cache gives is what tracing would."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from muletrain.compute.profile import _Live
from muletrain.config import cache
from muletrain.config.model_sections import ModelConfig
from muletrain.errors import ConfigError
from muletrain.model.dropout import Masks
from muletrain.model.make import make_block, make_model, make_stage
from muletrain.model.traced import export
from muletrain.model.traced import making as tracing
from muletrain.model.traced.architecture import build
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.outline import alike, lengthened, told
from muletrain.model.traced.stage import TracedStage
from tests.traced_models import CONTEXT, config_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from muletrain.model.module import StageModule

SEQUENCES = 3
SIZES = ModelConfig(layers=2, width=32, heads=4, ffn=64, vocab=3000, context=CONTEXT)
NATIVE = make_model(SIZES)


@pytest.fixture(autouse=True)
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is empty, and a process that has traced nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    return tmp_path / "muletrain" / "traced"


def forget() -> None:
    told.clear()
    tracing.outlined.cache_clear()
    tracing.tables_bytes_of.cache_clear()
    tracing.kept_in_16_bits.cache_clear()
    tracing.made.cache_clear()


def model_of(name: str, **changes: int) -> TracedModel:
    return TracedModel(json.dumps(config_of(name, **changes), sort_keys=True), CONTEXT)


def kept_by(block: StageModule, x: Tensor) -> int:
    """Bytes that autograd keeps of a pass; weights and what all blocks share do not count."""
    tables = block.tables.of(SEQUENCES, CONTEXT, x.device) if isinstance(block, TracedStage) else {}
    shared = [*block.parameters(), *tables.values()]
    others = {t.untyped_storage()._cdata for t in shared if isinstance(t, torch.Tensor)}
    found = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in others:
            found[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, Masks(0, 0, 0))
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("name", ["gpt2", "mistral", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_the_estimate_of_a_blocks_activations_is_what_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    """Dropout of attention, grouped heads, a window that is no causal mask, experts."""
    model = model_of(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 1})
    block = model.block(1)
    block.bind({n: (torch.randn(s) * 0.1).to(dtype) for n, s in block.shapes().items()})
    x = torch.randn(SEQUENCES, CONTEXT, model.width, dtype=dtype, requires_grad=True)
    assert SEQUENCES * CONTEXT * model.kept_bytes(0, dtype.itemsize) == pytest.approx(kept_by(block, x), rel=0.02)


@pytest.mark.parametrize("name", ["gpt2", "native"])
def test_what_comes_before_the_first_block_counts(name: str) -> None:
    """Tokens, and masks of dropout."""
    model = model_of(name) if name == "gpt2" else make_model(SIZES.model_copy(update={"dropout": 0.1}))
    part = make_block(model, 0, ((0, 0), *((k, k + 1) for k in range(model.layers)), (model.layers, model.layers)))
    part.bind({n: torch.randn(s) for n, s in part.shapes().items()})
    kept = kept_by(part, torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64)) / (SEQUENCES * CONTEXT)
    assert kept == model.width + 8
    cut = model.cut(2)
    blocks = sum(model.kept_bytes(layer, 4) for layer in range(*cut[0]))
    assert model.stage_kept_bytes(cut, 0, 10, 4) == pytest.approx(10 * (blocks + kept))


def test_in_16_bits_one_block_of_each_kind_is_traced() -> None:
    """Layers whose attention differs in its mask alone are of two kinds."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = config_of("gemma3", layer_types=kinds, num_hidden_layers=4)
    model = TracedModel(json.dumps(config, sort_keys=True), CONTEXT)
    found = [model.kept_bytes(layer, 2) for layer in range(4)]
    assert found[0] > found[1]
    assert tracing.made.cache_info().currsize == 2, "in fp32 and, shorter, in bf16"
    whole = tracing.made(model, "bfloat16").outline.parts
    assert tracing.made.cache_info().currsize == 3
    assert found == [part.kept_bytes for part in whole[1:-1]]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_the_loss_counts_at_its_peak(dtype: torch.dtype) -> None:
    for model in (model_of("llama-linear", vocab_size=3000, num_hidden_layers=2), NATIVE):
        stage = make_stage(model, 1, model.cut(2))
        stage.bind({n: torch.ones(s, dtype=dtype) for n, s in stage.shapes().items()})
        x = torch.randn(SEQUENCES, CONTEXT, model.width, dtype=dtype, requires_grad=True)
        with _Live() as live:
            loss = stage.loss(x, torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64))
            torch.autograd.grad(loss, [x, *stage.parameters()])
        found = model.kept_bytes(1, dtype.itemsize) + model.head_kept_bytes(dtype.itemsize)
        assert SEQUENCES * CONTEXT * found == pytest.approx(live.peak, rel=0.05)


def test_the_cache_says_what_tracing_does(kept_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2", num_hidden_layers=2)
    traced, tables = model.outline, model.tables_bytes(2)
    written = [entry.stat().st_mtime_ns for entry in kept_in.iterdir()]
    assert model.tables_bytes(2) == tables
    assert [entry.stat().st_mtime_ns for entry in kept_in.iterdir()] == written, "planning asks again and again"
    forget()
    with monkeypatch.context() as without:
        without.setattr(export, "trace", None)
        assert model_of("qwen2", num_hidden_layers=2).tables_bytes(2) == tables
        assert model_of("qwen2", num_hidden_layers=2).outline.model_copy(update={"tables": {}}) == traced
        with pytest.raises(TypeError):  # another length is another chain
            _ = TracedModel(model.architecture, CONTEXT + 1).layers
    (entry,) = kept_in.iterdir()
    entry.write_bytes(entry.read_bytes()[:-9])  # torn
    forget()
    assert model_of("qwen2", num_hidden_layers=2).outline == traced
    assert json.loads(entry.read_text())["digest"] == traced.digest


SHORT: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"num_hidden_layers": 4, "mlp_only_layers": [1, 2]},  # one block of experts is in the short one
    "gemma3": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", SHORT)
def test_planning_traces_the_first_block_of_each_kind_and_finds_what_all_blocks_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "WORTHWHILE", 1)
    model = TracedModel(json.dumps(config_of(name, **SHORT[name]), sort_keys=True), CONTEXT)
    short, tables = model.outline, model.tables_bytes(3)
    assert short.digest is None
    assert tracing.made.cache_info().misses == 1
    name_before = model.chain_name
    assert tracing.made.cache_info().misses == 2, "machines compare all blocks"
    whole = tracing.made(model, "float32")
    assert name_before.startswith(str(whole.outline.digest)[:16])
    assert whole.outline.model_copy(update={"digest": None}) == short
    assert whole.tables.most_bytes(3, CONTEXT) == tables
    forget()
    assert model.outline == whole.outline, "it took the short one's place"


def test_layers_are_alike_if_nothing_but_their_number_differs() -> None:
    beside: dict[str, list[str]] = {}

    def found(name: str, **changes: Any) -> list[int]:
        built = build(config_of(name, **changes))
        layers = getattr(built, "transformer", None) or built.model
        assert isinstance(layers, torch.nn.Module)
        config: Any = built.config
        return alike(getattr(layers, "h", None) or layers.layers, {**config.to_dict(), **beside})

    assert found("qwen2", num_hidden_layers=4) == [0, 0, 0, 0]
    assert found("gpt2", n_layer=3, scale_attn_by_inverse_layer_idx=True) == [0, 1, 2]
    assert found("qwen3-moe", num_hidden_layers=5, mlp_only_layers=[1, 3]) == [0, 1, 0, 1, 0]
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    assert found("qwen3", num_hidden_layers=4, **windows) == [0, 0, 2, 2]
    beside["what_the_model_itself_asks"] = ["a", "b", "a"]
    assert found("qwen2", num_hidden_layers=3) == [0, 1, 0]


def test_a_short_model_that_is_none_of_the_whole_is_not_believed() -> None:
    model = model_of("qwen2", num_hidden_layers=2)
    whole, path = model.outline, "model.layers"
    assert lengthened(whole, path, [0, 1], whole.shapes) == whole.model_copy(update={"digest": None})
    larger = {name: (*shape[:-1], shape[-1] + 1) if ".1." in name else shape for name, shape in whole.shapes.items()}
    assert lengthened(whole, path, [0, 0], larger) is None
    assert lengthened(whole, path, [0, 0], {**whole.shapes, "model.layers.1.other": (3,)}) is None
    assert lengthened(whole, path, [0, 0, 0], whole.shapes) is None


@pytest.mark.parametrize("others", ["as it was", "replaced by another process", "removed"])
def test_blocks_other_than_the_kept_ones_are_not_computed(kept_in: Path, others: str) -> None:
    """The cache gave a digest to the run, and software that was changed under the same version makes another one."""
    right = model_of("qwen2", num_hidden_layers=2).outline
    (entry,) = kept_in.iterdir()
    entry.write_text(right.model_copy(update={"digest": "0" * 64}).model_dump_json())
    forget()
    model = model_of("qwen2", num_hidden_layers=2)
    assert model.chain_name.startswith("0000")
    if others == "replaced by another process":
        entry.write_text(right.model_dump_json())
    elif others == "removed":
        entry.unlink()
    with pytest.raises(ConfigError, match=rf"makes other blocks \({right.digest[:16]}\) than before.*begin again"):
        model.stage(0, model.cut(2))
    forget()
    assert model_of("qwen2", num_hidden_layers=2).outline == right


def test_the_oldest_entries_go(kept_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST", 2)
    found = model_of("qwen2", num_hidden_layers=2).outline
    for number in range(5):
        cache.keep("traced", {"number": number}, found)
    assert len([*kept_in.iterdir()]) == 2
    assert cache.kept("traced", {"number": 4}, type(found)) == found
    assert cache.kept("traced", {"number": 0}, type(found)) is None


def test_a_window_counts_in_sequences_whose_mask_is_too_large_to_be_made() -> None:
    """The mask of a window is a table, and autograd keeps what attention adds of it; a causal mask needs none."""
    length, layer_types = 20_000, ["sliding_attention", "full_attention"]
    config = config_of("gemma3", layer_types=layer_types, num_hidden_layers=2, sliding_window=600)
    model = TracedModel(json.dumps({**config, "max_position_embeddings": length}, sort_keys=True), length)
    sliding, full = (model.kept_bytes(layer, 4) for layer in range(2))
    assert sliding == pytest.approx(full + 4 * length, rel=0.01)
    kinds = model.outline.kinds
    assert kinds[1] != kinds[2]
    assert model.tables_bytes(1) == pytest.approx((1 + 4) * length**2, rel=0.05), (
        "a causal mask is made, and kept by none"
    )
