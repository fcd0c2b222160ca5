"""Counts of README.md's rows, for pages that quote it."""

import re

ROW = re.compile(
    r"^\| (.+) \| ([-\d.]+) \S* *\| ([-\d.]+) \S* *\| \S+ \S+ \| (calibration|prediction) \|$", re.MULTILINE
)
NOT_PUBLISHED = ("(study of trace A)", "optimum, and muletrain's search")


def beside(text: str, *kinds: str) -> tuple[int, int]:
    """Values beside a published one, and how many of these are within 10 %. ``kinds``: calibration, prediction."""
    found = [
        float(ours) / float(published)
        for what, published, ours, kind in ROW.findall(text)
        if kind in (kinds or ("calibration", "prediction")) and not what.endswith(NOT_PUBLISHED)
    ]
    return len(found), sum(abs(ratio - 1) <= 0.1 for ratio in found)
