"""The same stages on a GPU: every precision follows the CPU's fp32, whatever lives where. Deselected where there is
none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.compute import scaling
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.probe import choose_precision, free_memory, pick_device
from muletrain.compute.results import PIECE
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision
from muletrain.events import PeerJoined, StepDone
from muletrain.model.spec import ModelSpec

from .fleet_run import checkpoint_weights, run_fleet
from .small_stages import MB, OPTIMIZER, Fleet, data, fleet, reference, run, through, train, weights
from .test_equivalence import facts_of, relative_difference

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.compute.torch_compute import TorchCompute

__all__ = ["fleet"]
pytestmark = pytest.mark.cuda
GPU = torch.device("cuda")
LARGE = ModelConfig(layers=2, width=512, heads=8, ffn=2048, vocab=61, context=16)
CLOSENESS = {Precision.FP32: 1e-3, Precision.BF16: 0.02, Precision.FP16: 0.02}


@pytest.mark.parametrize("state_device", ["device", "cpu"])
@pytest.mark.parametrize("precision", list(CLOSENESS))
def test_a_gpu_follows_the_cpu(fleet: Fleet, precision: Precision, state_device: str) -> None:
    optimizer = OPTIMIZER.model_copy(update={"state_device": state_device})
    parts = fleet(2, device=GPU, precision=precision, optimizer=optimizer)
    losses, _ = reference()
    assert run(train(parts)) == pytest.approx(losses, rel=CLOSENESS[precision])
    kept = "cuda" if state_device == "device" else "cpu"
    for part in parts:
        assert part.arithmetic.masters.device.type == part.arithmetic.rule.moment1.device.type == kept
        assert part.arithmetic.masters.dtype == torch.float32
        assert part.arithmetic.parameters(0)[0].device.type == "cuda"
    assert {t.device.type for t in run(weights(parts)).values()} == {"cpu"}, "as it travels and is saved"


def test_replicas_of_one_kind_agree_to_the_last_bit(fleet: Fleet) -> None:
    """What a newcomer loads, and what it does with a gradient, is what the others have."""
    (one,), (other,) = fleet(1, device=GPU), fleet(1, device=GPU, seed=10)
    run(through([one], MB))
    run(other.load_state(run(one.state())))
    gradient = run(one.gradient(0))
    for part in (one, other):
        run(part.apply(gradient, Update(0, 0.5, skip=False)))
    assert run(one.digest()) == run(other.digest())


@pytest.mark.parametrize("checkpointing", ["always", "never"])
def test_masks_and_recomputation_are_those_of_the_cpu(fleet: Fleet, checkpointing: str) -> None:
    (there,), (here,) = fleet(1, device=GPU, checkpointing=checkpointing), fleet(1)
    run(through([there], MB))
    run(through([here], MB))
    a, b = run(there.gradient(0)), run(here.gradient(0))
    assert float((a - b).norm() / b.norm()) < 1e-3


def test_fp16_that_overflows_is_seen_and_a_smaller_scale_helps(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "FIRST", 2.0**24)
    (part,) = fleet(1, device=GPU, precision=Precision.FP16)
    finite = []
    for step in range(12):
        run(through([part], MB))
        finite.append(bool(run(part.gradient(0)).isfinite().all()))
        run(part.apply(run(part.gradient(0)), Update(step, 1.0, skip=not finite[-1])))
    assert not finite[0]
    assert finite[-1]


def test_the_probe_finds_the_gpu() -> None:
    assert pick_device("auto").type == "cuda"
    expected = Precision.BF16 if torch.cuda.get_device_capability() >= (8, 0) else Precision.FP16
    assert choose_precision(GPU) is expected
    assert 0 < free_memory(GPU) <= torch.cuda.get_device_properties(0).total_memory
    assert data(MB)[0].device.type == "cpu", "tokens come from the host"


def test_a_fleet_on_a_gpu_ends_where_the_cpu_does(tmp_path: Path) -> None:
    ended = {}
    for device in ("cpu", "cuda"):
        facts, _ = facts_of(tmp_path, f"compute.device={device}", "train.steps=6")
        events = run_fleet(facts.config, tmp_path / device)
        assert {e.device.split(":")[0] for e in events if isinstance(e, PeerJoined)} == {device}
        assert len([e for e in events if isinstance(e, StepDone)]) == 6
        ended[device] = checkpoint_weights(tmp_path / device)
    assert relative_difference(ended["cuda"], ended["cpu"]) < 1e-2


def test_results_leave_beside_the_next_microbatch_and_are_whole(fleet: Fleet) -> None:
    """Copies run on a stream of their own, through pinned memory. A gradient of several pieces contains every addition
    before it."""
    (there,), (here,) = (fleet(1, ModelSpec.from_config(LARGE), device=torch.device(d)) for d in ("cuda", "cpu"))
    assert there.n_params > 2 * PIECE

    async def several(part: TorchCompute) -> torch.Tensor:
        mbs = [Microbatch(0, index) for index in range(4)]
        await asyncio.gather(*(through([part], mb) for mb in mbs))
        return await part.gradient(0)

    found, expected = run(several(there)), run(several(here))
    assert found.device.type == "cpu"
    assert float((found - expected).norm() / expected.norm()) < 1e-3

    async def chain(device: str) -> list[torch.Tensor]:
        first, _ = fleet(2, device=torch.device(device))
        results = [await first.forward(Microbatch(0, index), data(MB)[0]) for index in range(8)]
        return [await result for result in results]  # all were computed before the first one was copied

    for a, b in zip(run(chain("cuda")), run(chain("cpu")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_compiled_blocks_follow_the_cpu(fleet: Fleet, precision: Precision) -> None:
    parts = fleet(2, device=GPU, precision=precision, compiled=True)
    for part in parts:
        assert part.compiling is not None
        assert part.compiling.error == ""
    losses, _ = reference()
    assert run(train(parts)) == pytest.approx(losses, rel=CLOSENESS[precision])


def test_inputs_and_gradients_come_ahead(fleet: Fleet) -> None:
    """Two stages' microbatches under way at once, and the same bits as one by one."""
    ahead, single = fleet(2, device=GPU, checkpointing="never"), fleet(2, device=GPU, checkpointing="never")

    async def together() -> None:
        await asyncio.gather(*(through(ahead, Microbatch(0, k)) for k in range(6)))

    run(together())
    for k in range(6):
        run(through(single, Microbatch(0, k)))
    for one, other in zip(ahead, single, strict=True):
        assert one._arrivals is not None
        a, b = run(one.gradient(0)), run(other.gradient(0))
        assert float((a - b).norm() / b.norm()) < 1e-5, "the sum's order may differ"
