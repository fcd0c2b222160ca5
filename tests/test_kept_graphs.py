"""Graphs of traced models in the cache: read again they compute the same, and are never others than were traced."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.model.traced import kept, making, outline
from muletrain.model.traced.chain import TracedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CONFIGS = {
    "llama": {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "mixtral": {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 4,
    },
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "sliding_window": 8,
    },
}
COMMON = {"vocab_size": 128, "hidden_size": 32, "max_position_embeddings": 32}


@pytest.fixture(autouse=True)
def _as_in_another_process() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    for function in (making.computing, making.made, making.outlined):
        function.cache_clear()


def model_of(kind: str) -> TracedModel:
    return TracedModel(json.dumps({**COMMON, **CONFIGS[kind]}, sort_keys=True), 32)


def loss_of(model: TracedModel) -> torch.Tensor:
    module = model.stage(None, model.cut(1))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator).mul(0.1).requires_grad_()
        for name, shape in sorted(model.shapes.items())
    }
    module.bind(weights)
    tokens = torch.arange(16).reshape(2, 8)
    loss = module.loss(tokens, tokens + 1)
    loss.backward()
    return torch.cat([loss.detach().reshape(1), *(w.grad.flatten() for w in weights.values() if w.grad is not None)])


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_process_that_finds_the_graphs_traces_nothing_and_computes_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    first = loss_of(model)
    forget()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr(making, "made", never)
    again = loss_of(model_of(kind))
    assert torch.equal(first, again)


def test_a_graph_that_is_not_the_one_agreed_on_is_not_used() -> None:
    model = model_of("llama")
    first = loss_of(model)
    found = kept.kept_graphs(model.architecture, 32, "float32")
    assert found is not None
    other = TracedModel(json.dumps({**model.config, "num_attention_heads": 2}, sort_keys=True), 32)
    stranger = making.made(other, "float32")
    kept.keep_graphs(stranger.parts, stranger.constants, model.architecture, 32, "float32")
    forget()
    assert torch.equal(loss_of(model), first)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t[: len(t) // 2],
        lambda t: t.replace("op.aten.", "op.os."),
        lambda t: "{}",
        lambda t: t.replace("op.aten.mul.Tensor", "op.aten.add.Tensor"),
    ],
    ids=["torn", "of another library", "of another kind", "of another computation"],
)
def test_a_damaged_entry_is_not_used(damage: Callable[[str], str]) -> None:
    model = model_of("llama")
    making.computing(model, "float32")
    entry = kept.kept(kept.KIND, kept._about(model.architecture, 32, "float32"), kept._Entry)
    assert entry is not None
    content = damage(entry.content)
    assert content != entry.content
    about = kept._about(model.architecture, 32, "float32")
    kept.keep(kept.KIND, about, kept._Entry(content=content, digest=entry.digest))
    assert kept.kept_graphs(model.architecture, 32, "float32") is None
    kept.keep(kept.KIND, about, entry)
    assert kept.kept_graphs(model.architecture, 32, "float32") is not None


def test_graphs_are_those_of_one_model_length_precision_and_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits nothing but the entry's key tells other graphs apart: machines agree on those in fp32."""
    model = model_of("llama")
    making.computing(model, "float32")
    there = (model.architecture, 32, "float32")
    others = [(model.architecture, 32, "bfloat16"), (model.architecture, 31, "float32"), ("{}", 32, "float32")]
    assert kept.kept_graphs(*there) is not None
    assert [kept.kept_graphs(*other) for other in others] == [None] * 3
    for name, value in (("version", lambda name: "0.0"), ("_own_text", lambda: "changed")):
        with monkeypatch.context() as updated:
            updated.setattr(outline, name, value)
            assert kept.kept_graphs(*there) is None
            assert outline.known(*there[:2]) is None
    assert kept.kept_graphs(*there) is not None


def test_graphs_that_would_not_be_read_as_they_are_or_are_too_large_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they an error: such a model is traced each time."""
    model = model_of("llama")
    fresh = making.made(model, "float32")

    def found() -> bool:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        kept.keep_graphs(fresh.parts, fresh.constants, model.architecture, 32, "float32")
        there = kept.kept_graphs(model.architecture, 32, "float32") is not None
        assert there == any((tmp_path / "muletrain").rglob("*.json")), "what is of no use takes no place"
        return there

    with monkeypatch.context() as small:
        small.setattr(kept, "MOST_BYTES", 1)
        assert not found()
    with monkeypatch.context() as inexact:
        value = kept._value
        inexact.setattr(kept, "_value", lambda x: 0.5 if isinstance(x, float) else value(x))
        assert not found()
    with monkeypatch.context() as strange:
        strange.setattr(kept, "_name_of", lambda target: "op.os.system.default")
        assert not found()
    assert found()
