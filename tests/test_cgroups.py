"""Memory and CPUs are those that the process' control groups allow, of version 1 and 2, nested, in containers or not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muletrain import cgroups
from muletrain.cgroups import cpus, memory_left
from muletrain.config.load import load_config
from muletrain.runs.doctor.machine_checks import memory_check

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = (
    "34 31 0:29 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "35 31 0:30 {} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
)


def system(root: Path, cgroup: str, mounts: str, files: dict[str, str | int]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group(folder: str, limit: str | int, used: int, cached: int = 0) -> dict[str, str | int]:
    stat = f"anon 1\ninactive_file {cached}"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


def old_group(folder: str, limit: int, used: int, cached: int = 0) -> dict[str, str | int]:
    top, stat = f"sys/fs/cgroup/memory{folder}", f"inactive_file 5\ntotal_inactive_file {cached}"
    return {
        f"{top}/memory.limit_in_bytes": limit,
        f"{top}/memory.usage_in_bytes": used,
        f"{top}/memory.stat": stat,
    }


def test_the_tightest_of_nested_groups_counts_and_read_files_give_way(tmp_path: Path) -> None:
    """A Slurm step: its own group has no limit, the job's has."""
    top = "sys/fs/cgroup/system.slice/job_7"
    files = {
        **group(f"{top}/step_0", "max", GIB),
        **group(top, 8 * GIB, 3 * GIB, GIB),
        **group("sys/fs/cgroup/system.slice", 64 * GIB, 40 * GIB),
    }
    root = system(tmp_path, "0::/system.slice/job_7/step_0", V2, files)
    assert memory_left(root) == 6 * GIB
    (root / f"{top}/memory.high").write_text(str(4 * GIB))
    assert memory_left(root) == 2 * GIB
    (root / f"{top}/step_0/memory.max").write_text(str(2 * GIB))
    assert memory_left(root) == GIB
    (root / f"{top}/step_0/memory.current").write_text(str(3 * GIB))
    assert memory_left(root) == 0


def test_a_container_with_a_namespace_sees_its_group_as_the_root(tmp_path: Path) -> None:
    assert memory_left(system(tmp_path, "0::/", V2, group("sys/fs/cgroup", 4 * GIB, GIB))) == 3 * GIB


def test_version_1_counts_where_the_system_is_mixed(tmp_path: Path) -> None:
    """Hybrid: a version 2 without controllers beside version 1."""
    mounts = f"{V1.format('/', '/')}\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    files = {**old_group("/slurm/job_7", 4 * GIB, GIB, GIB // 2), **old_group("/slurm", 9223372036854771712, GIB)}
    root = system(tmp_path, "5:memory:/slurm/job_7\n3:cpu,cpuacct:/\n0::/", mounts, files)
    assert memory_left(root) == 3 * GIB + GIB // 2


def test_a_container_without_a_namespace_is_mounted_at_its_own_group(tmp_path: Path) -> None:
    mounts = V1.format("/docker/ab", "/docker/ab")
    root = system(tmp_path, "5:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab", mounts, old_group("", 2 * GIB, GIB))
    assert memory_left(root) == GIB
    outside = system(tmp_path / "b", "0::/../other", V2, group("sys/fs/cgroup", 2 * GIB, 0))
    assert memory_left(outside) == 2 * GIB


def test_without_groups_or_limits_nothing_is_limited(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None
    assert memory_left(system(tmp_path, "0::/", V2, group("sys/fs/cgroup", "max", GIB))) is None
    assert memory_left(system(tmp_path / "x", "nonsense:", "and more", {})) is None
    assert cpus(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 64), ("150000 100000", 2), ("20000 100000", 1)])
def test_a_quota_of_cpu_time_is_a_number_of_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert (
        cpus(system(tmp_path, "0::/a/b", V2, {"sys/fs/cgroup/a/cpu.max": quota, "sys/fs/cgroup/a/b/x": ""})) == expected
    )
    amount, period = quota.replace("max", "-1").split()
    files = {f"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_{name}_us": n for name, n in (("quota", amount), ("period", period))}
    assert cpus(system(tmp_path / "old", "3:cpu,cpuacct:/", V1.format("/", "/"), files)) == expected


def test_doctor_names_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cgroups.memory_left,
        "__defaults__",
        (system(tmp_path, "0::/", V2, group("sys/fs/cgroup", GIB, GIB - 50_000_000)),),
    )
    found = memory_check(load_config()).found
    assert "a peer may use 47.7 MiB" in found
    assert "a control group, as of a container or batch job, leaves 47.7 MiB" in found
