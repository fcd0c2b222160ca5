"""SWARM's square-cube law: how busy a stage is over a slow link (sec. 4.1, app. F): tables 1 and 6, figure 3, and what
sec. 3.1 says of tensor parallelism.

One batch is one sequence of 512 tokens; one synchronous trainer leads it through all stages, forward and back. Per
stage that takes

    T = (C^p + X^p)^(1/p) + n (RTT + 4.5 ms) + h,        busy: C / T

C: forward, backward and recomputation; X = 2 P / 500 Mb/s, activations one way and gradients the other (fp32; 8 bits
and h > 0 in "Ours"): what is larger hides the other, the better the larger p. Latency is not hidden: n round trips for
each stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import least_squares

from muletrain.config.model_sections import ModelConfig
from muletrain.model.spec import ModelSpec
from reproduction.baselines.megatron import Device, best_grid
from reproduction.reproduction import POINTS, Bar, Constant, Reproduction, Statement, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

TOKENS = 512
BYTES_PER_S = 500e6 / 8
RACK_RTT_S = 4.5e-3
"""App. F: 3-6 ms between the servers, to which the latency is added."""
RECOMPUTED = 4 / 3
"""Activation checkpointing: another forward pass, a third of forward and backward."""


@dataclass(frozen=True)
class Architecture:
    """A row of table 6 with its row of table 1. ``flop``: forward and backward of a batch on one stage, as printed."""

    name: str
    width: int
    heads: int
    layers: int
    activation_bytes: int
    params: float
    flop: float
    busy: tuple[float, ...]
    """[%], by ``RTTS_S``."""

    @property
    def exchanged_bytes(self) -> float:
        """Activations one way, gradients the other."""
        return 2.0 * TOKENS * self.width * self.activation_bytes

    @property
    def compressed(self) -> bool:
        return self.activation_bytes == 1


RTTS_S = (0.0, 0.010, 0.050, 0.100, 0.200)
RTT_NAMES = ("none", "10 ms", "50 ms", "100 ms", "200 ms")
BASE = Architecture("base", 768, 12, 1, 4, 7.08e6, 2.2e10, (18.0, 11.8, 4.88, 2.78, 1.53))
XXLARGE = Architecture("xxlarge", 4096, 32, 1, 4, 201e6, 6.2e11, (32.1, 28.9, 20.1, 14.9, 10.1))
GPT3 = Architecture("GPT-3", 12288, 96, 1, 4, 1.81e9, 5.5e12, (82.1, 79.3, 70.3, 60.2, 48.5))
OURS = Architecture("Ours", 4096, 32, 3, 1, 201e6, 1.8e12, (89.5, 87.2, 79.5, 71.5, 59.2))
ARCHITECTURES = (BASE, XXLARGE, GPT3, OURS)

OFFLOAD_SAMPLES_PER_S = {XXLARGE.name: 3.08, GPT3.name: 0.382}
"""Table 2: a GPU by itself with 4 layers, nothing on the network: what a layer computes, unmixed."""
OFFLOAD_LAYERS = 4


@dataclass(frozen=True)
class Costs:
    """The model's constants. ``sharpness``: p."""

    flop_per_s: float
    per_layer_s: float
    round_trips: float
    compressed_round_trips: float
    compressing_s: float
    sharpness: float = math.inf

    def compute_s(self, flop: float, layers: int) -> float:
        return flop * RECOMPUTED / self.flop_per_s + layers * self.per_layer_s

    def stage_s(self, row: Architecture, rtt_s: float, *, together: int = 1) -> tuple[float, float]:
        """Computing, and until the next batch may begin, with ``together`` of the row's stages in one [s]."""
        computing = self.compute_s(row.flop * together, row.layers * together)
        exchanging = row.exchanged_bytes / BYTES_PER_S
        larger, smaller = max(computing, exchanging), min(computing, exchanging)
        overlapped = larger
        if not math.isinf(self.sharpness):
            overlapped *= (1 + (smaller / larger) ** self.sharpness) ** (1 / self.sharpness)
        trips = self.compressed_round_trips if row.compressed else self.round_trips
        return computing, overlapped + trips * (rtt_s + RACK_RTT_S) + (self.compressing_s if row.compressed else 0.0)

    def busy(self, row: Architecture, rtt_s: float) -> float:
        """[%]."""
        computing, total = self.stage_s(row, rtt_s)
        return 100 * computing / total


def offload_costs(round_trips: float = 0.0, compressed_round_trips: float = 0.0) -> Costs:
    """Speed and overhead of a layer from table 2 alone (two models, two equations). To compress takes as long as a
    layer's overhead."""
    large, small = (1 / OFFLOAD_SAMPLES_PER_S[row.name] / OFFLOAD_LAYERS for row in (GPT3, XXLARGE))
    flop_per_s = RECOMPUTED * (GPT3.flop - XXLARGE.flop) / (large - small)
    per_layer_s = large - GPT3.flop * RECOMPUTED / flop_per_s
    return Costs(flop_per_s, per_layer_s, round_trips, compressed_round_trips, OURS.layers * per_layer_s)


def _six(x: Sequence[float]) -> Costs:
    return Costs(x[0] * 1e12, x[1] / 1e3, x[2], x[3], x[4] / 1e3, x[5])


def _two(x: Sequence[float]) -> Costs:
    return offload_costs(x[0], x[1])


_SIX_START, _TWO_START = (10.0, 8.0, 3.0, 1.0, 25.0, 5.0), (3.0, 1.0)
_EVERY, _ENDS = tuple(range(len(RTTS_S))), (0, len(RTTS_S) - 1)
_BETWEEN = tuple(i for i in _EVERY if i not in _ENDS)


def _fit(make: Callable[[Sequence[float]], Costs], start: Sequence[float], columns: Sequence[int]) -> Costs:
    """Least squares on these columns of table 1 [points]; the constants are positive, so their logarithms are
    fitted."""
    found = least_squares(lambda x: _errors(make(np.exp(x).tolist()), columns), np.log(start))
    return make(np.exp(found.x).tolist())


def _errors(costs: Costs, columns: Sequence[int]) -> NDArray[np.float64]:
    return np.array([costs.busy(row, RTTS_S[i]) - row.busy[i] for row in ARCHITECTURES for i in columns])


@cache
def fitted() -> Costs:
    """Six constants, all of table 1."""
    return _fit(_six, _SIX_START, _EVERY)


@cache
def fitted_to_ends() -> Costs:
    """Six constants, RTT none and 200 ms."""
    return _fit(_six, _SIX_START, _ENDS)


@cache
def fitted_round_trips() -> Costs:
    """Two constants, all of table 1; the rest from table 2."""
    return _fit(_two, _TWO_START, _EVERY)


def _bars(what: str, costs: Costs, columns: Sequence[int], mean: float, greatest: float | None) -> list[Bar]:
    errors = np.abs(_errors(costs, columns))
    bars = [Bar(f"{what}: mean error [points]", float(errors.mean()), mean)]
    return bars + ([Bar(f"{what}: greatest error [points]", float(errors.max()), greatest)] if greatest else [])


def table_1() -> Reproduction:
    """SWARM table 1: share of time busy, by model and RTT."""
    ends = fitted_to_ends()
    values = tuple(
        Value(f"{row.name}, RTT {RTT_NAMES[i]}", row.busy[i], ends.busy(row, RTTS_S[i]), POINTS, i in _ENDS)
        for row in ARCHITECTURES
        for i in _EVERY
    )
    bars = (
        *_bars("6 constants, fitted to all", fitted(), _EVERY, 1.0, 2.5),
        *_bars("6 constants, fitted to RTT none and 200 ms; at 10, 50 and 100 ms", ends, _BETWEEN, 1.0, None),
        *_bars("2 constants, fitted to all", fitted_round_trips(), _EVERY, 1.5, 4.0),
    )
    two = fitted_round_trips()
    origin = "fitted to RTT none and 200 ms"
    constants = (
        Constant("effective speed", ends.flop_per_s / 1e12, "TFLOP/s", origin),
        Constant("overhead of a layer", 1e3 * ends.per_layer_s, "ms", origin),
        Constant("round trips n of a stage", ends.round_trips, "", origin),
        Constant("n in 'Ours'", ends.compressed_round_trips, "", origin),
        Constant("h in 'Ours'", 1e3 * ends.compressing_s, "ms", origin),
        Constant("sharpness p", ends.sharpness, "", origin),
        Constant("with 2 constants: n", two.round_trips, "", "fitted to all"),
        Constant("with 2 constants: n in 'Ours'", two.compressed_round_trips, "", "fitted to all"),
        Constant(
            "with 2 constants: effective speed", two.flop_per_s / 1e12, "TFLOP/s", "from table 2, ZeRO-Offload's rows"
        ),
        Constant(
            "with 2 constants: overhead of a layer",
            1e3 * two.per_layer_s,
            "ms",
            "the same; p is infinite, and h an overhead for each layer",
        ),
    )
    return Reproduction(
        name="swarm-table1",
        title="SWARM, table 1: share of time a GPU is busy at 500 Mb/s",
        method="A stage's batch takes what is larger of computing and exchanging, and n round trips. In the table below RTT none and 200 "
        "ms are calibration (6 constants for 8 numbers), 10 to 100 ms prediction.",
        values=values,
        bars=bars,
        constants=constants,
        not_reproduced=(
            "Why 'Ours' needs less than one round trip a stage where the others need three: the paper says that it quantises beside "
            "other work, nothing that would hide a latency. Its n and h are fitted, not explained.",
        ),
        draw=_draw_table_1,
    )


def _draw_table_1(figure: Figure) -> None:
    axes = figure.subplots()
    rtts = np.linspace(0, 0.2, 81)
    for k, row in enumerate(ARCHITECTURES):
        colour = f"C{k}"
        axes.plot(1e3 * np.array(RTTS_S), row.busy, "o", color=colour, label=f"{row.name}, published")
        axes.plot(1e3 * rtts, [fitted_to_ends().busy(row, t) for t in rtts], "-", color=colour, lw=1)
        axes.plot(1e3 * rtts, [fitted_round_trips().busy(row, t) for t in rtts], ":", color=colour, lw=1)
    axes.plot([], [], "k-", lw=1, label="6 constants, from RTT none and 200 ms")
    axes.plot([], [], "k:", lw=1, label="2 constants")
    axes.set(xlabel="added RTT [ms]", ylabel="time busy [%]", ylim=(0, 100), title="SWARM table 1")
    axes.legend(fontsize="small", ncols=2, loc="upper right")


def _layer(row: Architecture) -> ModelSpec:
    """The production model's layer of this width: gated, three matrices of 8/3 the width instead of two of four
    times."""
    config = ModelConfig(layers=1, width=row.width, heads=row.heads, kv_heads=row.heads, vocab=64, context=TOKENS)
    return ModelSpec.from_config(config)


def table_6() -> Reproduction:
    """SWARM table 6: parameters and FLOP of the four layers."""
    values = []
    for row in ARCHITECTURES:
        spec = _layer(row)
        flop = 6.0 * spec.layer_matrix_params * TOKENS * row.layers
        values.append(Value(f"{row.name}: parameters of a layer", row.params / 1e6, spec.layer_params / 1e6, "M"))
        values.append(Value(f"{row.name}: FLOP of a batch on a stage", row.flop / 1e9, flop / 1e9, "GFLOP"))
    spec = _layer(BASE)
    attention = 100 * (spec.layer_flops(TOKENS) / (2 * spec.layer_matrix_params) - 1)
    return Reproduction(
        name="swarm-table6",
        title="SWARM, table 6: parameters and FLOP of each architecture",
        method="No constant. Parameters are what the production model counts for a layer of this width (gated; the paper's is not, with as "
        "many parameters but biases); FLOP are 6 for each of them and token (Kaplan et al. 2020, attention's products left out).",
        values=tuple(values),
        bars=(Bar("greatest error [%]", max(abs(v.difference) for v in values), 4.0),),
        not_reproduced=(
            f"The paper's count leaves the products of attention out; with them 'base' computes {attention:.0f} % more, GPT-3's layer "
            "1 %. Its 1.8e12 for three layers of 6.2e11 is rounded down.",
        ),
        draw=lambda figure: _draw_table_6(figure, values),
    )


def _draw_table_6(figure: Figure, values: Sequence[Value]) -> None:
    for axes, found, unit in zip(
        figure.subplots(1, 2), (values[::2], values[1::2]), ("M parameters", "GFLOP"), strict=True
    ):
        at = np.arange(len(found))
        axes.bar(at - 0.2, [v.published for v in found], 0.4, label="published")
        axes.bar(at + 0.2, [v.ours for v in found], 0.4, label="ours")
        axes.set(yscale="log", ylabel=unit)
        axes.set_xticks(at, [row.name for row in ARCHITECTURES])
        axes.legend(fontsize="small")
    figure.suptitle("SWARM table 6")


SERVERS = {BASE.name: 12, XXLARGE.name: 12, GPT3.name: 12, OURS.name: 4}


def tensor_parallel_width(costs: Costs) -> float:
    """The least width at which Megatron's best grid for one sequence on two GPUs at 500 Mb/s cuts layers across
    them."""
    device = Device(costs.flop_per_s, BYTES_PER_S)

    def cut(width: float) -> bool:
        return best_grid(2, device, width=width, layers=2, tokens=TOKENS, microbatches=1).tensor > 1

    low, high = 8.0, 20.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if cut(2**middle) else (middle, high)
    return 2**high


def figure_3() -> Reproduction:
    """SWARM figure 3: computing and idle time per batch; and the sentences around it."""
    costs = fitted()
    idle = {row.name: 100 - costs.busy(row, 0.0) for row in ARCHITECTURES}
    computing, total = costs.stage_s(GPT3, 0.0, together=3)
    three, law = 100 * computing / total, math.log2(tensor_parallel_width(offload_costs()))
    one = idle[GPT3.name]
    statements = (
        Statement(
            "the larger the model, the less idle (base > xxlarge > GPT-3)",
            ", ".join(f"{row.name} {idle[row.name]:.0f} %" for row in ARCHITECTURES),
            idle["base"] > idle["xxlarge"] > idle["GPT-3"],
        ),
        Statement(
            "at 500 Mb/s idle time is in the 10-20 % range for GPT-3's width, or by compression (Ours)",
            f"GPT-3 {one:.1f} %, Ours {idle['Ours']:.1f} %",
            all(10 <= idle[name] <= 20 for name in ("GPT-3", "Ours")),
        ),
        Statement(
            "three GPT-3 layers together are busy more than 90 % of the time (app. F)", f"{three:.1f} %", three > 90
        ),
        Statement(
            "cutting layers across machines (tensor parallelism) becomes practical at 500 Mb/s above a width of 2^16 (sec. 3.1)",
            f"2^{law:.1f}: from there on Megatron's best grid for one sequence on two V100 cuts layers",
            abs(law - 16) < 0.5,
        ),
    )
    return Reproduction(
        name="swarm-fig3",
        title="SWARM, figure 3: computing and idle time of the pipeline for one batch",
        method="The model of table 1 with the constants fitted to it there: idle shares of the four rows are calibration; three layers "
        "together and the width for tensor parallelism (speed from table 2) are predictions. The figure itself has no numbers.",
        statements=statements,
        constants=(
            Constant("effective speed", costs.flop_per_s / 1e12, "TFLOP/s", "fitted to table 1"),
            Constant("effective speed for 2^16", offload_costs().flop_per_s / 1e12, "TFLOP/s", "from table 2"),
        ),
        not_reproduced=("The heights of the bars: published as a picture only.",),
        draw=_draw_figure_3,
    )


def _draw_figure_3(figure: Figure) -> None:
    axes = figure.subplots()
    for k, row in enumerate(ARCHITECTURES):
        computing, total = (SERVERS[row.name] * seconds for seconds in fitted().stage_s(row, 0.0))
        axes.bar(k, computing, color="C0", label="computing" if k == 0 else None)
        axes.bar(k, total - computing, bottom=computing, color="C1", label="idle" if k == 0 else None)
        axes.text(k, total, f"{100 * (1 - computing / total):.0f} % idle", ha="center", va="bottom")
    axes.set_xticks(range(len(ARCHITECTURES)), [row.name for row in ARCHITECTURES])
    axes.set(ylabel="one batch through all stages [s]", title="SWARM figure 3: 500 Mb/s, no added latency")
    axes.legend()
