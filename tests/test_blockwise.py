"""Backward that computes one block again at a time: the same gradients, in a fraction of the memory."""

from __future__ import annotations

import json

import pytest
import torch

from muletrain.compute.estimate import Offer, stage_memory, stash_bytes
from muletrain.compute.profile import _Live
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision, RunConfig
from muletrain.events import PeerJoined
from muletrain.model.chain import Model
from muletrain.model.dropout import Masks
from muletrain.model.make import make_model, make_stage
from muletrain.model.module import StageModule
from muletrain.model.traced.chain import TracedModel
from muletrain.runs.assemble import RunFacts, build_compute
from muletrain.runs.measure.machine import Machine

from .traced_models import CONTEXT, config_of

SEQUENCES, LAYERS = 4, 8
SIZES = ModelConfig(layers=LAYERS, width=32, heads=2, ffn=96, vocab=300, context=CONTEXT, dropout=0.1)


def model_of(kind: str, **changes: int) -> Model:
    if kind in ("native", "shared"):
        return make_model(SIZES.model_copy(update={"share_layers": kind == "shared"}))
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    return TracedModel(json.dumps(config_of(kind, **{layers: LAYERS}), sort_keys=True), CONTEXT)


def bound(model: Model, stage: int, stages: int) -> StageModule:
    module, draws = make_stage(model, stage, model.cut(stages)), torch.Generator().manual_seed(0)
    return module.bind({n: torch.randn(s, generator=draws) * 0.2 for n, s in sorted(module.shapes().items())})


def computed(module: StageModule, x: torch.Tensor) -> list[torch.Tensor]:
    """Output or loss, and gradients of inputs and parameters, with dropout."""
    x = x.detach().requires_grad_(x.is_floating_point())
    masks, wanted = Masks(0, 1, 2), [t for t in (x, *module.parameters()) if t.requires_grad]
    if module.is_last:  # noqa: SIM108
        output = module.loss(x, torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64), masks)
    else:
        output = module(x, masks)
    return [output.detach(), *torch.autograd.grad(output, wanted, torch.ones_like(output))]


@pytest.mark.parametrize("kind", ["native", "shared", "gpt2", "gemma3", "mixtral"])
def test_gradients_are_the_same_and_less_memory_is_taken(kind: str) -> None:
    model = model_of(kind)
    for stage in range(2):
        module = bound(model, stage, 2)
        tokens = torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64)
        x = tokens if stage == 0 else torch.randn(SEQUENCES, CONTEXT, model.width)
        found, peaks = [], []
        for module.by_block in (False, True):
            computed(module, x)  # tables
            with _Live() as live:
                found.append(computed(module, x))
            peaks.append(live.peak)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        gradients = 4 * sum(p.numel() for p in module.parameters())
        activations = [stash_bytes(model, model.cut(2), stage, SEQUENCES * CONTEXT, Precision.FP32)]
        activations += [need_of(model, stage)]
        assert peaks[1] < activations[1] * 1.15 + gradients, "the estimate"
        saved = (peaks[0] - peaks[1]) / (activations[0] - activations[1])
        assert saved > 0.6, f"{saved:.2f} of what the estimate says"


def need_of(model: Model, stage: int) -> int:
    tokens = SEQUENCES * CONTEXT
    need = stage_memory(model, model.cut(2), stage, tokens=tokens, precision=Precision.FP32, checkpointing="block")
    return need.activations


def test_a_machine_goes_by_block_where_the_whole_graph_does_not_fit() -> None:
    config = RunConfig.model_validate(
        {
            "model": SIZES.model_dump(include={"layers", "width", "heads", "ffn", "vocab", "context"}),
            "fleet": {"stages": 2},
            "train": {"microbatch": 8},
            "compute": {"precision": "fp32"},
        }
    )
    facts = RunFacts.of(config)
    need = facts.needs()[0]
    assert need.smaller is not None
    assert need.smaller.activations < 0.5 * need.activations
    enough, little, too_little = need.total, need.total - 1, need.smaller.total - 1
    assert [need.resident(Offer(n)) for n in (enough, little, too_little)] == [True, True, False]
    assert need.of_device(Offer(little)) == need.smaller.total
    assert need.need(Offer(too_little)) == need.smaller.need()
    for memory, how in ((enough, "auto"), (little, "block")):
        machine = Machine(torch.device("cpu"), Precision.FP32, Offer(memory))
        compute = build_compute(facts, 0, machine, None)
        assert compute.by_block == (how == "block")
        compute.close()
    for how in ("always", "never"):
        fixed = RunFacts.of(
            config.model_copy(update={"compute": config.compute.model_copy(update={"checkpointing": how})})
        )
        assert fixed.needs()[0].smaller is None


def test_a_peer_that_computes_blocks_again_says_so() -> None:
    joined = PeerJoined("id", "peer-0", 0, "cpu", "fp32", True, 1_000, 1, by_block=True)
    assert (
        joined.sentence() == "peer-0 serves stage 0 (cpu, fp32, 1k parameters, computes blocks again to save memory)"
        "; as a trainer, it also builds microbatches from the data"
    )


@pytest.mark.parametrize("delayed", [False, True])
def test_swarms_model_with_gpt2s_vocabulary_fits_a_t4(delayed: bool) -> None:
    """SWARM, sec. 4.3 and app. G: three stages of 16 shared layers, 1.01 B parameters, on T4 of 15 GiB."""
    sizes = {"layers": 48, "width": 4096, "ffn": 16384, "heads": 32, "context": 2048, "vocab": 50257}
    model = make_model(ModelConfig(**sizes, share_layers=True, tie=True))
    cut = model.cut(3)
    assert model.cut_params(cut) == pytest.approx(1.01e9, rel=0.01)
    for stage in range(3):
        need = stage_memory(
            model, cut, stage, tokens=2048, precision=Precision.FP16, delayed=delayed, checkpointing="auto"
        )
        assert need.smaller is not None
        assert need.smaller.on_device < (12.5 if delayed else 10) * 2**30
