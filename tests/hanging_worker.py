"""A member whose compute thread never returns from a microbatch of step 3: started in place of
``muletrain.runs.worker``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from muletrain.compute import jobs
from muletrain.compute.arithmetic import StageArithmetic
from muletrain.runs import worker
from muletrain.runtime.members import watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.compute.base import Microbatch

HANGS_AT = 2
"""Counted from 0."""


def hanging(right: Callable[..., Any]) -> Callable[..., Any]:
    def operation(self: StageArithmetic, mb: Microbatch, *args: Any) -> Any:
        if mb.step >= HANGS_AT:
            threading.Event().wait()
        return right(self, mb, *args)

    operation.__name__ = right.__name__
    return operation


def main() -> None:
    StageArithmetic.forward = hanging(StageArithmetic.forward)
    StageArithmetic.loss_backward = hanging(StageArithmetic.loss_backward)
    jobs.FLOOR_S, watchdog.PATIENCE_S, watchdog.HUNG = 1.0, 8.0, 8.0
    worker.main()


if __name__ == "__main__":
    main()
