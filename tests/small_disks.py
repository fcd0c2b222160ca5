"""File systems that are soon full."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def mounted_in(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Mounts small file systems in memory."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small file system")
    mounted: list[Path] = []

    def mount(name: str, size: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        tried = subprocess.run(command, capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"no mounting here: {tried.stderr}")
        mounted.append(folder)
        return folder

    try:
        yield mount
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all the room that is left; the file that has it, perhaps from before."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return ballast


def shrink(folder: Path) -> None:
    """Take most of the room of a mounted file system that is left, without memory for it."""
    disk = os.statvfs(folder)
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    subprocess.run(["mount", "-o", f"remount,size={used + (1 << 20)}", str(folder)], check=True)
