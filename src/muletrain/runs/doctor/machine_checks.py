"""The checks of ``muletrain doctor`` on this machine alone: torch, GPUs, memory, disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.cgroups import memory_left
from muletrain.config.schema import RunConfig
from muletrain.errors import MuletrainError
from muletrain.runs.doctor.examination import NO_GPU, NO_TORCH, TORCH, Check, Question, Verdict, advised
from muletrain.units import format_bytes, format_memory, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

SMALL = 256
"""Rows of the matrices in the test product."""
LEAST_CACHE = 10**9
"""Bytes that a tokenised corpus may need."""


def machine_checks(question: Question) -> Iterator[Check]:
    """Yield the checks; without torch, only the check for torch."""
    config = RunConfig.model_validate_json(question.config, strict=True)
    yield (found := torch_check())
    if found.verdict is Verdict.MISSING:
        return
    yield from gpu_checks(config.compute.device)
    yield memory_check(config)
    yield from disk_checks(config, Path(question.temporary))


def torch_check() -> Check:
    """Check the version of torch, and a small product."""
    try:
        import torch
    except Exception as e:  # a missing shared library is an OSError, a broken build anything
        return Check("torch", Verdict.MISSING, f"cannot be loaded: {' '.join(str(e).split())[:200]}", NO_TORCH)
    version, (low, high) = torch.__version__, TORCH
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if not low <= tuple(int(n) for n in version.split("+")[0].split(".")[:2]) < high:
        return Check("torch", Verdict.WARNING, f"{version}, with which muletrain is not tested", NO_TORCH)
    _multiply(torch.device("cpu"))
    return Check("torch", Verdict.OK, f"{version}, {built}, {plural(torch.get_num_threads(), 'thread')}")


def gpu_checks(asked: str) -> Iterator[Check]:
    """Yield a check per GPU, or one. ``asked``: ``compute.device``."""
    import torch

    if torch.backends.mps.is_available():
        yield _gpu(torch.device("mps"))
        return
    for k in range(torch.cuda.device_count()):
        yield _gpu(torch.device("cuda", k))
    if not torch.cuda.device_count():
        yield no_gpu_check(asked)


def _gpu(device: torch.device) -> Check:
    from muletrain.compute.probe import chip, device_memory, free_memory

    try:
        _multiply(device)
        memory = f"{format_memory(device_memory(device))}, {format_memory(free_memory(device))} free"
        return Check("GPU", Verdict.OK, f"{device}: {chip(device)}, {memory}")
    except RuntimeError as e:
        problem = " ".join(str(e).split())[:200]
        fix = f"{NO_GPU}; to skip this GPU, set CUDA_VISIBLE_DEVICES, or use --device cpu"
        return Check("GPU", Verdict.MISSING, f"{device} does not compute: {problem}", fix)


def no_gpu_check(asked: str) -> Check:
    """The check for a machine on which torch finds no GPU, with the reason. ``asked``: ``compute.device``."""
    import torch

    verdict = Verdict.MISSING if asked.startswith("cuda") or asked == "mps" else Verdict.WARNING
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or int(shutil.which("nvidia-smi") is not None)
    if there and torch.version.cuda is None:
        fix = f"install a torch with CUDA: pip install --force-reinstall torch=={torch.__version__.split('+')[0]}"
        return Check("GPU", verdict, "there is NVIDIA hardware, but this torch is built without CUDA", fix)
    if there:
        return Check("GPU", verdict, f"there is NVIDIA hardware, but torch does not find it: {_why_no_cuda()}", NO_GPU)
    if verdict is Verdict.MISSING:
        return Check("GPU", verdict, f"none, but compute.device = '{asked}'", "set compute.device = 'auto'")
    return Check("GPU", Verdict.OK, "none; the CPU is used")


def _why_no_cuda() -> str:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as e:  # errors of torch and of the driver have no common base
        return " ".join(str(e).split())[:200]
    return "no reason given"


def _multiply(device: torch.device) -> None:
    """Raises RuntimeError if a product is wrong."""
    import torch

    matrix = torch.ones(SMALL, SMALL, device=device)
    if not bool((matrix @ matrix == SMALL).all()):
        raise RuntimeError(f"a product of two matrices is wrong on {device}: the hardware may be faulty")


def memory_check(config: RunConfig) -> Check:
    """Compare the memory of this machine's peers with the needs of the stages."""
    from muletrain.compute.probe import pick_device
    from muletrain.runs.assemble import RunFacts, resolve_start
    from muletrain.runs.measure.machine import ADVICE, free_memory_of_machine, memory_of, own_devices

    alone = config.fleet.local_peers == 1  # then 'muletrain run' reserves nothing for joiners
    try:
        needs = RunFacts.of(resolve_start(config), alone=alone).needs()
        names = own_devices(config.compute.device)
        host = free_memory_of_machine(len(names))
        offers = [memory_of(pick_device(name), config.compute.memory, 1, host) for name in names]
    except MuletrainError as e:
        return advised("memory", str(e), ADVICE)
    largest = max(offers, key=lambda o: o.device)
    totals = sorted({need.need(largest): need.of_device(largest) for need in needs}.items(), key=lambda t: t[1])
    wanted = totals[0][0] if len(totals) == 1 else f"{totals[0][0]} to {totals[-1][0]}"
    found = f"a peer may use {largest}; each of {plural(len(needs), 'stage')} needs {wanted}"
    found += " in 'muletrain run', where nobody joins" if alone else ""
    if (left := memory_left()) is not None and left // len(names) <= host:
        found += f" (a control group, as of a container or batch job, leaves {format_memory(left)})"
    able = sum(any(need.fits(o) for o in offers) for need in needs)
    if able == 0:
        return Check("memory", Verdict.MISSING, found, f"close other programs, or {ADVICE}")
    if able < len(needs):
        return Check(
            "memory",
            Verdict.WARNING,
            f"{found}; only {able} fit here",
            f"other machines serve the rest, or {ADVICE}",
        )
    return Check("memory", Verdict.OK, found)


def disk_checks(config: RunConfig, temporary: Path) -> Iterator[Check]:
    """Check the disks of the run folder, the token cache and temporary files."""
    from muletrain.config.cache import cache_folder
    from muletrain.runs.assemble import RunFacts, resolve_start

    kept = config.checkpoint.keep + 1
    try:
        room = kept * sum(RunFacts.of(resolve_start(config)).plan().state_bytes)
    except MuletrainError:  # reported already
        room = 0
    checkpoints = (
        f"for {plural(kept, 'checkpoint')} of the whole model ({format_bytes(room)}, on the machine of 'start')"
    )
    yield disk_check(Path.cwd(), room, checkpoints, "use a folder with more room, or set checkpoint.place")
    yield disk_check(cache_folder(config.data), LEAST_CACHE, "for tokenised text", "set data.cache to another folder")
    yield disk_check(temporary, LEAST_CACHE, "for temporary files", "set TMPDIR to another folder (with a short path)")


def disk_check(folder: Path, wanted: int, what: str, fix: str) -> Check:
    """Check that ``folder`` can be written and has ``wanted`` bytes free."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            file.write(bytes(1 << 16))
            file.flush()
        free = shutil.disk_usage(there).free
    except OSError as e:
        return Check("disk", Verdict.MISSING, f"{folder}: cannot be written to: {e.strerror}", fix)
    found = f"{folder}: {format_bytes(free)} free {what}"
    return (
        Check("disk", Verdict.OK, found)
        if free >= wanted
        else Check("disk", Verdict.WARNING, found, f"free some space, or {fix}")
    )
