"""The table of README.md from the JSON beside it."""

from typing import Any

GOALS = {("fp32", 2): "0.8", ("fp32", 4): "2.0"}


def rounds(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for case in results["cases"]:
        codec, members, s = case["codec"].replace("int8", "8-bit"), case["members"], f"{case['median_s']:.2f}"
        if case["shaped"]:
            ideal = f"{s} = {results['shaped_over_ideal']:.2f} x bytes / bandwidth"
            rows.append([f"{codec}, 100 ms round trip, 200 Mb/s", members, ideal, "1.3 x"])
        else:
            rows.append([codec, members, s, GOALS.get((codec, members), "")])
    return [*rows, ["`hivemind.DecentralizedAverager`, in the same run", 2, f"{results['hivemind_s']:.2f}", ""]]


def cpu_s(results: dict[str, Any], of: str) -> list[float]:
    """CPU-seconds a GB in fp32, case by case."""
    return [case[f"{of}_cpu_s_per_gb"] for case in results["cases"] if case["codec"] == "fp32"]
