"""Resource limits of this process from its control groups (Linux), of version 1 and 2.

A batch system, a container or systemd sets a limit on a group; each group above may have a smaller limit.
/proc/self/cgroup names the groups of this process, and /proc/self/mountinfo names the mount points of their files.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")
"""The root of the file system; tests use a different root."""
UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 for no limit [bytes]."""


class _Names(NamedTuple):
    """Files of a memory group: limits, use, and the line of memory.stat with the reclaimable file pages."""

    limits: tuple[str, ...]
    used: str
    cached: str


_V2 = _Names(("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that this process may still take within all its groups; None: no group has a limit."""
    left = []
    for controller, names in (("", _V2), ("memory", _V1)):
        for group in _groups(controller, root):
            limit = min((n for name in names.limits if (n := _number(group / name)) is not None), default=UNLIMITED)
            used = _number(group / names.used)
            if limit < UNLIMITED and used is not None:
                left.append(max(0, limit - used + min(used, _cached(group / "memory.stat", names.cached))))
    return min(left, default=None)


def cpus(root: Path = ROOT) -> int:
    """Number of CPUs that this process may keep busy: its allowed CPUs, or fewer if a group has a quota of CPU time."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [[*_text(group / "cpu.max").split(), "", ""][:2] for group in _groups("", root)]
    for group in _groups("cpu", root):
        quotas.append([_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")])
    return max(1, math.ceil(min([own, *(_share(quota, period) for quota, period in quotas)])))


def _share(quota: str, period: str) -> float:
    """CPUs of a quota of CPU time in each period [us]."""
    if not (quota.isdecimal() and period.isdecimal()) or int(period) == 0:
        return math.inf  # 'max', '-1', or no such file
    return int(quota) / int(period)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The mounted folders of this process' group and of all groups above. ``controller``: of version 1; '': version
    2."""
    lines = ([*line.split(":", 2), "", ""] for line in _lines(root / "proc/self/cgroup"))
    named = {c: path for number, names, path, *_ in lines for c in ([""] if number == "0" else names.split(","))}
    path = named.get(controller)
    found = None if path is None else _mounted(controller, root)
    if path is None or found is None:
        return
    top, mount = found
    # in a container without its own namespace, the mount begins at the container's group
    inside = Path(path).relative_to(top) if Path(path).is_relative_to(top) else Path(path.lstrip("/"))
    group = mount if ".." in inside.parts else mount / inside  # '..': outside of this namespace
    while not group.is_dir() and group != mount:
        group = group.parent
    yield from (g for g in (group, *group.parents) if g.is_relative_to(mount))


def _mounted(controller: str, root: Path) -> tuple[str, Path] | None:
    """The group at which the controller's mount begins, and the mount's folder."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = (after.split() + [""] * 3)[:3]
        if kind == ("cgroup" if controller else "cgroup2") and (not controller or controller in options.split(",")):
            top, folder = before.split()[3:5]
            return top, root / folder.encode().decode("unicode_escape").lstrip("/")  # '\\040' is a space
    return None


def _cached(stat: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(stat) if line.startswith(f"{name} ")), 0)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
