"""Shorten limits of memory that only long runs reach."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from muletrain.policy import fork_choice
from muletrain.runtime.checkpoint import progress
from muletrain.runtime.microbatch import cross_check
from muletrain.runtime.step import gradient_log

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT = {
    (fork_choice, "MEMORY"): 12,
    (gradient_log, "MAX_STEPS"): 6,
    (progress, "REMEMBERED"): 4,
    (cross_check, "REMEMBERED"): 4,
}
"""Steps, steps, checkpoints and microbatches."""


@contextmanager
def short_memory(*, short: bool) -> Iterator[None]:
    """In this process."""
    before = {key: getattr(*key) for key in SHORT}
    try:
        for (module, name), value in SHORT.items() if short else ():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)
