"""Learned compression between stages (SWARM, app. J.1): any cut computes the same model, and less goes from stage to
stage."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.compute.estimate import stash_bytes
from muletrain.compute.profile import _Live
from muletrain.compute.swap.fit import blocks_of
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision, RunConfig
from muletrain.errors import ConfigError
from muletrain.model.chain import Compression, Model
from muletrain.model.compression import Borders
from muletrain.model.dropout import Masks
from muletrain.model.make import load_model, make_model, make_stage, model_from_json
from muletrain.model.module import StageModule
from muletrain.model.stage import initial_weight
from muletrain.model.traced.chain import TracedModel
from muletrain.runs.assemble import RunFacts, initial_weights, resolve_start
from muletrain.sim.setting import run_cost
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import readable

from .traced_models import CONTEXT, config_of, new_model

if TYPE_CHECKING:
    from pathlib import Path

KINDS = "bottleneck", "maxout"
SEQUENCES, LAYERS, STAGES = 3, 4, 3
SIZES = ModelConfig(layers=LAYERS, width=32, heads=2, ffn=96, vocab=300, context=CONTEXT, dropout=0.1)
BOTTLENECK, MAXOUT = Compression("bottleneck", 4), Compression("maxout", 2)


def model_of(kind: str, compression: Compression) -> Model:
    if kind in ("native", "shared"):
        asked = {"compression": compression.kind, "compression_factor": compression.factor}
        asked["compression_after"] = compression.after
        return make_model(SIZES.model_copy(update={"share_layers": kind == "shared", **asked}))
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    architecture = json.dumps(config_of(kind, **{layers: LAYERS}), sort_keys=True)
    return TracedModel(architecture, CONTEXT, compression)


def bound(module: StageModule) -> StageModule:
    return module.bind({n: initial_weight(module.spec, n, s, seed=0) for n, s in module.shapes().items()}).train()


def through(stages: list[StageModule], tokens: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """The loss, and all gradients by name, with activations that pass from stage to stage."""
    x, masks, passed = tokens, Masks(0, 1, 2), []
    for stage in stages[:-1]:
        x = x.detach().requires_grad_(x.is_floating_point())
        passed.append((x, stage(x, masks)))
        x = passed[-1][1]
        assert x.shape[2] == stage.spec.passed
    x = x.detach().requires_grad_(x.is_floating_point())
    loss = stages[-1].loss(x, targets, masks)
    loss.backward()
    for before, after in reversed(passed):
        after.backward(x.grad)
        x = before
    found = {n: p.grad for stage in stages for n, p in stage.named_parameters()}
    return [loss.detach(), *(found[n] for n in sorted(found) if found[n] is not None)]


@pytest.mark.parametrize("compression", [BOTTLENECK, MAXOUT], ids=lambda c: c.kind)
@pytest.mark.parametrize("kind", ["native", "shared", "gpt2", "qwen3", "mixtral"])
def test_any_cut_computes_the_same_model(kind: str, compression: Compression) -> None:
    model = model_of(kind, compression)
    cut = model.cut(STAGES)
    placed, draws = model.placed(cut), torch.Generator().manual_seed(0)
    assert placed.borders == tuple(end - 1 for _, end in cut[:-1])
    assert model_from_json(placed.to_json()) == placed
    tokens, targets = torch.randint(1, 300, (2, SEQUENCES, CONTEXT), generator=draws)
    apart = through([bound(make_stage(model, s, cut)) for s in range(STAGES)], tokens, targets)
    whole = through([bound(make_stage(placed, None, cut))], tokens, targets)
    assert len(apart) == len(whole)
    for a, b in zip(apart, whole, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    if kind != "shared":  # fewer stages keep all borders
        fewer = placed.cut(2)
        for a, b in zip(
            through([bound(make_stage(placed, s, fewer)) for s in (0, 1)], tokens, targets), whole, strict=True
        ):
            assert (a - b).norm() <= 1e-5 * b.norm()
    state = {n: initial_weight(placed, n, s, 0) for n, s in make_stage(placed, None, cut).shapes().items()}
    loaded = load_model(placed, state).eval()
    stages = [bound(make_stage(model, s, cut)).eval() for s in range(STAGES)]
    x = tokens
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
        assert (loaded(tokens) - x).norm() <= 1e-5 * x.norm()


@pytest.mark.parametrize("compression", [BOTTLENECK, MAXOUT], ids=lambda c: c.kind)
def test_parameters_bytes_and_memory_are_counted(compression: Compression) -> None:
    plain, model = make_model(SIZES), model_of("native", compression)
    cut = model.cut(STAGES)
    for stage in range(STAGES):
        module, x = bound(make_stage(model, stage, cut)), torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64)
        assert sum(p.numel() for p in module.parameters()) == model.stage_params(cut, stage)
        assert model.stage_flops(cut, stage) > plain.stage_flops(cut, stage)
        if stage == STAGES - 1:
            continue
        if stage:
            x = torch.randn(SEQUENCES, CONTEXT, model.passed, requires_grad=True)
        module(x, Masks(0, 1, 2))  # tables
        with _Live() as live:
            kept = module(x, Masks(0, 1, 2))
        estimate = stash_bytes(model, cut, stage, SEQUENCES * CONTEXT, Precision.FP32)
        kept_bytes = live._now - kept.untyped_storage().nbytes()
        assert 0.85 * estimate < kept_bytes < 1.1 * estimate, kept_bytes / estimate
    config = RunConfig.model_validate({"train": {"microbatch": 4}})
    costs = [run_cost(config, spec, cut).backward_bytes[1] for spec in (plain, model)]
    assert costs[0] / costs[1] == pytest.approx(compression.factor, rel=0.02)


def test_a_cut_elsewhere_is_refused() -> None:
    placed = model_of("native", BOTTLENECK).placed(((0, 2), (2, 4)))
    assert placed.most_stages == 2
    with pytest.raises(ConfigError, match="3 stages, and the model's compression allows 2"):
        placed.cut(3)
    with pytest.raises(
        ConfigError, match="compresses after layers 2, and stages can only meet there, not after layer 1"
    ):
        placed.cut(2, [1, 3])
    with pytest.raises(ConfigError, match="no borders of 4 layers"):
        model_of("native", Compression("maxout", 2, (2, 1)))
    with pytest.raises(ConfigError, match="no borders of 4 layers"):
        model_of("native", Compression("maxout", 2, (3,)))
    with pytest.raises(ConfigError, match="compression_factor: 3 does not divide"):
        make_model(SIZES.model_copy(update={"compression": "maxout", "compression_factor": 3}))


def test_the_maximum_is_of_neighbours_after_the_norm() -> None:
    """By hand: SWARM, app. J.1."""
    spec = model_of("native", MAXOUT).placed(((0, 2), (2, 4)))
    borders = Borders(spec, 0, 4)
    borders.load_state_dict(
        {"1.down.norm": torch.full((32,), 2.0), "1.up.norm": torch.ones(16), "1.up.matrix": torch.eye(32, 16)},
        assign=True,
    )
    x = torch.randn(2, 3, 32)
    normed = 2 * (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    sent = torch.maximum(normed[..., 0::2], normed[..., 1::2])
    assert torch.allclose(borders.leave(x, 1), sent, atol=1e-5)
    again = (sent - sent.mean(-1, keepdim=True)) / (sent.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    got = borders.enter(sent, 2)
    assert torch.allclose(got[..., :16], again, atol=1e-5)
    assert not got[..., 16:].any()
    assert borders.leave(x, 0) is x


@pytest.mark.parametrize("compression", [BOTTLENECK, MAXOUT], ids=lambda c: c.kind)
def test_at_first_the_way_back_is_the_transpose_of_the_way_there(compression: Compression) -> None:
    spec = model_of("native", compression).placed(((0, 2), (2, 4)))
    borders, draws = Borders(spec, 0, 4), torch.Generator().manual_seed(0)
    shapes = {name: tuple(p.shape) for name, p in borders.named_parameters()}
    first = {name: initial_weight(spec, f"compression.{name}", shape, 3) for name, shape in shapes.items()}
    borders.load_state_dict(first, assign=True)
    x = torch.randn(200, 32, generator=draws)
    back = borders.enter(borders.leave(x, 1), 2).detach()
    assert 0.7 < float(back.std()) < 1.3
    alike = torch.nn.functional.cosine_similarity(back, x).mean()
    assert alike > 0.75 * compression.factor**-0.5, "what is left of the features"


def test_swapped_blocks_count_what_compresses() -> None:
    plain, model = make_model(SIZES), model_of("native", BOTTLENECK)
    cut = model.cut(STAGES)
    for stage in range(STAGES):
        found = [
            sum(block.load_bytes for block in blocks_of(spec, cut, stage, 64, Precision.FP32, 1e9))
            for spec in (plain, model)
        ]
        assert found[1] - found[0] == 4 * model.compression_params(cut, stage) > 0


def test_a_run_places_the_borders_and_passes_less() -> None:
    settings = {"compression": "bottleneck", "compression_factor": 4}
    facts = RunFacts.of(RunConfig.model_validate({"model": settings, "fleet": {"stages": 2}}))
    assert facts.spec.borders == (facts.cut[0][1] - 1,)
    assert facts.plan().width == facts.spec.width // 4


@pytest.mark.parametrize("stages", [(2, 2), (2, 1, 2, 1)], ids=["two stages", "four stages"])
@pytest.mark.parametrize("way", [*KINDS, "in pieces"])
def test_a_fleet_that_loses_a_replica_trains_as_one_process(way: str, stages: tuple[int, ...]) -> None:
    """20 steps in fp32, one replica killed: tensors within 1e-5. 'in pieces': backward by block, the loss of three tokens
    at once; a single process computes both whole. The epsilon keeps AdamW from enlarging what is next to nothing."""
    learned = (f"model.compression={way}", "optimizer.eps=1e-3")
    overrides = ("compute.checkpointing=block",) if way == "in pieces" else learned
    fault = Fault(0.5, "kill", ("peer-0b",))
    outcome = play(Scenario(11, stages, 2, 20, 8, 0.01, (fault,), overrides=overrides, tolerance=1e-5))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.difference <= 1e-5


def test_a_given_model_keeps_the_asked_compression(tmp_path: Path) -> None:
    new_model("gpt2").save_pretrained(tmp_path)
    asked = {"from": str(tmp_path), "compression": "maxout", "compression_factor": 4}
    config = resolve_start(RunConfig.model_validate({"model": asked, "fleet": {"stages": 2}}), weights=False)
    facts = RunFacts.of(config)
    assert facts.spec.compression == Compression("maxout", 4, (facts.cut[0][1] - 1,))
    for stage in range(2):
        load, shapes = initial_weights(facts, stage), make_stage(facts.spec, stage, facts.cut).shapes()
        assert load is not None
        assert all(tuple(load(name).shape) == shape for name, shape in shapes.items())
        assert any(name.startswith("compression.") for name in shapes)
