"""The fuzzer itself: it draws, replays, shrinks, and finds what hangs or failed unseen."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from muletrain.sim.loop import Hang, VirtualLoop, run_virtually
from proofs import draws
from proofs.draws import large
from proofs.fuzzing import _play, _processes
from proofs.links import Links
from proofs.play import play
from proofs.reference import History
from proofs.scenario import FOR_EVER_S, Fault, Scenario
from proofs.shrink import as_code, shrunk
from proofs.verdict import Outcome
from proofs.witness import Witness
from tests.test_fuzz import FALSE_GRADIENTS, FORKED, SCENARIOS


def test_each_kind_is_drawn_in_twenty_of_a_thousand_seeds() -> None:
    drawn = Counter(kind for seed in range(1000) for kind in draws.draw(seed).kinds)
    assert {kind for kind in (*draws.KINDS, *large.KINDS) if drawn[kind] < 20} == set()


def test_what_breaks_a_promise_is_made_smaller_until_nothing_can_be_left_out() -> None:
    """Here: a cut of ``peer-1a`` with two microbatches at least."""
    needed = Fault(1.5, "cut", ("peer-1a",), 3.0)
    whole = replace(
        Scenario(1, (2, 3), 2, 9, 8, 0.1, (Fault(0.3, "slow", ("peer-0a",), 9.0), needed)), stalls=0.1, keep=2
    )
    smallest = shrunk(whole, lambda s: any(f.who == ("peer-1a",) for f in s.faults) and s.microbatches > 1)
    assert as_code(smallest) == "Scenario(1, (1, 1), 2, 1, 2, 0.0, (Fault(1.5, 'cut', ('peer-1a',), for_s=0.8),))"


def test_a_run_stands_still_while_no_fault_goes_on_and_no_step_is_new() -> None:
    """A fault that waits for a frame may begin long after the one before. The wait in between counts, and no wait before
    the first fault or after the last step does."""
    witness = Witness(Scenario(1, (1, 1), 1, 3, 4, 0.0, ()), History(), lambda broken: None)
    witness._applied_s |= {0: 40.0, 1: 41.0, 2: 130.0}
    for begin_s, for_s in ((50.0, 8.0), (52.0, 1.0), (100.0, 29.0), (500.0, 0.0)):
        witness.disturbed(begin_s, for_s)
    assert witness.stood_s() == 42.0
    witness.disturbed(51.0, FOR_EVER_S)
    assert witness.stood_s() == 0.0


def test_who_kills_it_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "proofs", "fuzz", "--seeds", "1000", "--jobs", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as fuzz:
        children: list[str] = []
        for _ in range(600):
            children = Path(f"/proc/{fuzz.pid}/task/{fuzz.pid}/children").read_text().split()
            if children:
                break
            time.sleep(0.05)
        time.sleep(1.0)
        fuzz.kill()
    assert children
    for _ in range(600):
        if not any(_runs(child) for child in children):
            return
        time.sleep(0.05)
    raise AssertionError("they are still there")


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_seed_replays_its_run_exactly() -> None:
    """In a process of its own, and after other seeds. Both sides of a partition train on here, and which of them stays
    is a matter of hashes."""
    command = [sys.executable, "-m", "proofs", "fuzz", "--seed", str(FORKED), "--json"]
    alone = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300).stdout)
    with _processes(1) as pool:
        _, later = pool.map(_play, [4, FORKED])
    assert any("lineage_left" in line for line in alone["timeline"])
    assert later == alone


def test_a_world_sends_the_same_bits_at_the_same_times_whatever_was_played_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[float, str, str, bytes]] = []
    damaged = Links.damage

    def noted(self: Links, sender: str, receiver: str, packed: bytes) -> bytes:
        sent.append((asyncio.get_running_loop().time(), sender, receiver, packed))
        return damaged(self, sender, receiver, packed)

    monkeypatch.setattr(Links, "damage", noted)
    scenario = SCENARIOS[0]
    play(scenario)
    first = sent[:]
    play(FALSE_GRADIENTS[1])
    sent.clear()
    play(scenario)
    assert len(sent) > 100
    assert sent == first


def test_what_nobody_awaited_is_a_broken_promise_of_the_seed_in_which_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed task that holds on to itself is forgotten by the garbage collector only, whenever that comes."""

    async def fails() -> None:
        itself = asyncio.current_task()
        raise ValueError(f"{itself is not None}")

    async def world() -> None:
        await asyncio.wait({asyncio.create_task(fails())})

    def played(scenario: Scenario) -> Outcome:
        outcome = Outcome(scenario)
        run_virtually(world(), 2.0, outcome.violations)
        return outcome

    monkeypatch.setattr("proofs.play.play", played)
    gc.disable()
    try:
        assert len(_play(0)["violations"]) == 1
    finally:
        gc.enable()


def test_time_jumps_and_waiting_for_nothing_is_a_hang() -> None:
    async def sleeps() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtually(sleeps(), 4000, []) == pytest.approx(3600)
    with pytest.raises(Hang, match="virtual time"):
        run_virtually(sleeps(), 100, [])

    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Hang, match="no timer"):
        run_virtually(waits(), 100, [])

    async def waits_beside_a_timer_that_never_ends() -> None:
        asyncio.get_running_loop().call_later(math.inf, print)
        await waits()

    with pytest.raises(Hang, match="no timer"):
        run_virtually(waits_beside_a_timer_that_never_ends(), math.inf, [])
    assert VirtualLoop(1.0).time() == 0.0
