"""ATOM (Wu et al. 2024): how many minibatches hide the swapping of sub-models, and what it gains over GPipe on a slow
link.

While one layer computes C minibatches forward, the next one is loaded (sec. III-C, fig. 13). A layer of 12 d^2
parameters takes b 12 d^2 / W to load and 2 x 12 d^2 L (1 + L / 6d) / F for a sequence of L tokens (the second term is
attention), so that

    C >= b F / (2 L W (1 + L / 6d)).
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from muletrain.model.presets import preset_fields
from reproduction.baselines.schedules import Link, StageTime, gpipe, one_f_one_b, step_s
from reproduction.reproduction import Bar, Constant, Reproduction, Statement, Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS, WIDTH, VOCAB = 2048, 12288, 50257
BLOCKS = 2
"""GPT-3 175B, cut to what fits their servers (sec. V-A)."""
LOAD_BYTES_PER_S = 12e9
FP32_FLOP_PER_S, FP16_FLOP_PER_S = 10.9e12, 50e12
THROTTLED_BYTES_PER_S = 400e6 / 8
GPUS = MINIBATCHES = 4
"""GPUs of a server; minibatches that are accumulated (sec. V-B1)."""
REACHED_BYTES_PER_S = 610e6 / 8
"""Bytes/s that gRPC reaches on 10 Gb/s (sec. III-B2)."""
STATES_BYTES = 16
"""Bytes of a parameter with gradient and Adam's moments, fp32."""
PAYLOADS_MIB = {
    "gpt3-125m": 6,
    "gpt3-350m": 8,
    "gpt3-760m": 12,
    "gpt3-xl": 16,
    "gpt3-2.7b": 20,
    "gpt3-6.7b": 32,
    "gpt3-13b": 40,
    "gpt3-175b": 96,
}
"""Activations by model, from table II [MiB]."""


def accumulation(param_bytes: float, flop_per_s: float, *, width: int = WIDTH, tokens: int = TOKENS) -> float:
    """C as a real number: at least so many minibatches hide the loading."""
    return param_bytes * flop_per_s / (2 * tokens * LOAD_BYTES_PER_S * (1 + tokens / (6 * width)))


def params() -> float:
    """Parameters of two blocks and the (shared) embedding."""
    return 12.0 * BLOCKS * WIDTH**2 + VOCAB * WIDTH


def minibatch_s() -> float:
    """Seconds of one sequence, forward and backward, on a GPU that never waits."""
    return 3 * (2 * params() * TOKENS + BLOCKS * 4 * TOKENS**2 * WIDTH) / FP32_FLOP_PER_S


def speed_over(schedule: str, *, shared: bool, relayed: bool = False) -> float:
    """ATOM's GPU time per minibatch over the baseline's, on four GPUs at 400 Mb/s. ``relayed``: the client relays
    each transfer."""
    order = {"GPipe": gpipe, "PipeDream": one_f_one_b}[schedule](GPUS, MINIBATCHES)
    stage = StageTime(minibatch_s() / GPUS / 3, minibatch_s() / GPUS * 2 / 3)
    sent = 4.0 * TOKENS * WIDTH * (2 if relayed else 1)
    seconds = step_s(order, [stage] * GPUS, sent, Link(THROTTLED_BYTES_PER_S, shared=shared))
    return GPUS * seconds / MINIBATCHES / minibatch_s()


def lockstep_over_gpipe(links_busy: int) -> float:
    """The same if each of GPipe's slots lasted as long as a stage and two transfers at a ``links_busy``-th of the
    link."""
    transfer_s = links_busy * 4.0 * TOKENS * WIDTH / THROTTLED_BYTES_PER_S
    slots = MINIBATCHES + GPUS - 1
    return GPUS * slots * (minibatch_s() / GPUS + 2 * transfer_s) / MINIBATCHES / minibatch_s()


def reproduce() -> Reproduction:
    """Reproduce ATOM: C, "up to 20 x", and the sizes around them."""
    cases = (
        ("fp32", 4, FP32_FLOP_PER_S, 1),
        ("fp16", 2, FP16_FLOP_PER_S, 2),
        ("fp32 weights, fp16 arithmetic", 4, FP16_FLOP_PER_S, 4),
    )
    needed = {name: accumulation(b, flop_per_s) for name, b, flop_per_s, _ in cases}
    best = speed_over("GPipe", shared=True, relayed=True)
    direct, apart = speed_over("GPipe", shared=True), speed_over("GPipe", shared=False)
    return Reproduction(
        name="atom",
        title="ATOM: accumulation C, and up to 20 x over pipelines at 400 Mb/s",
        method="No constant is fitted. C follows from sizes and speeds; GPipe's schedule is played for 4 GPUs and 4 minibatches of GPT-3 "
        "175B cut to two blocks, sends block. The baseline is Petals, whose client relays what goes from stage to stage, and all four "
        "GPUs are on one host with one throttled link: that is where 20 x comes from.",
        values=_values(best),
        statements=_statements(needed, apart),
        bars=(
            *(
                Bar(f"C, {name}: minibatches beside {expected}", abs(ceil(needed[name]) - expected), 0)
                for name, _, _, expected in cases
            ),
            Bar("gain over GPipe, four GPUs on one throttled link", best, 21.0),
            Bar("gain over GPipe, four GPUs on one throttled link", best, 18.0, at_least=True),
        ),
        constants=CONSTANTS,
        not_reproduced=(
            f"The gain depends on how the link is shared: {direct:.1f} x if neighbours send directly over the one link, {apart:.1f} x with "
            f"a link for each GPU. Slots in lock-step, each charged two transfers, would give {lockstep_over_gpipe(1):.1f} x with own "
            f"links and {lockstep_over_gpipe(GPUS - 1):.1f} x with three transfers always on the shared one, more bytes than there are.",
            "GPU utilisations of 18.3, 46.3 and 91.9 % on 'localhost' (fig. 15): GPipe's schedule alone would be busy 57 % of the time; "
            "what gRPC and serialising cost there is not stated.",
            "Per-model times (fig. 14, 16): pictures only.",
        ),
        draw=_draw,
    )


def _values(best: float) -> tuple[Value, ...]:
    payloads = [
        Value(
            f"activations, {name} (table II)", mib, 4.0 * TOKENS * int(preset_fields(name)["width"] or 0) / 2**20, "MiB"
        )
        for name, mib in PAYLOADS_MIB.items()
    ]
    return (
        Value("largest gain over GPipe at 400 Mb/s", 20.0, best, "x"),
        *payloads,
        Value("GPT-3 175B with optimizer (sec. III-B)", 2.8, 175e9 * STATES_BYTES / 1e12, "TB"),
        Value("cut to two blocks (sec. V-A)", 68.0, params() * STATES_BYTES / 1e9, "GB"),
        Value("its embedding, fp32 (sec. III-C)", 2.4, 4 * VOCAB * WIDTH / 1e9, "GB"),
    )


def _statements(needed: dict[str, float], apart: float) -> tuple[Statement, ...]:
    logits = 4.0 * TOKENS * WIDTH / REACHED_BYTES_PER_S / (4.0 * VOCAB * WIDTH / LOAD_BYTES_PER_S)
    return (
        Statement(
            "minibatches are accumulated by C = 4 (sec. V-B1)",
            f"{needed['fp32 weights, fp16 arithmetic']:.2f}, so 4, with fp32 weights and fp16 arithmetic",
            True,
        ),
        Statement(
            "the last layer is loaded about 6 x faster than its activations go over 10 Gb/s (sec. III-B2)",
            f"{logits:.1f} x",
            5 <= logits <= 7,
        ),
        Statement(
            "PipeDream's schedule is faster than GPipe's",
            f"ATOM gains {apart:.1f} x over GPipe and "
            f"{speed_over('PipeDream', shared=False):.1f} x over PipeDream with a link for each GPU",
            speed_over("PipeDream", shared=False) < apart,
        ),
    )


CONSTANTS = (
    Constant("loading from the host", LOAD_BYTES_PER_S / 1e9, "GB/s", "PCIe 3.0 x16 in practice; not in the paper"),
    Constant(
        "V100, fp32", FP32_FLOP_PER_S / 1e12, "TFLOP/s", "between SWARM's V100 in tables 1 and 2; not in the paper"
    ),
    Constant("V100, fp16", FP16_FLOP_PER_S / 1e12, "TFLOP/s", "40 % of its peak; not in the paper"),
)


def _draw(figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    flops = [k * 1e12 for k in range(1, 101)]
    for name, size in (("fp32 weights", 4), ("fp16 weights", 2)):
        left.plot([f / 1e12 for f in flops], [accumulation(size, f) for f in flops], label=name)
    for flop_per_s, size in ((FP32_FLOP_PER_S, 4), (FP16_FLOP_PER_S, 2), (FP16_FLOP_PER_S, 4)):
        c = accumulation(size, flop_per_s)
        left.plot(flop_per_s / 1e12, c, "ko")
        left.annotate(f"C = {ceil(c)}", (flop_per_s / 1e12, c), xytext=(4, -12), textcoords="offset points")
    left.axhline(4, color="grey", ls=":", label="the paper's C")
    left.set(xlabel="effective TFLOP/s", ylabel="minibatches needed", title="accumulation C")
    left.legend(fontsize="small")
    gains = {
        "link for\neach GPU": speed_over("GPipe", shared=False),
        "one link": speed_over("GPipe", shared=True),
        "one link,\nrelayed": speed_over("GPipe", shared=True, relayed=True),
    }
    right.bar_label(right.bar(list(gains), list(gains.values())), fmt="%.1f x")
    right.axhline(20, color="grey", ls=":", label="published: up to 20 x")
    right.set(ylabel="gain over GPipe", title="400 Mb/s, GPT-3 175B cut to 2 blocks")
    right.margins(y=0.15)
    right.legend(fontsize="small", loc="upper left")
