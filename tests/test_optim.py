"""AdamW against torch's, LAMB against the paper written out, the schedule against its definition."""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.config.load import load_config
from muletrain.config.schema import OptimizerConfig
from muletrain.optim.flat import FlatLayout
from muletrain.optim.norms import norm, square_norm
from muletrain.optim.rules import make_rule
from muletrain.optim.schedule import learning_rate

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = {"a.norm": (7,), "a.matrix": (5, 7), "b.norm": (3,), "b.matrix": (3, 11)}
STEPS = 20


def test_layout_puts_matrices_first_and_its_views_share_the_buffer() -> None:
    layout = FlatLayout.of(SHAPES)
    assert layout.names == ("a.matrix", "b.matrix", "a.norm", "b.norm")
    assert (layout.size, layout.decayed) == (35 + 33 + 7 + 3, 35 + 33)
    flat = torch.zeros(layout.size)
    layout.views(flat)["b.matrix"].fill_(1)
    assert flat.nonzero().flatten().tolist() == list(range(35, 68))


def test_adamw_equals_torch() -> None:
    config = OptimizerConfig(lr=0.01, warmup=5, weight_decay=0.3, eps=1e-7)
    ours, weights = _train(config)
    params = [torch.nn.Parameter(w.clone()) for w in weights.values()]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    for step in range(STEPS):
        for group in theirs.param_groups:
            group["lr"] = learning_rate(config, step, STEPS)
        for parameter, gradient in zip(params, _gradients(step).values(), strict=True):
            parameter.grad = gradient
        theirs.step()
    for name, expected in zip(weights, params, strict=True):
        torch.testing.assert_close(ours[name], expected.detach(), rtol=1e-5, atol=1e-6)
        assert (ours[name] - weights[name]).abs().max() > 0.01  # it did move


def test_lamb_equals_the_algorithm_written_out() -> None:
    """You et al. 2020, algorithm 2, in float64."""
    config = OptimizerConfig(name="lamb", lr=0.01, warmup=0, schedule="linear", weight_decay=0.1, eps=1e-6)
    ours, weights = _train(config)
    beta1, beta2 = config.betas
    for name, start in weights.items():
        x, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
        for step in range(STEPS):
            g = _gradients(step)[name].double()
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            r = (m / (1 - beta1 ** (step + 1))) / ((v / (1 - beta2 ** (step + 1))).sqrt() + config.eps)
            ratio = 1.0
            if x.dim() >= 2:
                r = r + config.weight_decay * x
                ratio = float(x.norm() / r.norm())
            x = x - learning_rate(config, step, STEPS) * ratio * r
        torch.testing.assert_close(ours[name], x.float(), rtol=1e-5, atol=1e-6)


def test_lamb_has_the_papers_settings_where_nothing_else_is_said() -> None:
    """SWARM app. G on You et al. 2020 (batch 16384): warm-up over a tenth, then linearly to zero."""
    lamb = load_config(None, ["optimizer.name=lamb"]).optimizer
    assert (lamb.lr, lamb.betas, lamb.eps, lamb.weight_decay) == (1e-3, (0.9, 0.95), 1e-6, 0.01)
    rates = [learning_rate(lamb, step, 201) for step in range(201)]
    assert rates[:2] == pytest.approx([1e-3 / 20, 2e-3 / 20])
    assert rates[20] == 1e-3
    assert rates[20:] == pytest.approx([1e-3 * (200 - step) / 180 for step in range(20, 201)])
    own = load_config(None, ["optimizer.name=lamb", "optimizer.eps=1e-7", "optimizer.schedule=cosine"]).optimizer
    assert (own.eps, own.schedule, own.weight_decay) == (1e-7, "cosine", 0.01)
    for rule in ("adamw", "lamb"):  # what 'muletrain config' says is what holds
        config = OptimizerConfig.model_validate({"name": rule})
        for name in ("lr", "eps", "weight_decay", "schedule"):
            said = OptimizerConfig.model_fields[name].description or ""
            assert f"{'lamb' if rule == 'lamb' else 'default:'} {getattr(config, name)}" in said


def test_threads_change_no_bit_of_an_update_nor_of_the_norm_that_clips() -> None:
    """Replicas of one stage may have other numbers of threads. (A plain sum over so many numbers does change.)"""
    layout = FlatLayout.of({"a": (1111, 997), "b": (1, 1_000_003), "norm": (100_003,), "c": (3, 5)})
    drawn = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(layout.size, generator=drawn), torch.randn(2, layout.size, generator=drawn)

    def bits(threads: int) -> list[bytes]:
        torch.set_num_threads(threads)
        found = [square_norm(gradients[0]).hex().encode()]
        for rule in ("adamw", "lamb"):
            weights, config = start.clone(), OptimizerConfig.model_validate({"name": rule, "lr": 0.01, "warmup": 0})
            optimizer = make_rule(config, 20, layout, weights.device)
            for step, gradient in enumerate(gradients):
                optimizer.step(weights, gradient.clone(), step)
            found.append(hashlib.sha256(weights.numpy().tobytes()).digest())
        return found

    before = torch.get_num_threads()
    try:
        one, *more = [bits(threads) for threads in (1, 2, 3, 4)]
    finally:
        torch.set_num_threads(before)
    assert all(found == one for found in more)


@pytest.mark.parametrize("size", [1, 7, 4096, 4097, 5_000_000])
def test_norms_are_exact_whatever_the_size(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) + 3
    exact = float(values.double().square().sum())
    assert square_norm(values) == pytest.approx(exact, rel=1e-6 if size < 10**6 else 1e-8)
    assert float(norm(values)) == pytest.approx(math.sqrt(exact), rel=1e-6)


def test_lamb_moves_weights_that_are_zero() -> None:
    layout = FlatLayout.of({"m": (2, 2)})
    weights = torch.zeros(layout.size)
    config = OptimizerConfig(name="lamb", lr=0.5, warmup=0)
    make_rule(config, 10, layout, weights.device).step(weights, torch.ones(layout.size), 0)
    torch.testing.assert_close(weights, torch.full((4,), -0.5))  # ratio 1, direction 1


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule_warms_up_peaks_and_ends_at_final_lr(schedule: str) -> None:
    config = OptimizerConfig(lr=2.0, warmup=10, final_lr=0.1, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(config, step, 111) for step in range(111)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert rates[9] == rates[10] == 2.0
    assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 0.2)
    if schedule != "constant":
        assert rates[60] == pytest.approx(1.1)  # half way, both shapes are at the mean of the two ends
        assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_schedule_of_a_single_step_is_finite() -> None:
    assert learning_rate(OptimizerConfig(lr=1.0, warmup=0), 0, 1) == 1.0
    assert math.isfinite(learning_rate(OptimizerConfig(lr=1.0, warmup=50), 3, 4))


def _train(config: OptimizerConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after and before ``STEPS`` steps."""
    layout = FlatLayout.of(SHAPES)
    draws = torch.Generator().manual_seed(1)
    flat = torch.randn(layout.size, generator=draws)
    start = {name: layout.views(flat)[name].clone() for name in SHAPES}
    rule = make_rule(config, STEPS, layout, flat.device)
    for step in range(STEPS):
        gradient = torch.empty(layout.size)
        for name, value in _gradients(step).items():
            layout.views(gradient)[name].copy_(value)
        rule.step(flat, gradient, step)
    return layout.views(flat), start


def _gradients(step: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}
