"""DT-FM (Yuan et al. 2022, sec. 3.4 and 4) on its five networks: the costs that its search finds, and steps on these
placements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reproduction.dtfm_searches import (
    ACTIVATION_BYTES,
    CASES,
    DRAWS,
    GRADIENT_BYTES,
    PATIENCE,
    REPETITIONS,
    costs,
    runs,
    table,
)
from reproduction.dtfm_steps import FLOP_PER_S, SYSTEMS, Work, ratios, slowdowns, step_s
from reproduction.evolutionary import TRIALS
from reproduction.reproduction import Bar, Constant, Reproduction, Statement, Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reproduce() -> Reproduction:
    """Costs by each search, and steps: two and a half minutes on one core."""
    values, ranges = table()
    reproduced = [v for v in values if "optimum" not in v.what]
    excess = max(v.difference for v in values if "optimum" in v.what)
    better = all(costs(n)["dtfm"] <= costs(n)["kernighan-lin"] + 1e-9 <= costs(n)["random"] + 1e-6 for n in range(1, 6))
    most = max(100 * (1 - costs(n)["muletrain"] / costs(n)["dtfm"]) for n in range(1, 6))
    gains, stated, over_kl = _steps()
    return Reproduction(
        name="dtfm",
        title="DT-FM: its search on five networks, 64 devices as 8 stages x 8 pipelines, and what that gains",
        method=f"The published delays and bandwidths, {GRADIENT_BYTES / 1e9} GB of gradient a stage and {ACTIVATION_BYTES / 1e9:.3f} GB of "
        f"activations a macro-batch; our implementation of the paper's evolutionary search and of its Kernighan-Lin baseline (the middle "
        f"one of {REPETITIONS} runs, population 100, until {PATIENCE} trials in a row brought nothing better, {TRIALS} at most), the "
        f"mean of {DRAWS} random placements with the best matching and order, and muletrain's own search. Published are costs that the "
        "published scheduler ends "
        "at, and optima proven from the symmetry of these networks. Every solution is checked by an evaluator that shares nothing with "
        "the searches. Then steps of GPT3-XL with "
        "24, 32 and 40 layers and batches of 1024, 2048 and 4096 sequences on these placements and on three random ones, on the networks "
        "as the text has them: DT-FM's overlapping slots (sec. 3.5), and a Megatron-like runtime that waits for each message. No constant "
        "is fitted: all are predictions.",
        values=(*values, *gains),
        statements=(
            Statement(
                "both searches beat random placements, and DT-FM's local search beats Kernighan-Lin (sec. 4.1)",
                "in no case worse",
                better,
            ),
            *ranges,
            *stated,
        ),
        bars=(
            Bar(
                "greatest difference to the published scheduler's costs [%]",
                max(abs(v.difference) for v in reproduced),
                3.0,
            ),
            Bar("muletrain's search above the proven optimum, at most [%]", excess, 0.02),
        ),
        constants=(Constant("V100, fp16", FLOP_PER_S / 1e12, "TFLOP/s", "40 % of its peak; not in the paper"),),
        not_reproduced=(
            "Single runs: the original never seeds its generators. Where its runs are known to end apart, ours is held to their range. "
            f"Ours end apart, too: {_apart()}. benchmarks/placement has more seeds.",
            f"That its search's placements make all steps faster than Kernighan-Lin's do: by this model {over_kl:.2f} x as fast, at least.",
            "The curves of figure 5: pictures only; the sizes it was drawn with are not stated.",
            f"That it is enough: on case 2 muletrain's search finds placements {most:.0f} % cheaper.",
            f"Ratios of steps: up to {max(abs(v.difference) for v in gains):.0f} % off, and without a bar: neither speeds of the GPUs nor "
            "microbatches are in the paper, PFLOPS are in pictures only, and Megatron's best layout in case 1 has tensor parallelism 2, "
            "which is not modelled.",
        ),
        draw=_draw,
    )


def _apart() -> str:
    """Where single runs of a search end apart."""
    ends = {
        f"{name} in case {n} at " + ", ".join(f"{cost_s:.2f}" for cost_s, _ in runs(n, search)) + " s"
        for search, name in (("kernighan-lin", "Kernighan-Lin"), ("dtfm", "DT-FM's search"))
        for n in range(1, 6)
        if runs(n, search)[-1][0] > runs(n, search)[0][0] + 1e-3
    }
    return "; ".join(sorted(ends)) or "not in these runs"


def _steps() -> tuple[list[Value], list[Statement], float]:
    """Ratios that the paper's text gives, over all sizes; and the lowest to Kernighan-Lin's placements."""
    over_megatron = {n: ratios(n, "megatron") for n in range(1, 6)}
    elsewhere = [r for n in range(1, 5) for r in over_megatron[n].values()]
    world, slower = list(over_megatron[5].values()), slowdowns()
    over_random = max(max(ratios(n, "random").values()) for n in range(1, 6))
    over_kl = min(min(ratios(n, "kernighan-lin").values()) for n in range(1, 6))
    values = [
        Value("steps, case 5: faster than Megatron, at most", 4.8, max(world), "x"),
        Value("steps, case 5: faster than Megatron, at least", 3.8, min(world), "x"),
        Value("steps, cases 1 to 4: faster than Megatron, at most", 2.5, max(elsewhere), "x"),
        Value("steps, cases 1 to 4: faster than Megatron, at least", 1.2, min(elsewhere), "x"),
        Value("steps: faster than without a scheduler, at most", 2.7, over_random, "x"),
        Value("steps, case 5: slower than Megatron in case 1, at most", 3.5, max(slower.values()), "x"),
        Value("steps, case 5: slower than Megatron in case 1, at least", 1.7, min(slower.values()), "x"),
    ]
    closing = slower[24, 1024] > slower[24, 4096] and slower[24, 1024] > slower[40, 1024]
    statements = [
        Statement(
            "it is faster than Megatron in all cases (sec. 4.1)",
            f"by {min(*world, *elsewhere):.2f} x at least",
            min(*world, *elsewhere) > 1,
        ),
        Statement(
            "the gap between case 5 and Megatron in case 1 closes with larger batches and deeper models (sec. 4.1)",
            f"{slower[24, 1024]:.2f} x with 24 layers and a batch of 1024, {slower[24, 4096]:.2f} x with 4096, "
            f"{slower[40, 1024]:.2f} x with 40 layers",
            closing,
        ),
    ]
    return values, statements, over_kl


def _draw(figure: Figure) -> None:
    above, below = figure.subplots(2, 1)
    for axes, names, heights in (
        (above, ("random", "kernighan-lin", "dtfm", "muletrain"), _cost_s),
        (below, SYSTEMS, _small_step_s),
    ):
        for k, name in enumerate(names):
            bars = axes.bar(
                [n + 0.2 * (k - 1.5) for n in range(1, 6)], [heights(name, n) for n in range(1, 6)], 0.2, label=name
            )
            axes.bar_label(bars, fmt="%.1f", fontsize="x-small")
        axes.set(xticks=range(1, 6), xticklabels=[c.name.replace(", ", "\n") for c in CASES])
        axes.legend(fontsize="small")
    above.set(ylabel="cost [s]", title="communication by DT-FM's cost model")
    below.set(ylabel="step [s]", title="24 layers, a batch of 1024 sequences")


def _cost_s(search: str, case: int) -> float:
    return costs(case)[search]


def _small_step_s(system: str, case: int) -> float:
    return step_s(system, case, Work(24, 1024))
