"""The table of README.md from the JSON beside it."""

from typing import Any

from benchmarks.figures import span

HEAD = "case|fault|steps during the fault, over an undisturbed one|checkpoints|suspected|computed again"
FAULTS = {
    "black_hole": "for ten steps nftables drops packets over 600 bytes from one replica to another of its stage, without a word",
    "frozen_disk": "for ten steps writes to the file system of the checkpoints do not return (`fsfreeze` on a loop device)",
    "large_stage": "none: 156 M parameters in one stage, two replicas, a checkpoint of 1.9 GB every second step",
}


def faults(results: dict[str, dict[str, Any]]) -> list[list[Any]]:
    return [
        [name, FAULTS[name], _steps(r), _checkpoints(r), r["suspected"], r["recomputed"]] for name, r in results.items()
    ]


def _steps(result: dict[str, Any]) -> str:
    hurt, alone = result["hurt_over_undisturbed"], result["undisturbed_s"]
    if not hurt:
        return f"- ({alone:.1f} s a step)"
    if hurt[0] > 2:
        return f"the first **{hurt[0]:.1f}x** ({hurt[0] * alone:.0f} s); then {span(hurt[1:], '.2f')}x"
    return f"{span(hurt, '.2f')}x"


def _checkpoints(result: dict[str, Any]) -> str:
    written, left_out = len(result["checkpoints"]), len(result["left_out"])
    if written < 2:
        return "-"
    reported = f"; the {left_out} others were left out and reported" if left_out else ""
    return f"{written} of {written + left_out}{reported}"
