"""What the fuzzer judges beside the weights: for each promise a bug that breaks it, and is found out."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from muletrain.errors import MuletrainError
from muletrain.events import FaultInjected
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.microbatch.messages import Gap
from muletrain.runtime.microbatch.trainer import Trainer
from muletrain.sim.loop import run_virtually
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario
from proofs.verdict import POWERLESS, Outcome, readable
from tests import planted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(240)


def kept(scenario: Scenario) -> Outcome:
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


@functools.cache
def is_kept(scenario: Scenario) -> None:
    """Played once for all bugs that are planted into it."""
    kept(scenario)


WRITES = Scenario(1, (2, 2), 2, 4, 4, 0.01, (), checkpoint_every=1, keep=2)
RESUMES = Scenario(2, (2, 1), 2, 9, 4, 0.01, (), checkpoint_every=2, resume_s=2.5)
FROZEN = Fault(0.7, "freeze", ("client-0a",), 2.0)
"""Its server waits in its farewell, while the other one has ended."""
FAREWELL = Scenario(2, (1, 1), 1, 2, 3, 0.0, (FROZEN,), clients=FROZEN.who, checkpoint_every=1, resume_s=1.9)
CUT_OFF = Scenario(5, (1, 2), 1, 3, 4, 0.01, (Fault(0.3, "cut", ("peer-0a",), 2.0),))
LONG = Scenario(
    3, (1, 2), 1, 24, 2, 0.01, (Fault(1.5, "join", ("peer-1j0",)),), narrow=(("peer-1j0", 2e4),), log_bytes=150_000
)


PLANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Scenario, str]] = [
    (planted.writes_the_weights_of_before, WRITES, "other weights than a single process's"),
    (planted.damages_what_it_writes, WRITES, "is not what the manifest says"),
    (planted.removes_nothing, WRITES, "keeps checkpoints of 3 steps, not 2"),
    (planted.forgets_moments, RESUMES, "other weights after step"),
    (planted.keeps_all_gradients, LONG, "may keep"),
    (planted.sums_losses, WRITES, "reports a loss of"),
    (planted.pauses_for_long, CUT_OFF, "with these faults it may take"),
    (
        planted.never_stops,
        Scenario(4, (2, 2), 2, 6, 4, 0.01, (Fault(0.5, "stop", ("peer-1b",)),)),
        "does not know how to stop",
    ),
]


@pytest.mark.parametrize(("plant", "scenario", "text"), PLANTS, ids=[plant.__name__ for plant, _, _ in PLANTS])
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_kept(scenario)
    plant(monkeypatch)
    assert any(text in violation for violation in play(scenario).violations)


def test_a_run_that_lost_power_goes_on_from_its_checkpoint() -> None:
    outcome = kept(RESUMES)
    assert outcome.of(FaultInjected, what="power")
    assert set(outcome.ends.values()) == {"finished"}


@pytest.mark.parametrize("scenario", [replace(RESUMES, steps=2, microbatches=2, resume_s=1.006), FAREWELL], ids=str)
def test_after_the_last_checkpoint_a_power_loss_leaves_nothing_to_resume(scenario: Scenario) -> None:
    """Found by 'python -m proofs fuzz' (seed 82100 with --kind lie)."""
    assert POWERLESS in kept(scenario).ends.values()


@pytest.mark.parametrize("how", ["slow", "hangs", "full"])
def test_a_broken_disk_costs_checkpoints_and_nothing_else(how: str) -> None:
    broken = Fault(0.4, "disk", ("peer-0a",), FOR_EVER_S, how=how)
    outcome = kept(Scenario(5, (2, 2), 2, 5, 4, 0.01, (broken,), checkpoint_every=1, disk_s=0.01))
    assert set(outcome.ends.values()) == {"finished"}


def test_a_link_that_passes_one_way_only_costs_nothing() -> None:
    kept(Scenario(6, (2, 2), 2, 5, 4, 0.01, (Fault(0.4, "one way", ("peer-0a", "peer-1b"), FOR_EVER_S),)))


def test_links_for_small_frames_only_part_a_pair() -> None:
    small = Fault(0.4, "small", ("peer-1a", "peer-1b"), FOR_EVER_S, limit=6000)
    outcome = kept(Scenario(7, (2, 3), 2, 4, 4, 0.01, (small,)))
    assert set(outcome.ends.values()) == {"finished"}


def test_what_was_kicked_ends_and_comes_again_under_its_name() -> None:
    faults = (Fault(0.4, "kick", ("peer-1b",)), Fault(0.8, "join", ("peer-1r",), how="peer-1b"))
    outcome = kept(Scenario(8, (2, 2), 2, 8, 4, 0.01, faults))
    assert outcome.ends["peer-1r"] == "finished"


def test_a_slow_store_outlives_the_memory_of_checkpoints_that_ended() -> None:
    """Their end was looked up after the disk had done its part, when later ones had pushed it out, and the coordinator
    died of it. Found by 'python -m proofs fuzz' (seed 218)."""
    slow = Fault(0.5, "disk", ("peer-0a",), FOR_EVER_S, how="slow")
    outcome = kept(Scenario(9, (1, 1), 1, 30, 2, 0.01, (slow,), checkpoint_every=1, disk_s=0.01, short=True))
    assert set(outcome.ends.values()) == {"finished"}


def test_of_repairs_none_goes_on_when_one_has_failed() -> None:
    """Found by 'python -m proofs fuzz' (seed 241: who is kicked gives up, and leaves tasks behind)."""

    class Alone(Trainer):
        def __init__(self) -> None:
            self._refilling, self._lacking, self._repairs, self._begun = set(), defaultdict(set), set(), {}
            roster: Any = SimpleNamespace(member=lambda _: SimpleNamespace(stage=1))
            self.work = Tasks()
            self._ctx: Any = SimpleNamespace(roster=roster, spawn=self.work.spawn)
            self._step, self._tasks = 0, {}

        def _is_mine(self, index: int, turn: int = 0) -> bool:
            return True

        async def refill(self, index: int) -> None:
            await asyncio.sleep(index)
            raise MuletrainError("could not be finished in 60 tries")

    async def repaired() -> int:
        trainer = Alone()
        trainer.on_gap("peer", Gap(lineage=bytes(32), step=0, stage=0, indices=(1, 60)))
        with pytest.raises(MuletrainError):
            await trainer.work.failure
        await trainer.work.close()
        return len(asyncio.all_tasks())

    assert run_virtually(repaired(), 100.0, []) == 1, "this one"


def test_who_asks_again_and_again_holds_up_no_repair() -> None:
    """A trainer says that all is through when its repairs are. A liar that asks each time that it looks held it up for ever."""
    looks = []

    class Asked(Trainer):
        def __init__(self) -> None:
            self._refilling, self._lacking = set(), defaultdict(set, {7: {0}})

        async def _still_missing(self, *_: object, **__: object) -> tuple[tuple[int, ...], float | None]:
            looks.append(1)
            self._lacking[7].add(0)
            await asyncio.sleep(0.1)
            return (), None

    trainer = Asked()
    run_virtually(trainer.refill(7), 100.0, [])
    assert 1 < len(looks) < 5
    assert not trainer._lacking


def test_who_has_ever_more_repaired_holds_up_no_word_of_a_trainer() -> None:
    """A liar begins a repair before each of its repairs has ended."""

    class Busy(Trainer):
        def __init__(self) -> None:
            self._claimed, self._repairs = set(), set()
            plan = SimpleNamespace(stages=1)
            self._ctx = cast("Any", SimpleNamespace(plan=plan))

        def _claims(self, indices: Iterable[int], turn: int) -> list[int]:
            return []

        async def again(self, repairs: int) -> None:
            await asyncio.sleep(0.1)
            if repairs:
                self._repairs.add(asyncio.create_task(self.again(repairs - 1)))
            await asyncio.sleep(0.1)
            self._repairs.discard(cast("Any", asyncio.current_task()))

    async def told_after() -> float:
        trainer, loop = Busy(), asyncio.get_running_loop()
        trainer._repairs.add(asyncio.create_task(trainer.again(40)))
        await trainer._run((), retry=False)
        took_s = loop.time()
        await asyncio.gather(*trainer._repairs)
        return took_s

    assert run_virtually(told_after(), 100.0, []) == pytest.approx(0.2)
