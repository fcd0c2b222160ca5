"""HYBRID (anonymous, ICLR 2025 submission): table 2, minutes a batch of four systems in four cases, and what sec. 4.2
says of leaving devices.

The paper tells neither sequence length nor effective speed, nor the allocation, nor the bandwidths that were drawn:
case 1 (one data centre) is calibration. Case 3 follows from it: slower devices scale what is computed, and every
minibatch crosses the links between stages there and back (its eq. 2). Case 4 takes case 3 and loses work.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from reproduction.baselines.data_parallel import dedloc_batch_s
from reproduction.baselines.schedules import Link, StageTime, dapple_s, steady_s
from reproduction.reproduction import Bar, Constant, Reproduction, Statement, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

SYSTEMS = ("hub", "PipeDream", "Dapple", "Swarm")
"""Systems as the paper names them; its own, "Ours" there, is the hub."""
WIDTHS = {"xxlarge": 4096, "Llama-33B": 6656}
PUBLISHED_MIN = {
    "xxlarge": {
        "hub": (56.1, 65.4, 74.8, 82.2),
        "PipeDream": (43.5, 66.2, 85.2, 115.7),
        "Dapple": (44.3, 55.9, 79.1, 114.6),
        "Swarm": (53.7, 62.8, 77.5, 96.8),
    },
    "Llama-33B": {
        "hub": (194.6, 216.7, 243.6, 253.6),
        "PipeDream": (170.2, 204.6, 294.7, 369.8),
        "Dapple": (168.9, 185.2, 268.5, 356.4),
        "Swarm": (248.4, 272.7, 256.1, 292.5),
    },
}
"""Minutes a batch in cases 1 to 4."""
BATCH, MINIBATCH = 512, 4
MINIBATCHES = BATCH // MINIBATCH
SLOWER = 1.55
"""Factor by which an RTX 2080 is slower than a V100."""
V100, RTX = 8, 8
"""Devices in cases 3 and 4."""
CAPACITY = (V100 + RTX) / (V100 + RTX / SLOWER)
"""Factor by which computing takes longer if work goes to free devices; a static pipeline is as slow as its slowest
stage."""
STAGES = 4
DROP = 0.9
"""Case 4: chance to disconnect during a batch and return in the next one; half a batch is lost on average."""
TOKENS = 512
CASE_2 = Link(2e9, 55e-3, (0.0, 0.0))
"""Means of what was drawn: 1-3 GB/s, 10-100 ms."""
CASE_3 = Link(175e6 / 8, 125e-3, (0.0, 0.0))
"""Means of what was drawn: 50-300 Mb/s, 100-150 ms."""


def sent_bytes(model: str) -> float:
    """Bytes of a minibatch's activations, fp32."""
    return 4.0 * MINIBATCH * TOKENS * WIDTHS[model]


def exchange_min(model: str, link: Link) -> float:
    """Minutes by eq. 2 without computing: all minibatches of a batch there and back between two stages. Eq. 1 gives as
    much between the servers and clients of a stage: one way in, and one out."""
    return MINIBATCHES * 2 * (link.latency_s + sent_bytes(model) / link.bytes_per_s) / 60


def case_3_min(model: str, system: str) -> float:
    """Minutes of case 3, predicted from case 1."""
    alone_min = PUBLISHED_MIN[model][system][0]
    if system not in ("PipeDream", "Dapple"):
        return alone_min * CAPACITY + exchange_min(model, CASE_3)
    slots = MINIBATCHES + (STAGES - 1 if system == "Dapple" else 0)
    stage_s = SLOWER * 60 * alone_min / slots
    stages = [StageTime(stage_s / 3, stage_s * 2 / 3)] * STAGES
    batch_s = dapple_s if system == "Dapple" else steady_s
    return batch_s(stages, sent_bytes(model), CASE_3, MINIBATCHES) / 60


def slowdown(system: str, unreliable: float, drop: float) -> float:
    """Slowdown by leaving devices, which do ``unreliable`` of the work. Each is gone for the rest of the batch, half
    of it on average.

    The hub's task pool hands over the rest; SWARM also loses what the device had accumulated (sec. 4.1); a static
    pipeline waits until the device returns."""
    if system == "hub":
        return 1 / (1 - unreliable * drop / 2)
    if system == "Swarm":
        return 1 / (1 - unreliable * drop)
    return 1 + drop / 2


@cache
def unreliable_share() -> float:
    """Share of unreliable devices in the work of case 4, solved from one number: how much longer the hub takes there
    than in case 3 ('xxlarge')."""
    longer = PUBLISHED_MIN["xxlarge"]["hub"][3] / PUBLISHED_MIN["xxlarge"]["hub"][2]
    return (1 - 1 / longer) * 2 / DROP


def case_4_min(model: str, system: str) -> float:
    """Minutes of case 4, predicted from case 3."""
    return case_3_min(model, system) * slowdown(system, unreliable_share(), DROP)


def _ordered(model: str) -> bool:
    """Whether the hub is faster than SWARM, and SWARM faster than both static pipelines."""
    found = {system: case_4_min(model, system) for system in SYSTEMS}
    return found["hub"] < found["Swarm"] < min(found["PipeDream"], found["Dapple"])


RATES = (0.2, 0.3, 0.4, 0.5, 0.6)
"""Sec. 4.2: shares of unreliable devices among 16, and chances to disconnect."""


def _gains(rate: float, drop: float) -> tuple[float, float]:
    """Gains of the hub over SWARM and DeDLOC with 6 V100 and 10 RTX 2080, a share of which is unreliable (Llama)."""
    count = min(10, round(16 * rate))
    power = 6 + 10 / SLOWER
    share = count / SLOWER / power
    batch_s = 60 * PUBLISHED_MIN["Llama-33B"]["hub"][0] * 16  # of one V100
    hub_s = batch_s / power * slowdown("hub", share, drop)
    swarm_s = batch_s / power * slowdown("Swarm", share, drop)
    speeds = [BATCH / batch_s] * 6 + [BATCH / batch_s / SLOWER] * 10
    lost = [0.0] * (16 - count) + [drop] * count
    dedloc_s = dedloc_batch_s(BATCH, speeds, lost, 4 * 33e9, CASE_3.bytes_per_s)
    return swarm_s / hub_s, dedloc_s / hub_s


def table_2() -> Reproduction:
    """Reproduce HYBRID table 2: minutes a batch in cases 1 to 4."""
    thirds = [
        Value(f"{model}, {system}, case 3", PUBLISHED_MIN[model][system][2], case_3_min(model, system), "min")
        for model in WIDTHS
        for system in SYSTEMS
    ]
    fourths = [
        Value(
            f"{model}, {system}, case 4",
            PUBLISHED_MIN[model][system][3],
            case_4_min(model, system),
            "min",
            (model, system) == ("xxlarge", "hub"),
        )
        for model in WIDTHS
        for system in SYSTEMS
    ]
    return Reproduction(
        name="hybrid-table2",
        title="HYBRID, table 2: minutes a batch of four systems in four cases",
        method=f"Case 1 is calibration, as published. Case 3: computing takes {CAPACITY:.3f} times as long where work goes to whoever is "
        f"free (hub, SWARM) and {SLOWER} times in static pipelines (PipeDream, DAPPLE: played), and every minibatch goes there and back at "
        "175 Mb/s and 125 ms: prediction. Case 4: prediction with one constant; only its ordering is claimed.",
        values=(*thirds, *fourths),
        statements=_statements(),
        bars=(Bar("case 3: mean error [%]", fmean(abs(v.difference) for v in thirds), 8.0),),
        constants=(
            Constant("tokens of a sequence", TOKENS, "", "not in the paper; as in SWARM's experiments"),
            Constant(
                "share of the work that unreliable devices do in case 4",
                unreliable_share(),
                "",
                "solved from the hub, xxlarge, case 4 over case 3",
            ),
            *(
                Constant(f"{model}, {s}, case 1", PUBLISHED_MIN[model][s][0], "min", "as published")
                for model in WIDTHS
                for s in SYSTEMS
            ),
        ),
        not_reproduced=_not_reproduced(thirds[-1]),
        draw=lambda figure: _draw(figure, thirds, fourths),
    )


def _statements() -> tuple[Statement, ...]:
    gains = [_gains(rate, drop) for rate in RATES for drop in RATES]
    high = _gains(0.6, 0.9)[0]
    return (
        *(
            Statement(
                f"case 4, {model}: the hub is fastest, then SWARM, then the static pipelines",
                ", ".join(f"{s} {case_4_min(model, s):.0f}" for s in SYSTEMS) + " min",
                _ordered(model),
            )
            for model in WIDTHS
        ),
        Statement(
            "the hub is faster than SWARM and DeDLOC at every ratio and rate, by up to 1.3 x over SWARM (sec. 4.2)",
            f"over SWARM {min(g[0] for g in gains):.2f}-{max(g[0] for g in gains):.2f} x, over DeDLOC "
            f"{min(g[1] for g in gains):.2f}-{max(g[1] for g in gains):.2f} x, at 20-60 %; {high:.2f} x over SWARM at 60 % and 90 %",
            min(min(g) for g in gains) > 1 and max(g[0] for g in gains) < 1.3 < high,
        ),
    )


def _not_reproduced(last: Value) -> tuple[str, ...]:
    observed = [PUBLISHED_MIN[m][s][1] - PUBLISHED_MIN[m][s][0] for m in WIDTHS for s in SYSTEMS]
    second = [2 * exchange_min(model, CASE_2) for model in WIDTHS]
    ratio = {other: max(PUBLISHED_MIN[m][other][3] / PUBLISHED_MIN[m]["hub"][3] for m in WIDTHS) for other in SYSTEMS}
    return (
        f"Case 2 is not reproduced. Eq. 1 and 2 with the stated bandwidths and latencies add {second[0]:.1f} and {second[1]:.1f} min "
        f"to a batch; the table says {min(observed):.0f} to {max(observed):.0f} min.",
        f"The claimed 1.5 x over DAPPLE is not in the paper's own table, whose greatest ratio is {ratio['Dapple']:.2f}; over SWARM it "
        f"has {ratio['Swarm']:.2f}, as claimed (1.2).",
        "SWARM's case 1 for Llama-33B (248 min) is hardly less than its case 3 (256 min), unlike every other row: our case 3 is "
        f"{last.difference:.0f} % off there.",
        "PipeDream before or after DAPPLE in case 4: the table has 1 % between them for 'xxlarge'; in case 1 they are the other way.",
    )


def _draw(figure: Figure, thirds: Sequence[Value], fourths: Sequence[Value]) -> None:
    for axes, values, title in zip(figure.subplots(2, 1), (thirds, fourths), ("case 3", "case 4"), strict=True):
        at = np.arange(len(values))
        axes.bar(at - 0.2, [v.published for v in values], 0.4, label="published")
        bars = axes.bar(at + 0.2, [v.ours for v in values], 0.4, label="ours")
        axes.bar_label(bars, [f"{v.difference:+.0f} %" for v in values], fontsize="small")
        names = [v.what.rpartition(", case")[0].replace(", ", "\n") for v in values]
        axes.set_xticks(at, names, fontsize="small")
        axes.set(ylabel="min a batch", title=f"HYBRID table 2, {title}")
        axes.margins(y=0.15)
        axes.legend(fontsize="small", loc="upper left")
