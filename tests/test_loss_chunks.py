"""The loss in chunks of tokens: the same numbers, with logits of one chunk at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory.run import peak_of
from muletrain.config.model_sections import ModelConfig
from muletrain.model import chain
from muletrain.model.chain import LOSS_BYTES, Model
from muletrain.model.make import make_block, make_model, make_stage
from muletrain.model.module import StageModule
from muletrain.model.spec import ModelSpec
from muletrain.model.traced.architecture import Whole
from muletrain.model.traced.chain import TracedModel

from .traced_models import CONTEXT, chain_of, config_of, new_model

SEQUENCES, CHUNK = 3, 7
NATIVE = make_model(
    ModelConfig(layers=2, width=32, heads=2, ffn=48, vocab=500, context=CONTEXT, dropout=0.1, tie=False)
)
assert isinstance(NATIVE, ModelSpec)
KINDS = ["native", "tied", "gpt2", "gemma3", "phi", "qwen3"]


def model_of(kind: str) -> Model:
    if kind in ("native", "tied"):
        assert isinstance(NATIVE, ModelSpec)
        return replace(NATIVE, tie=kind == "tied")
    changes = {"final_logit_softcapping": 3.0} if kind == "gemma3" else {}
    return TracedModel(json.dumps(config_of(kind, **changes), sort_keys=True), CONTEXT)


def bound(module: StageModule, dtype: torch.dtype = torch.float32) -> StageModule:
    draws = torch.Generator().manual_seed(0)
    shapes = sorted(module.shapes().items())
    return module.bind({name: (torch.randn(s, generator=draws) * 0.2).to(dtype) for name, s in shapes})


def computed(module: StageModule, x: torch.Tensor, targets: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    """The loss, and its gradients of the inputs and the parameters."""
    x = x.detach().requires_grad_(x.is_floating_point())
    wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
    loss = module.loss(x, targets, None, scale)
    return [loss.detach(), *(g / scale for g in torch.autograd.grad(loss, wanted, torch.full_like(loss, scale)))]


def off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_in_chunks_loss_and_gradients_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last stage, of the whole model, and of a head alone (a swapped stage's last block); some targets do not
    count."""
    model = model_of(kind)
    targets = torch.randint(0, model.vocab + 1, (SEQUENCES, CONTEXT), generator=torch.Generator().manual_seed(1))
    targets[0, :5] = model.vocab
    x = torch.randn(SEQUENCES, CONTEXT, model.width, generator=torch.Generator().manual_seed(2))
    tokens = targets.clamp(max=model.vocab - 1)
    modules = [(make_stage(model, 1, model.cut(2)), x), (make_stage(model, 0, model.cut(1)), tokens)]
    if kind != "tied":
        blocks = ((0, 0), *((n, n + 1) for n in range(model.layers)), (model.layers, model.layers))
        modules.append((make_block(model, model.layers + 1, blocks), x))
    for module, inputs in modules:
        bound(module)
        whole = computed(module, inputs, targets)
        with monkeypatch.context() as small:
            small.setattr(chain, "LOSS_CHUNK", LOSS_BYTES * model.vocab * CHUNK)
            assert model.loss_tokens == CHUNK
            found = computed(module, inputs, targets, scale=8.0)
            with torch.no_grad():
                heldout = module.loss(inputs, targets)
        assert off(found, whole) < 1e-6
        assert heldout == pytest.approx(float(whole[0]), rel=1e-6)


def whole_of(kind: str, vocab: int = 500) -> Whole:
    """A model as ``eval`` and ``Pretrained`` compute it: by its class of ``transformers``."""
    model = new_model(kind, vocab_size=vocab, **({"final_logit_softcapping": 3.0} if kind == "gemma3" else {}))
    return Whole(chain_of(model), model.eval())


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "phi", "qwen3-moe", "cohere", "mamba"])
def test_a_class_of_transformers_computes_its_loss_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it does after the output matrix, such as to scale or to cap the logits."""
    whole = whole_of(kind)
    tokens = torch.randint(0, 500, (SEQUENCES, CONTEXT), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[0, :5] = 500
    expected = computed(whole, tokens, targets)
    found = whole_of(kind)
    with monkeypatch.context() as small:
        small.setattr(chain, "LOSS_CHUNK", LOSS_BYTES * 500 * CHUNK)
        assert found.loss_tokens == CHUNK
        assert off(computed(found, tokens, targets, scale=8.0), expected) < 1e-6
        with torch.no_grad():
            assert float(found.loss(tokens, targets)) == pytest.approx(float(expected[0]), rel=1e-6)
            assert torch.equal(found(tokens), whole(tokens)), "the model is as before"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_a_large_vocabulary_takes_the_memory_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, rows = 1 << 16, 32
    whole = whole_of("qwen3", vocab)
    tokens = torch.zeros(rows, CONTEXT, dtype=torch.int64)
    monkeypatch.setattr(chain, "LOSS_CHUNK", 1 << 25)
    assert whole.loss_tokens == 42

    def measure() -> None:
        with torch.no_grad():
            whole.loss(tokens, tokens)

    measure()
    in_chunks = peak_of(measure)
    whole.loss_tokens = 1 << 40
    at_once = peak_of(measure)
    assert at_once > 2 * 4 * vocab * rows * CONTEXT * 0.9, "the logits, and their logarithms"
    assert in_chunks < 0.25 * at_once


def test_a_class_whose_logits_depend_on_other_tokens_computes_them_at_once() -> None:
    found = whole_of("gpt2")
    found.model.lm_head.register_forward_hook(lambda _, __, logits: logits - logits.mean(1, keepdim=True))
    assert found.loss_tokens > 1 << 40
    found = whole_of("gpt2")
    found.model.base_model_prefix = ""
    assert found.loss_tokens > 1 << 40, "it has no inner model"


def test_logits_of_one_chunk_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plain = list[int](), torch.nn.functional.cross_entropy

    def spying(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(logits.shape[0])
        return plain(logits, *args, **kwargs)

    for kind in ("native", "gemma3"):
        model = model_of(kind)
        module = bound(make_stage(model, 1, model.cut(2)))
        with monkeypatch.context() as small:
            small.setattr(torch.nn.functional, "cross_entropy", spying)
            small.setattr(chain, "LOSS_CHUNK", LOSS_BYTES * model.vocab * 40)
            computed(
                module, torch.randn(SEQUENCES, CONTEXT, model.width), torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64)
            )
        assert seen == [40, 40, SEQUENCES * CONTEXT - 80]
        seen.clear()
    whole, largest = whole_of("qwen3"), list[int]()
    whole.model.lm_head.register_forward_hook(lambda _, __, logits: largest.append(logits.numel() // 500))
    tokens = torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64)
    with monkeypatch.context() as small, torch.no_grad():
        small.setattr(chain, "LOSS_CHUNK", LOSS_BYTES * 500 * 40)
        assert whole.loss_tokens == 40
        largest.clear()
        whole.loss(tokens, tokens)
    assert largest == [SEQUENCES, 40, 40, SEQUENCES * CONTEXT - 80]


@pytest.mark.parametrize("kind", ["native", "qwen3"])
def test_a_loss_that_is_only_measured_has_no_backward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    module = bound(make_stage(model, 1, model.cut(2)))
    monkeypatch.setattr(chain, "LOSS_CHUNK", LOSS_BYTES * model.vocab * CHUNK)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("gradients of what is only measured"))
    with torch.no_grad():
        module.loss(torch.randn(SEQUENCES, CONTEXT, model.width), torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64))


def test_fp16_gradients_are_computed_at_the_scale_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a scale that is too small they vanish, and dividing at the end does not bring them back."""
    model = model_of("native")
    module = bound(make_stage(model, 1, model.cut(2)), torch.float16)
    x, targets = torch.randn(64, CONTEXT, model.width) * 0.01, torch.randint(0, model.vocab, (64, CONTEXT))
    exact = bound(make_stage(model, 1, model.cut(2)))
    expected = computed(exact, x, targets)
    monkeypatch.setattr(chain, "LOSS_CHUNK", LOSS_BYTES * model.vocab * 100)
    assert off(computed(module, x, targets, 1024.0)[1:], expected[1:]) < 0.02
    assert off(computed(module, x, targets, 2.0**-8)[1:], expected[1:]) > 0.1


def test_a_head_that_may_mix_tokens_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only known operators are computed by chunks."""
    model = model_of("qwen3")
    assert isinstance(model, TracedModel)
    head = model.outline.parts[-1]
    assert head.by_token
    assert not model.outline.parts[1].by_token, "attention mixes tokens"
    outline = model.outline.model_copy(
        update={"parts": (*model.outline.parts[:-1], head.model_copy(update={"by_token": False}))}
    )
    monkeypatch.setattr(TracedModel, "outline", outline)
    assert model.loss_tokens > 1 << 40


def test_the_estimate_counts_one_chunk() -> None:
    for kind in ("native", "qwen3"):
        model = model_of(kind)
        few = model.loss_tokens // 2
        assert model.head_bytes(few, 4) == few * model.head_kept_bytes(4)
        assert model.head_bytes(100 * few, 4) < 2.1 * few * model.head_kept_bytes(4) + 100 * few * model.width * 4
