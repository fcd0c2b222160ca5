"""Backing memory holds tensors that exceed the device: memory of the machine beside a GPU, or memory-mapped files.

Both are tensors of fp32 numbers on the CPU. Memory that a GPU copies from or to is pinned, so that copy engines run at
the speed of the bus, without the CPU. Pages of a file that are not in use can leave memory (``release``); the kernel
writes changes back. Files have no names: the kernel frees the room however the process ends. The room of all files is
taken at the start (``Disk.reserve``), so that a full disk is an error then, and stops no training later.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING, NoReturn

import torch

from muletrain.errors import CapacityError, CheckpointError
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

WINDOW = 1 << 18
"""Numbers of a region that are read or written at a time (1 MiB), so that no more has to be in memory."""
SMALLEST_WINDOW, WINDOWS_IN_STATE = 4096, 16
"""Numbers in a window of the update, and windows in the state of a small stage, at least: windows would be most of a
small budget."""
PAGE = mmap.PAGESIZE
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, KEPT_BYTES = -1, -3, 1 << 22
"""Settings of glibc, and the smallest block that is given back at once [bytes]."""
SPARE_BYTES = 1 << 30
"""Bytes of a disk that stay free."""


def update_window(params: int) -> int:
    """Returns how many of ``params`` numbers are updated at a time: a multiple of the smallest window, so that vectors
    of the CPU begin as in a resident stage."""
    smallest = SMALLEST_WINDOW
    return max(smallest, min(WINDOW, params // WINDOWS_IN_STATE // smallest * smallest))


class Region:
    """Flat fp32 numbers in backing memory. ``values``: all numbers."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def expect(self, begin: int, end: int) -> None:
        """The numbers from ``begin`` to before ``end`` are needed soon: prefetch."""

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
        """An immutable copy of the current numbers."""
        return self.values.clone()


class _Pinned(Region):
    """A region in pinned memory. torch's own pinned memory comes in powers of two: up to twice the request."""

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
    """A region in a memory-mapped file without a name."""

    def __init__(self, disk: Disk, numbers: int) -> None:
        """Make the file, of zeros. Raises CapacityError if the disk is full."""
        self._disk, nbytes = disk, _size(numbers)
        self._fd, taken = disk.open(nbytes)
        self._map = mmap.mmap(self._fd, nbytes)
        weakref.finalize(self._map, disk.give_back, taken).atexit = False
        super().__init__(torch.frombuffer(self._map, dtype=torch.float32, count=numbers) if numbers else torch.empty(0))

    def expect(self, begin: int, end: int) -> None:
        self._advise(mmap.MADV_WILLNEED, begin, end)

    def release(self, begin: int, end: int) -> None:
        self._advise(mmap.MADV_DONTNEED, begin, end)  # of a shared file: pages leave this process, nothing is lost

    def read(self, begin: int, out: Tensor) -> None:
        """Beside the mapping: the first touch of a mapped page costs ten times as much as copying the page."""
        left, at = _bytes_of(out), 4 * begin
        while left:
            if not (n := os.preadv(self._fd, [left], at)):
                self._cut_short(at)
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
        """The copy is a file, too, and takes no memory. Where the file system can, nothing is copied."""
        image, done, nbytes = _File(self._disk, self.values.numel()), 0, _size(self.values.numel())
        while done < nbytes:
            try:
                n = os.copy_file_range(self._fd, image._fd, nbytes - done, done, done)
            except (AttributeError, OSError):  # not on this system, or not between these files
                n = os.pwrite(image._fd, os.pread(self._fd, min(4 * WINDOW, nbytes - done), done), done)
            if not n:
                self._cut_short(done)
            done += n
        return image.values

    def _cut_short(self, at: int) -> NoReturn:
        raise CheckpointError(
            f"{self._disk.folder}: a file of a swapped stage ends at byte {at} of {_size(self.values.numel())}: another program "
            f"or the file system has cut it; go on from the last checkpoint (--resume)"
        )

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._fd)  # the mapping stays as long as a tensor uses it


class Memory:
    """Backing memory in the machine's RAM; ``gpu``: the copying GPU, if any."""

    on_disk = False

    def __init__(self, gpu: torch.device | None = None) -> None:
        self._gpu = gpu

    def reserve(self, nbytes: int) -> None:
        """The offer bounds the memory (``SwapMemory.fits``)."""

    def region(self, numbers: int, *, copied: bool = False) -> Region:
        """Zeros. ``copied``: source or target of device copies."""
        values = torch.zeros(numbers)
        return _Pinned(values, self._gpu) if self._gpu is not None and copied else Region(values)

    def close(self) -> None:
        """Nothing stays behind."""


class Disk:
    """Backing memory in files of a folder. Owns room of that disk: a file as large as the room not taken by regions."""

    on_disk = True

    def __init__(self, folder: Path) -> None:
        """Raises CapacityError if the folder cannot be made, or written to."""
        self.folder, self._left, self._lock = folder, 0, threading.RLock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._reserve = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 # closed by ``close``
        except OSError as e:
            raise CapacityError(f"swap.folder: {folder} cannot be used ({e.strerror}); name another folder") from e

    def reserve(self, nbytes: int) -> None:
        """Take the room of all simultaneous regions and copies. Raises CapacityError if the disk lacks it."""
        free = shutil.disk_usage(self.folder).free
        if nbytes + SPARE_BYTES > free:
            raise CapacityError(_full(self.folder, nbytes, free))
        _take_room(self._reserve.fileno(), self.folder, nbytes)
        self._left = nbytes

    def region(self, numbers: int, *, copied: bool = False) -> Region:
        """Zeros. Raises CapacityError if the disk is full."""
        return _File(self, numbers)

    def open(self, nbytes: int) -> tuple[int, int]:
        """A new file of zeros, and the number of bytes from the reserve. Raises CapacityError if the disk is full."""
        with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
            taken = self._take(nbytes)
            try:
                _take_room(file.fileno(), self.folder, nbytes)
            except CapacityError:
                self.give_back(taken)
                raise
            return os.dup(file.fileno()), taken

    def _take(self, nbytes: int) -> int:
        with self._lock:
            taken = min(nbytes, self._left)
            if taken:
                os.ftruncate(self._reserve.fileno(), self._left - taken)
            self._left -= taken
            return taken

    def give_back(self, nbytes: int) -> None:
        """A file has gone: return the bytes to the reserve, unless the disk was filled at that moment."""
        with self._lock, contextlib.suppress(CapacityError):
            if nbytes and not self._reserve.closed:
                _take_room(self._reserve.fileno(), self.folder, self._left + nbytes)
                self._left += nbytes

    def close(self) -> None:
        """Free the reserve. Idempotent."""
        with self._lock:
            self._left = 0
            self._reserve.close()


Backing = Memory | Disk


def keep_freed_memory_small() -> None:
    """Have the C library keep freed blocks of less than ``KEPT_BYTES`` only, until ``return_freed_memory``. glibc keeps
    up to 32 MiB in a heap for each thread: a stage that was to use 137 MB used 291 MB. To return every block at once
    costs a third more time than the computation itself (page faults; benchmarks/swap). Elsewhere nothing changes."""
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


def _take_room(fd: int, folder: Path, nbytes: int) -> None:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:  # macOS: room is not taken, and a disk that fills up later ends the process
            os.ftruncate(fd, nbytes)
    except OSError as e:  # full, over a quota, or larger than files may be here
        raise CapacityError(f"{e.strerror}: {_full(folder, nbytes, shutil.disk_usage(folder).free)}") from e


def _full(folder: Path, nbytes: int, free: int) -> str:
    return (
        f"{folder}: {format_memory(nbytes)} are needed for a stage that does not fit into memory, and {format_memory(free)} are "
        f"free ({format_memory(SPARE_BYTES)} stay so): free some space there, name a folder on a larger disk (swap.folder), or begin "
        f"the run with more stages"
    )
