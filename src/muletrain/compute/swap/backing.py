"""Backing memory holds what the device has no room for: memory of the machine beside a GPU, or memory-mapped files.

Both are tensors of fp32 numbers on the CPU. Memory that a GPU copies from or to is pinned, so that its copy engines do
that at the speed of the bus, without the CPU. Pages of a file that are not in use can leave memory (``release``); the
kernel writes them back. A file's room is taken when it is made, so that a full disk is an error then, and no crash
later.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
from typing import TYPE_CHECKING, BinaryIO

import torch

from muletrain.errors import CapacityError, no_room
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

WINDOW = 1 << 18
"""Numbers of a region that are read or written at a time (1 MiB), so that no more of it has to be in memory."""
SMALLEST_WINDOW, WINDOWS_IN_STATE = 4096, 16
"""Numbers in a window of the update, and windows in the state of a small stage, at least: they would be most of a small
budget."""
PAGE = mmap.PAGESIZE
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, KEPT_BYTES = -1, -3, 1 << 22
"""Settings of glibc, and the smallest block that is given back at once [bytes]."""
LOCK = "swap-lock"
"""Name of the file by whose lock a folder is in use."""
SPARE_BYTES = 1 << 30
"""Bytes of a disk that stay free."""


def update_window(params: int) -> int:
    """Returns how many of ``params`` numbers are updated at a time: a multiple of the smallest window, so that vectors of
    the CPU begin where they do in a resident stage."""
    smallest = SMALLEST_WINDOW
    return max(smallest, min(WINDOW, params // WINDOWS_IN_STATE // smallest * smallest))


class Region:
    """Flat fp32 numbers in backing memory. ``values``: all of them."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def expect(self, begin: int, end: int) -> None:
        """The numbers from ``begin`` to before ``end`` are needed soon: fetch them meanwhile."""

    def release(self, begin: int, end: int) -> None:
        """The numbers from ``begin`` to before ``end`` are not needed soon."""

    @property
    def pinned(self) -> bool:
        """Do a GPU's copy engines reach the numbers?"""
        return False

    def read(self, begin: int, out: Tensor) -> None:
        """Copy the numbers from ``begin`` on to ``out``, flat fp32 in memory."""
        out.copy_(self.values[begin : begin + out.numel()])

    def write(self, begin: int, values: Tensor) -> None:
        """Replace the numbers from ``begin`` on by ``values``, flat fp32 in memory."""
        self.values[begin : begin + values.numel()].copy_(values)

    def windows(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Pass over the region: yields ranges in order, fetches the next one, and releases each that was used."""
        end = self.values.numel() if end is None else end
        for a in range(begin, end, WINDOW):
            b = min(a + WINDOW, end)
            self.expect(b, min(b + WINDOW, end))
            yield a, b
            self.release(a, b)

    def copy(self) -> Tensor:
        """A copy of the numbers as they are now, which does not change any more."""
        return self.values.clone()


class _Pinned(Region):
    """A region in pinned memory. torch's own pinned memory comes in powers of two: up to twice what is asked for."""

    def __init__(self, values: Tensor, gpu: torch.device) -> None:
        super().__init__(values)
        self._gpu, self._at = gpu, 0
        if values.nbytes:
            with torch.cuda.device(gpu):
                driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                if not int(driver.cudaHostRegister(values.data_ptr(), values.nbytes, 0)):
                    self._at = values.data_ptr()
                else:  # CUDA would report that as an error of this thread's next kernel
                    with contextlib.suppress(RuntimeError):
                        torch.ones(1, device=gpu)

    @property
    def pinned(self) -> bool:
        return self._at != 0

    def __del__(self) -> None:
        if getattr(self, "_at", 0):
            torch.cuda.synchronize(self._gpu)  # a copy that is under way may be all that still uses the memory
            torch.cuda.cudart().cudaHostUnregister(self._at)  # type: ignore[no-untyped-call]


class _File(Region):
    """A region in a memory-mapped file."""

    def __init__(self, path: Path, numbers: int, *, existing: bool) -> None:
        """Make the file, of zeros, or open the ``existing`` one. Raises CapacityError if the disk is full."""
        self._path, nbytes = path, _size(numbers)
        flags = os.O_RDWR if existing else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if not existing:
                _take_room(self._fd, path, nbytes)
            self._map = mmap.mmap(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            if not existing:
                path.unlink(missing_ok=True)
            raise
        super().__init__(torch.frombuffer(self._map, dtype=torch.float32, count=numbers) if numbers else torch.empty(0))

    def expect(self, begin: int, end: int) -> None:
        self._advise(mmap.MADV_WILLNEED, begin, end)

    def release(self, begin: int, end: int) -> None:
        self._advise(mmap.MADV_DONTNEED, begin, end)  # of a shared file: pages leave this process, nothing is lost

    def read(self, begin: int, out: Tensor) -> None:
        """Beside the mapping: a page that is first touched there costs ten times what its copy does."""
        left, at = _bytes_of(out), 4 * begin
        while left:
            n = os.preadv(self._fd, [left], at)
            left, at = left[n:], at + n

    def write(self, begin: int, values: Tensor) -> None:
        """Beside the mapping, through which each page would be read from the disk first."""
        left, at = _bytes_of(values), 4 * begin
        while left:
            n = os.pwrite(self._fd, left, at)
            left, at = left[n:], at + n

    def _advise(self, advice: int, begin: int, end: int) -> None:
        first = 4 * begin // PAGE * PAGE
        if end > begin:
            self._map.madvise(advice, first, 4 * end - first)

    def copy(self) -> Tensor:
        """The copy is a file without a name, and takes no memory."""
        image = _File(self._path.with_name(f"{self._path.name}.copy"), self.values.numel(), existing=False)
        image.forget()
        _copy_file(self._fd, image._fd, _size(self.values.numel()))
        return image.values

    def forget(self) -> None:
        """Remove the file's name: the disk's room is free once nobody uses the numbers."""
        self._path.unlink(missing_ok=True)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._fd)  # the mapping stays as long as a tensor uses it


class Memory:
    """Backing memory in the machine's RAM; ``gpu``: the one that copies from and to it, if any."""

    durable = False

    def __init__(self, gpu: torch.device | None = None) -> None:
        self._gpu = gpu

    def check(self, nbytes: int) -> None:
        """The offer says what there is (``SwapMemory.fits``)."""

    def region(self, numbers: int, *, copied: bool = False) -> Region:
        """Zeros. ``copied``: the device copies from it, or to it."""
        values = torch.zeros(numbers)
        return _Pinned(values, self._gpu) if self._gpu is not None and copied else Region(values)

    def named(self, name: str, numbers: int, *, copied: bool = False) -> Region:
        return self.region(numbers, copied=copied)

    def close(self) -> None:
        """Nothing stays behind."""


class Disk:
    """Backing memory in files of a folder, which is this object's own while it holds the folder's lock."""

    durable = True

    def __init__(self, folder: Path) -> None:
        """Remove what killed processes left beside ``folder``. Raises CapacityError if the folder cannot be made."""
        self.folder, self._count = folder, 0
        try:
            self._lock = _locked(folder)
            for lock in folder.parent.glob(f"*/{LOCK}"):
                if lock.parent != folder:
                    _remove_if_left(lock)
        except OSError as e:
            raise CapacityError(f"swap.folder: {folder} cannot be used ({e.strerror}); name another folder") from e

    def check(self, nbytes: int) -> None:
        """Raises CapacityError if the disk has no room for ``nbytes`` in all."""
        own = sum(path.stat().st_size for path in self.folder.iterdir())  # of a process that was killed
        free = shutil.disk_usage(self.folder).free + own
        if nbytes + SPARE_BYTES > free:
            raise CapacityError(_full(self.folder, nbytes, free))

    def region(self, numbers: int, *, copied: bool = False) -> Region:
        """Zeros, in a file without a name: it ends with the process. Raises CapacityError if the disk is full."""
        self._count += 1
        file = _File(self.folder / f"region-{self._count}", numbers, existing=False)
        file.forget()
        return file

    def named(self, name: str, numbers: int, *, copied: bool = False) -> Region:
        """The region of that name: what an earlier process left in it if it has the right size, else zeros. Raises
        CapacityError if the disk is full."""
        path = self.folder / name
        existing = path.is_file() and path.stat().st_size == _size(numbers)
        return _File(path, numbers, existing=existing)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


Backing = Memory | Disk


def _locked(folder: Path) -> BinaryIO:
    """Make ``folder`` and its lock file, and hold that: processes of one peer share it, and it ends with the last one."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile, as left by a killed process
            file = (folder / LOCK).open("ab")
            fcntl.flock(file, fcntl.LOCK_SH)
            if (folder / LOCK).stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file


def _remove_if_left(lock: Path) -> None:
    with contextlib.suppress(OSError), lock.open("rb") as file:  # in use, removed meanwhile, or another user's
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)


def keep_freed_memory_small() -> None:
    """Have the C library keep freed blocks of less than ``KEPT_BYTES`` only, until ``return_freed_memory``. glibc keeps up
    to 32 MiB in a heap for each thread, where they pile up: a stage that was to use 137 MB used 291 MB. To return every
    block at once costs a third more time than the computation itself (page faults; benchmarks/swap). Elsewhere nothing
    changes."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Have the C library give all freed memory back to the kernel."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _bytes_of(values: Tensor) -> memoryview:
    return values.detach().numpy().data.cast("B")


def _size(numbers: int) -> int:
    """Bytes of a file of so many numbers."""
    return max(PAGE, 4 * numbers)


def _take_room(fd: int, path: Path, nbytes: int) -> None:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:  # macOS: room is not taken, and a disk that fills up later ends the process
            os.ftruncate(fd, nbytes)
    except OSError as e:
        if no_room(e) is None:
            raise
        raise CapacityError(_full(path.parent, nbytes, shutil.disk_usage(path.parent).free)) from e


def _full(folder: Path, nbytes: int, free: int) -> str:
    return (
        f"{folder}: {format_memory(nbytes)} are needed for a stage that does not fit into memory, and {format_memory(free)} are "
        f"free ({format_memory(SPARE_BYTES)} stay so): free some space there, name a folder on a larger disk (swap.folder), or begin "
        f"the run with more stages"
    )


def _copy_file(source: int, target: int, nbytes: int) -> None:
    """Copy without this process's memory; where the file system can, without copying at all."""
    done = 0
    while done < nbytes:
        try:
            done += os.copy_file_range(source, target, nbytes - done, done, done)
        except (AttributeError, OSError):  # not on this system, or not between these files
            piece = os.pread(source, 4 * WINDOW, done)
            done += os.pwrite(target, piece[: nbytes - done], done)
