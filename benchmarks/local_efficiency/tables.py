"""The table of README.md from the JSON beside it."""

from typing import Any

Case = dict[str, Any]
HEAD = "case|plain loop [tok/s]|fleet / plain|asked|GPipe / plain|1F1B / plain"
CASES = {
    "default": ("default (width 192, 4 layers, 2k tokens a step)", 0.75),
    "width512": ("width 512 (8 layers, 16k tokens a step)", 0.85),
}


def cases(results: list[Case]) -> list[list[str]]:
    rows = []
    for case in results:
        (title, asked), ratio = CASES[case["case"]], case["ratio"]
        ratios = f"{ratio['fleet']:.2f}", str(asked), f"{ratio['gpipe']:.2f}", f"{ratio['1f1b']:.2f}"
        rows.append([title, f"{case['tokens_per_s']['plain']:,.0f}", *ratios])
    return rows


def ratios(results: list[Case], system: str) -> str:
    """Speed over the plain loop: the default case, and width 512."""
    return " and ".join(f"{case['ratio'][system]:.2f}" for case in results)
