"""Tables of README.md from the JSON beside it."""

from statistics import median
from typing import Any

from benchmarks.figures import span

Results = dict[str, Any]
PLAYED = {  # what results.json lacks: the commit and day of each run
    "home, before": "c3be5a8, 11-22",
    "home, beside others' work": "b47bdcc, 11-22",
    "home, final": "11-22",
    "asymmetric": "11-23",
    "freeze": "11-23",
    "die": "11-24",
}
LINKS = {"home": "20 Mb/s both ways", "large": "100 Mb/s both ways"}
LINKS |= {"asymmetric": "10 Mb/s up, 50 down", "incast": "100 Mb/s up, 20 down"}
HEAD = "case|link|commit, day of 2026|step, median and worst over it|averaging, over bytes / bandwidth (worst)"
HEAD += "|MB sent a step (needed)|attempts|suspected|repeated|call while averaging, 99 % and longest|cores busy"
FAULTS = "fault in `home`, while averaging; commit, day|the others have it down after|others suspected|computed again"
FAULTS += "|that step ends after"
VIRTUAL = "rate, queue|averaging, real and virtual|off by|longest call, real and virtual|off by|99 % of calls|step"


def _played(name: str) -> str:
    return "74ee6ce, 11-24" if name.endswith("-74ee6ce") else PLAYED.get(name, "c75517d, 11-23")


def cases(results: Results) -> list[list[str]]:
    """A row for each run without a fault, kind by kind."""
    names = [name for kind in LINKS for name in results if name.startswith(kind)]
    return [[name.split(",")[0], *_case(name, results[name])] for name in names]


def _case(name: str, r: Results) -> list[str]:
    sent, calls = r["sent_mb_a_step"], r["calls"]
    return [
        LINKS[name.split(",")[0]],
        _played(name)
        + (", beside other work" if "beside" in name else ", before the mend" if "before" in name else ""),
        f"{r['step_median_s']:.1f} s, {r['step_worst_over_median']:.2f}x",
        f"{median(r['averaging_s']):.1f} s = {r['averaging_over_ideal']:.2f}x ({r['averaging_over_ideal_worst']:.2f}x)",
        f"{span(sent, '.0f')} ({r['needed_mb_a_step'][1]:.0f})",
        str(r["attempts_a_step_worst"]),
        str(len(r["suspected"])),
        str(r["rerouted"] + r["recomputed"]),
        f"{calls['p99_s']:.2f} s, {calls['longest_s']:.2f} s",
        f"{r['cores']['all']:.1f}",
    ]


def faults(results: Results) -> list[list[str]]:
    kinds = {"die": "SIGKILL, with its daemon", "freeze": "SIGSTOP, with its daemon"}
    return [
        [
            f"{what}; {_played(name)}",
            f"{min(r['fault']['found_s'].values()):.1f} to {r['fault']['slowest_s']:.1f} s",
            str(len(r["fault"]["others_suspected"])),
            f"{r['recomputed']} microbatches",
            f"{r['fault']['next_step_after_s']:.1f} s",
        ]
        for kind, what in kinds.items()
        for name, r in results.items()
        if name.startswith(kind)
    ]


def virtual(results: Results) -> list[list[str]]:
    """A row for each rate and depth of the queue: between namespaces, and in the virtual world."""
    rows = []
    for name, r in sorted(results.items(), key=lambda item: float(item[0].split("x")[0])):
        rate, depth = name.split("x")
        off, found = r["off"], {key: f"{a:.2f} s, {b:.2f} s" for key, (a, b) in r["measured"].items()}
        averaging, call = ("**" * (abs(off[k]) > 0.15) for k in ("averaging_s", "longest_call_s"))
        rows.append(
            [
                f"{rate} Mb/s, {depth} s",
                found["averaging_s"],
                f"{averaging}{off['averaging_s']:+.0%}{averaging}",
                found["longest_call_s"],
                f"{call}{off['longest_call_s']:+.0%}{call}",
                found["p99_call_s"],
                found["step_s"],
            ]
        )
    return rows


def slowest(results: Results, kind: str) -> float:
    """[s] until the last of the others has the victim down."""
    return max(r["fault"]["slowest_s"] for name, r in results.items() if name.startswith(kind))
