"""What ``muletrain doctor`` looks at on this machine alone: torch, GPUs, memory, disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.schema import RunConfig
from muletrain.errors import MuletrainError
from muletrain.runs.doctor.examination import NO_GPU, NO_TORCH, TORCH, Check, Question, Verdict, advised
from muletrain.units import format_bytes, format_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

SMALL = 256
"""Rows of the matrices whose product is looked at."""
LEAST_CACHE = 10**9
"""Bytes that a tokenised corpus may want."""


def machine_checks(question: Question) -> Iterator[Check]:
    config = RunConfig.model_validate_json(question.config)
    yield (found := torch_check())
    if found.verdict is Verdict.MISSING:
        return
    yield from gpu_checks(config.compute.device)
    yield memory_check(config)
    yield from disk_checks(config, Path(question.temporary))


def torch_check() -> Check:
    try:
        import torch
    except Exception as e:  # a missing shared library is an OSError, a broken build anything
        return Check("torch", Verdict.MISSING, f"cannot be loaded: {' '.join(str(e).split())[:200]}", NO_TORCH)
    version, (low, high) = torch.__version__, TORCH
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if not low <= tuple(int(n) for n in version.split("+")[0].split(".")[:2]) < high:
        return Check("torch", Verdict.WARNING, f"{version}, which muletrain is not tested with", NO_TORCH)
    _multiply(torch.device("cpu"))
    threads = torch.get_num_threads()
    return Check("torch", Verdict.OK, f"{version}, {built}, {threads} thread{'s' * (threads != 1)}")


def gpu_checks(asked: str) -> Iterator[Check]:
    """``asked``: ``compute.device``."""
    import torch

    if torch.backends.mps.is_available():
        yield _gpu(torch.device("mps"))
        return
    for k in range(torch.cuda.device_count()):
        yield _gpu(torch.device("cuda", k))
    if not torch.cuda.device_count():
        yield _no_gpu(asked)


def _gpu(device: torch.device) -> Check:
    from muletrain.compute.probe import chip, device_memory, free_memory

    try:
        _multiply(device)
        memory = f"{format_memory(device_memory(device))}, {format_memory(free_memory(device))} of it free"
        return Check("GPU", Verdict.OK, f"{device}: {chip(device)}, {memory}")
    except RuntimeError as e:
        problem = " ".join(str(e).split())[:200]
        fix = f"{NO_GPU}; to leave this one out set CUDA_VISIBLE_DEVICES, or compute with --device cpu"
        return Check("GPU", Verdict.MISSING, f"{device} does not compute: {problem}", fix)


def _no_gpu(asked: str) -> Check:
    import torch

    verdict = Verdict.MISSING if asked.startswith("cuda") or asked == "mps" else Verdict.WARNING
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or int(shutil.which("nvidia-smi") is not None)
    if there and torch.version.cuda is None:
        fix = f"install a torch with CUDA: pip install --force-reinstall torch=={torch.__version__.split('+')[0]}"
        return Check("GPU", verdict, "NVIDIA hardware is here, but this torch is built without CUDA", fix)
    if there:
        return Check("GPU", verdict, f"NVIDIA hardware is here, but torch does not see it: {_why_no_cuda()}", NO_GPU)
    if verdict is Verdict.MISSING:
        return Check("GPU", verdict, f"none, and compute.device = '{asked}'", "take compute.device = 'auto'")
    return Check("GPU", Verdict.OK, "none; the CPU computes")


def _why_no_cuda() -> str:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as e:  # torch's and the driver's have no common base
        return " ".join(str(e).split())[:200]
    return "no reason given"


def _multiply(device: torch.device) -> None:
    """Raises RuntimeError where products are not what they should be."""
    import torch

    matrix = torch.ones(SMALL, SMALL, device=device)
    if not bool((matrix @ matrix == SMALL).all()):
        raise RuntimeError(f"a product of two matrices is wrong on {device}: the hardware may be faulty")


def memory_check(config: RunConfig) -> Check:
    """The offers that this machine's peers would make, against the stages' needs."""
    from muletrain.compute.probe import pick_device
    from muletrain.runs.assemble import RunFacts, resolve_start
    from muletrain.runs.measure.machine import ADVICE, free_memory_of_machine, memory_of, own_devices

    try:
        needs = RunFacts.of(resolve_start(config)).needs()
        names = own_devices(config.compute.device)
        host = free_memory_of_machine(len(names))
        offers = [memory_of(pick_device(name), config.compute.memory, 1, host) for name in names]
    except MuletrainError as e:
        return advised("memory", str(e), ADVICE)
    largest = max(offers, key=lambda o: o.device)
    totals = sorted({need.need(largest): need.of_device(largest) for need in needs}.items(), key=lambda t: t[1])
    wanted = totals[0][0] if len(totals) == 1 else f"{totals[0][0]} to {totals[-1][0]}"
    found = f"{largest} may be used, each of {len(needs)} stages needs {wanted}"
    able = sum(any(need.fits(o) for o in offers) for need in needs)
    if able == 0:
        return Check("memory", Verdict.MISSING, found, f"close other programs, or {ADVICE}")
    if able < len(needs):
        return Check(
            "memory",
            Verdict.WARNING,
            f"{found}: {able} of them fit here",
            f"other machines serve the rest, or {ADVICE}",
        )
    return Check("memory", Verdict.OK, found)


def disk_checks(config: RunConfig, temporary: Path) -> Iterator[Check]:
    """Where the run folder, the token cache and temporary files go."""
    from muletrain.data.tokens import cache_folder
    from muletrain.runs.assemble import RunFacts, resolve_start

    kept = config.checkpoint.keep + 1
    try:
        room = kept * sum(RunFacts.of(resolve_start(config)).plan().state_bytes)
    except MuletrainError:  # said already
        room = 0
    checkpoints = f"for {kept} checkpoints of the whole model ({format_bytes(room)}, where 'start' runs)"
    yield _disk(Path.cwd(), room, checkpoints, "run from a folder with more room, or name one in checkpoint.place")
    yield _disk(cache_folder(config.data), LEAST_CACHE, "for tokenised text", "set data.cache to another folder")
    yield _disk(temporary, LEAST_CACHE, "for temporary files", "set TMPDIR to another folder (with a short path)")


def _disk(folder: Path, wanted: int, what: str, fix: str) -> Check:
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
