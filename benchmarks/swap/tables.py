"""Tables of README.md from the JSON beside it."""

from statistics import median
from typing import Any

from benchmarks.figures import span

Results = dict[str, Any]
CASES = ("resident", "swapped", "with replicas", "no prefetch", "one by one")
SWAPPED = "".join(f"|{n} tokens: tokens/s|of resident|of its CPU time" for n in ("4,096", "1,024"))
PASSES = "parameters, budget|what|tokens|resident s|swapped s|of resident|asked|model TFLOP/s"
ASKED = {
    ("1.3B", "pass 16384"): 0.9,
    ("1.3B", "pass 4096"): 0.7,
    ("1.3B", "step"): 0.85,
    ("6.7B", "pass 16384"): 0.9,
    ("6.7B", "step"): 0.8,
}
LONE = {
    "before": "before",
    "after": "hashes by all cores, large chunks, no digest of the weights, update beside",
    "after, 16 together": "the same, all 16 microbatches together (`--together 16`)",
}
GIB = 2**30


def of_resident(results: Results, case: str, tokens: int) -> float:
    return results[f"{case}, {tokens}"]["tokens_per_s"] / results[f"resident, {tokens}"]["tokens_per_s"]


def swapped(results: Results) -> list[list[str]]:
    rows = []
    for case in CASES:
        rows.append([case])
        for tokens in (4096, 1024):
            resident, of = results[f"resident, {tokens}"], results[f"{case}, {tokens}"]
            ratios = f"{of_resident(results, case, tokens):.2f}", f"{resident['cpu_s'] / of['cpu_s']:.2f}"
            rows[-1] += [f"{of['tokens_per_s']:.0f}", *(("", "") if case == "resident" else ratios)]
    return rows


def step_s(results: Results, case: str, tokens: int) -> float:
    return median(results[f"{case}, {tokens}"]["step_s"])


def peak(results: Results) -> float:
    """Over the budget, at most."""
    return max(results[f"{c}, {n}"]["peak_bytes"] for c in CASES[1:] for n in (4096, 1024)) / results["budget_bytes"]


def passes(results: Results) -> list[list[str]]:
    rows = []
    for (name, what), asked in ASKED.items():
        of = results[name]
        step_tokens = max(map(int, of["resident"]))
        tokens = step_tokens if what == "step" else int(what.split()[1])
        took, resident = of["swapped"][what]["s"], of["resident"][str(tokens)]
        tflops = of["flops_per_token"] * tokens / took / 1e12
        budget = f"{of['params'] / 1e9:.2f} B, {of['swapped']['budget_bytes'] / GIB:.0f} GiB"
        kind = "step" if what == "step" else "streaming"
        times = f"{tokens:,}", f"{resident:.3f}", f"{took:.3f}", f"{resident / took:.2f}"
        rows.append([budget, kind, *times, f"{asked:.2f}", f"{tflops:.0f}"])
    return rows


def memory(results: Results) -> list[list[str]]:
    rows = []
    for name in ("1.3B", "6.7B"):
        of = results[name]["swapped"]
        gib = {key: of[f"{key}_bytes"] / GIB for key in ("device", "budget", "reserved", "host", "expected_host")}
        device = f"{gib['device']:.2f} of {gib['budget']:.0f} GiB", f"{gib['reserved']:.2f} GiB"
        host = f"{gib['host']:.1f} GiB", f"{gib['expected_host']:.1f} GiB"
        rows.append([f"{results[name]['params'] / 1e9:.2f} B", *device, *host])
    return rows


def ratios(results: Results, name: str) -> str:
    """Of the resident stage: 16,384 and 4,096 tokens, and a step."""
    of = results[name]
    times = {"16384": of["swapped"]["pass 16384"], "4096": of["swapped"]["pass 4096"], "65536": of["swapped"]["step"]}
    return ", ".join(f"{of['resident'][tokens] / found['s']:.2f}" for tokens, found in times.items())


def lone(results: Results) -> list[list[str]]:
    keys = ("step", "microbatches", "mean and norm", "update")
    return [
        [title, *(f"{results[name][key]:.2f}" for key in keys), f"{round(results[name]['tokens/s'], -1):,.0f}"]
        for name, title in LONE.items()
    ]


def pipeline(results: Results) -> list[list[str]]:
    named = {"virtual clock": "production peers, virtual clock"}
    named["processes"] = "processes (paced; the small one swaps, real tensors)"
    return [
        [title, *(f"{results[name][key]:.2f}" for key in ("three", "four", "gain"))] for name, title in named.items()
    ]


def atom(results: Results) -> list[list[str]]:
    """Tokens/s by the links' speed."""
    rows = []
    for sequences in (512, 32):
        of = [results["speed"][f"{sequences} sequences, {mbps} Mb/s"] for mbps in ("400", "800", "unlimited")]
        for k, strategy in enumerate(of[0]):
            title = {"swap": "`swap`", "1f1b": "1F1B", "gpipe": "GPipe"}[strategy]
            first = f"{sequences} sequences a step: {title}" if k == 0 else title
            rows.append([first, *(f"{round(found[strategy], -1):,.0f}" for found in of)])
    return rows


def slower(results: Results, tokens: int) -> str:
    """Speed over the resident run: a peer alone, and one with replicas."""
    return span((of_resident(results, case, tokens) for case in ("swapped", "with replicas")), ".2f")


def norm_and_update(results: Results) -> str:
    """[s] of a step of the 1.35 B."""
    computing, norm, update = results["1.3B"]["swapped"]["step"]["computing, norm, update"]
    return f"the update takes {update:.2f} s, the norm {norm:.2f} s, the rest {computing:.2f} s"


def busy(results: Results) -> str:
    of = results["1.3B"]["swapped"]["step"]["busy"]
    return f"{of['busy_s']:.2f} s of computing, and for {of['busy_s'] / of['of_s']:.0%}"


def over_1f1b(results: Results) -> str:
    """Speed of `swap` without a limit of the links."""
    of = [results["speed"][f"{n} sequences, unlimited Mb/s"] for n in (512, 32)]
    return span((found["swap"] / found["1f1b"] for found in of), ".2f")


def steps(results: Results, tokens: int) -> str:
    """[s] of the swapped cases with rounds."""
    return span((step_s(results, case, tokens) for case in CASES[1:4]), ".0f")


def recomputing(results: Results, tokens: int) -> str:
    return span((results[f"{case}, {tokens}"]["recompute_s"] for case in CASES[1:4]), ".1f")
