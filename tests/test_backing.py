"""The state of a swapped stage in backing memory: whole whatever ends its process, as large as planned, gone in the end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muletrain.compute.base import Update
from muletrain.compute.swap.backing import SPARE_BYTES, Disk, Memory, Region
from muletrain.compute.swap.fit import swap_memory
from muletrain.compute.swap.state import State
from muletrain.config.schema import Precision
from muletrain.errors import CapacityError
from muletrain.model.stage import Stage
from muletrain.optim.flat import FlatLayout
from muletrain.optim.rules import make_rule
from tests.small_stages import SPEC, run
from tests.swapped_stages import ADAMW, MICROBATCHES, SEQUENCES, STEPS, Made, stages_in, train

made = pytest.fixture(stages_in)
DIE = """
import os, sys, torch
from pathlib import Path
from tests.test_backing import *
state, rule = opened(Path(sys.argv[1]), 1)
if state.step is None:
    state.begin(lambda name: torch.ones(dict(Stage(BIG, 0, BIG.cut(1)).shapes())[name]))
state.update(rule, torch.ones(state.layout.size), Update(state.step, 1.0, skip=False))
print(state.step, state.digest().hex(), flush=True)
writes = 0
class Dying:
    by_tensor = rule.by_tensor
    def update(self, *tensors, **rest):
        global writes
        rule.update(*tensors, **rest)
        writes += 1
        if writes == 2:
            os.kill(os.getpid(), 9)
state.update(Dying(), torch.ones(state.layout.size), Update(state.step, 1.0, skip=False))
"""


BIG = replace(SPEC, width=256, ffn=512, vocab=128)


def opened(folder: Path, total: int) -> tuple[State, Any]:
    layout = FlatLayout.of(Stage(BIG, 0, BIG.cut(1)).shapes())
    return State(layout, Disk(folder)), make_rule(ADAMW, STEPS, layout, torch.device("cpu"), moments=False)


def test_the_end_of_the_process_in_the_middle_of_a_write_leaves_the_last_state_whole(tmp_path: Path) -> None:
    """Killed by the kernel after two of several windows were written; again and again, it goes on where it was."""
    assert FlatLayout.of(Stage(BIG, 0, BIG.cut(1)).shapes()).size > 6 << 18
    for steps in (1, 2, 3):
        died = subprocess.run([sys.executable, "-c", DIE, str(tmp_path)], capture_output=True, text=True, timeout=100)
        assert died.returncode == -signal.SIGKILL, died.stderr
        step, digest = died.stdout.split()
        state, rule = opened(tmp_path, STEPS)
        assert (state.step, int(step), state.digest().hex()) == (steps, steps, digest)
    plain, rule = State(state.layout, Memory()), rule
    plain.begin(lambda name: torch.ones(dict(Stage(BIG, 0, BIG.cut(1)).shapes())[name]))
    for step in range(3):
        plain.update(rule, torch.ones(state.layout.size), Update(step, 1.0, skip=False))
    assert plain.digest() == state.digest()


def test_what_killed_processes_left_is_removed_and_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders whose lock nobody holds go; a living neighbour's and a stranger's stay; our own files are written again."""
    neighbour, *killed = [Disk(tmp_path / name) for name in ("alive", "dead", "own")]
    for folder in killed:
        folder.named("model-0", 1 << 20)
        folder._lock.close()  # as the end of its process does
    (tmp_path / "stranger").mkdir()
    disk = Disk(tmp_path / "own")
    assert {path.name for path in tmp_path.iterdir()} == {"own", "alive", "stranger"}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=SPARE_BYTES))
    disk.check(4 << 20)
    with pytest.raises(CapacityError, match="are needed"):
        disk.check(5 << 20)
    for left in (disk, neighbour):
        left.close()
    assert {path.name for path in tmp_path.iterdir()} == {"stranger"}


@pytest.mark.parametrize("alone", [False, True])
def test_backing_memory_holds_what_was_planned(made: Made, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """Between sub-models, too. Beside the regions that are made here there are the reduced gradient, the last step's, one
    that is taken from a replica, and the copies for a checkpoint and a newcomer; alone, none of these."""
    sizes, region = list[int](), Memory.region

    def counted(memory: Memory, numbers: int, *, copied: bool = False) -> Region:
        sizes.append(4 * numbers)
        return region(memory, numbers, copied=copied)

    monkeypatch.setattr(Memory, "region", counted)
    most = MICROBATCHES - 1
    swapped = made.swapped(1, disk=False, most=most, alone=alone, tight=True)
    run(train(swapped, 2))
    assert swapped[0].rounds.rounds > 2, "a second round in a step takes the second accumulator"
    tokens = SEQUENCES * SPEC.context
    need = swap_memory(
        SPEC, SPEC.cut(1), 0, tokens, Precision.FP32, microbatches=most, lamb=False, disk=False, alone=alone
    )
    beside = need.update + (0 if alone else 4 * 3 * swapped[0].n_params + 2 * need.state)
    assert 0.981 * need.on_host <= sum(sizes) + beside <= need.on_host + 4, "4 bytes say which state counts"
    assert need.between > 0.019 * need.on_host, "it would be seen, were it twice as large"


@pytest.mark.parametrize("tight", [False, True])
def test_without_room_for_a_copy_the_state_itself_is_given_until_it_changes(made: Made, tight: bool) -> None:
    """A peer alone, with no more memory beside its device than it needs; with room, it gives a copy."""
    (swapped,) = made.swapped(1, disk=False, alone=True, tight=tight)
    assert swapped.lends == tight
    before = run(swapped.state())
    first = {name: t.clone() for name, t in before.items()}
    run(train([swapped], 1))
    now = run(swapped.state())  # waits for the update
    assert all(torch.equal(t, first[n]) for n, t in before.items()) != tight
    assert all(t.data_ptr() == before[n].data_ptr() for n, t in now.items()) == tight


def test_files_end_with_the_compute(made: Made, tmp_path: Path) -> None:
    (swapped,) = made.swapped(1)
    run(train([swapped], 1))
    state = run(swapped.state())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "counts",
        "swap-lock",
        *(f"{k}-{v}" for k in ("model", "moment1", "moment2") for v in "01"),
    }
    swapped.close()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert all(bool(torch.isfinite(t).all()) for t in state.values()), "a copy outlives it"
