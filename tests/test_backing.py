"""The state of a swapped stage in backing memory: its room is there from the start, as large as planned, and gone in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muletrain.compute.swap import backing
from muletrain.compute.swap.backing import Disk, Memory, Region
from muletrain.compute.swap.fit import swap_memory
from muletrain.config.schema import Precision
from muletrain.errors import CapacityError, CheckpointError
from tests.small_disks import fill, mounted_in
from tests.small_stages import SPEC, run
from tests.swapped_stages import MICROBATCHES, SEQUENCES, Made, stages_in, train

made, small_disk = pytest.fixture(stages_in), pytest.fixture(mounted_in)
DIE = """
import os, sys
from pathlib import Path
from muletrain.compute.swap.backing import Disk
disk = Disk(Path(sys.argv[1]))
disk.reserve(8 << 20)
regions = [disk.region(1 << 20) for _ in range(2)]
copy = regions[0].copy()
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    """Files of backing memory have no names, so the kernel frees their room however the process ends."""
    died = subprocess.run([sys.executable, "-c", DIE, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not list(tmp_path.iterdir())


def test_a_disk_that_others_fill_takes_no_room_that_was_reserved(
    small_disk: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions and copies come from the reserve, and a copy that is dropped gives its room back to it."""
    monkeypatch.setattr(backing, "SPARE_BYTES", 0)
    disk = Disk(small_disk("disk", "4m"))
    with pytest.raises(CapacityError, match="are needed"):
        disk.reserve(5 << 20)
    disk.reserve(3 << 20)
    fill(disk.folder)
    region = disk.region(1 << 18)
    for n in range(3):
        region.values.fill_(n)
        copy, other = region.copy(), region.copy()
        region.values.fill_(-1)
        assert copy.eq(n).all()
        assert other.eq(n).all()
        with pytest.raises(CapacityError, match=r"No space left on device: .* are needed .* free some space"):
            disk.region(1 << 18)
        del copy, other
    disk.close()


def room_of(disk: Disk) -> int:
    """Bytes that its reserve holds on the disk."""
    return os.fstat(disk._reserve.fileno()).st_size


def test_what_a_region_took_of_the_reserve_comes_back_with_its_end_and_never_more(tmp_path: Path) -> None:
    """A region may be larger than what is left of the reserve: it takes the rest from the disk, to which that returns."""
    disk = Disk(tmp_path)
    disk.reserve(3 << 20)
    small = disk.region(1 << 18)
    assert room_of(disk) == 2 << 20
    large = disk.region(1 << 20)
    assert room_of(disk) == 0
    beside = disk.region(1 << 18)
    del beside
    assert room_of(disk) == 0, "it had nothing of the reserve"
    del large
    assert room_of(disk) == 2 << 20
    copy = small.copy()
    assert room_of(disk) == 1 << 20, "the numbers outlive the region that they were copied to"
    del copy
    again = disk.region(1 << 18)
    del small, again
    assert room_of(disk) == 3 << 20
    assert not list(tmp_path.iterdir()), "no file has a name at any time, so a killed process leaves none"


def test_room_that_a_full_disk_refuses_is_given_back_or_given_up_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, folder: Path, nbytes: int) -> None:
        raise CapacityError("No space left on device")

    disk = Disk(tmp_path)
    with monkeypatch.context() as small:
        small.setattr(backing, "SPARE_BYTES", 1 << 60)
        with pytest.raises(CapacityError, match=r"are needed .* stay so"):
            disk.reserve(1 << 20)
    disk.reserve(2 << 20)
    region = disk.region(1 << 18)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(backing, "_take_room", full)
        del region
        disk.give_back(1 << 20)  # as the region's finalizer did, whose error nobody would have seen
    assert room_of(disk) == 1 << 20, "somebody else has taken it"
    with monkeypatch.context() as meanwhile:
        refused, take = list[int](), backing._take_room

        def full_for_the_first(fd: int, folder: Path, nbytes: int) -> None:
            if not refused:
                refused.append(nbytes)
                full(fd, folder, nbytes)
            take(fd, folder, nbytes)

        meanwhile.setattr(backing, "_take_room", full_for_the_first)
        with pytest.raises(CapacityError, match="No space left"):
            disk.region(1 << 20)
    assert refused == [4 << 20]
    assert room_of(disk) == 1 << 20, "what the region that came to nothing had taken is back"


def test_once_closed_a_disk_holds_no_room_and_regions_may_end_later(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.reserve(2 << 20)
    region, fd = disk.region(1 << 18), os.dup(disk._reserve.fileno())
    holders = [
        path for path in Path("/proc/self/fd").iterdir() if path.exists() and path.samefile(f"/proc/self/fd/{fd}")
    ]
    assert len(holders) == 2
    disk.close()
    holders = [
        path for path in Path("/proc/self/fd").iterdir() if path.exists() and path.samefile(f"/proc/self/fd/{fd}")
    ]
    assert len(holders) == 1, "only this test's"
    os.close(fd)
    assert region.values.eq(0).all()
    del region
    disk.give_back(1 << 20)  # as the region's finalizer did, whose error nobody would have seen
    disk.close()


def test_a_file_that_was_cut_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    region = Disk(tmp_path).region(1 << 20)
    assert isinstance(region, backing._File)
    os.ftruncate(region._fd, 1 << 21)
    with pytest.raises(CheckpointError, match=r"ends at byte 2097152 of 4194304.*--resume"):
        region.copy()
    with pytest.raises(CheckpointError, match="ends at byte 2097152"):
        region.read((1 << 19) - 10, torch.empty(20))


def test_a_limit_on_the_size_of_files_is_an_error_that_says_so(tmp_path: Path) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n" + DIE
    said = subprocess.run([sys.executable, "-c", limited, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert "CapacityError: File too large: " in said.stderr


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
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "files have no names"
    swapped.close()
    assert all(bool(torch.isfinite(t).all()) for t in state.values()), "a copy outlives it"
