"""DAPPLE: a synchronous pipeline with early backward passes (1F1B) whose stages may be replicated (Fan et al. 2021,
sec. 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.papers.baselines.schedules import one_f_one_b, step_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.papers.baselines.schedules import Link, StageTime


def batch_s(times: Sequence[StageTime], sent_bytes: float, link: Link, microbatches: int) -> float:
    """Warm-up, steady phase and ending [s]; the replicas' all-reduce lies beside the ending and is left out."""
    return step_s(one_f_one_b(len(times), microbatches), times, sent_bytes, link)
