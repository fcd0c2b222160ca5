"""Swapped stages, traced models and whole runs of every strategy on a GPU. Deselected where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.compute.estimate import stage_memory
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.events import PeerJoined, StepDone
from muletrain.model.spec import ModelSpec

from .fleet_run import checkpoint_weights, run_fleet
from .small_stages import SPEC, run
from .swapped_stages import ADAMW, LAMB, SETUP, Made, stages_in, train
from .test_equivalence import facts_of, relative_difference
from .test_swap import check_same_training, states, worst
from .traced_models import chain_of, new_model

if TYPE_CHECKING:
    from pathlib import Path

made = pytest.fixture(stages_in)
pytestmark = pytest.mark.cuda
GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("disk", "alone"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["ram", "disk", "alone", "alone on a disk"],
)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("optimizer", [ADAMW, LAMB], ids=["adamw", "lamb"])
def test_a_swapped_stage_trains_as_the_cpus_resident_one(
    made: Made, stages: int, optimizer: OptimizerConfig, disk: bool, alone: bool
) -> None:
    """Dropout, clipping that is hit, several microbatches a load."""
    resident = made.resident(stages, optimizer=optimizer)
    swapped = made.swapped(stages, optimizer=optimizer, device=GPU, disk=disk, alone=alone)
    check_same_training(resident, swapped, loss=1e-3, tensor=1e-3)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_weights_in_sixteen_bits_are_made_on_the_way(made: Made, precision: Precision) -> None:
    """Sixteen bits differ from fp32 by far more than the swapped stage from the resident one on the same device."""
    pair = (
        made.resident(1, device=GPU, precision=precision),
        made.swapped(1, device=GPU, disk=False, precision=precision),
    )
    losses = [run(train(stages, 4))[0] for stages in pair]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("disk", [False, True], ids=["ram", "disk"])
def test_the_device_holds_no_more_than_the_budget(made: Made, disk: bool) -> None:
    spec = ModelSpec.from_config(ModelConfig(layers=8, width=512, heads=8, vocab=512, context=64, dropout=0.1))
    need = stage_memory(spec, spec.cut(1), 0, tokens=SETUP.sequences * spec.context, precision=Precision.FP32)
    budget = need.total // 4
    small = made.swapped(1, device=GPU)
    run(train(small, 1))  # libraries take their workspaces, one for each thread
    small[0].close()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    swapped = made.swapped(1, spec, budget=budget, device=GPU, disk=disk)
    assert len(swapped[0].plan.runs) > 1
    run(train(swapped, 2))
    assert torch.cuda.max_memory_allocated() - before <= budget


@pytest.mark.parametrize("name", ["gpt2", "llama-yarn", "mixtral"])
def test_a_traced_model_computes_there_what_it_computes_here(made: Made, name: str) -> None:
    chain, weights = chain_of(new_model(name), SPEC.context), dict(new_model(name).named_parameters())
    ended = []
    for device in ("cpu", "cuda"):
        setup = replace(SETUP, device=torch.device(device))
        cut = chain.cut(2)
        made.opened += (stages := [TorchCompute(chain, cut, s, setup, lambda n: weights[n].detach()) for s in range(2)])
        ended.append((run(train(stages, 4))[0], run(states(stages))))
    assert ended[1][0] == pytest.approx(ended[0][0], rel=1e-3)
    assert worst(ended[1][1], ended[0][1]) <= 1e-2


SWAP = ["swap.whole=true", "fleet.stages=1", "fleet.peers=2"]
HUB = ["hub.clients=4", "train.microbatch=4"]


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        (SWAP, 0.003),
        ([*SWAP, "swap.backing=disk"], 0.003),
        (HUB, None),
        (["optimizer.delayed=true"], None),
        (["optimizer.state_device=cpu"], None),
    ],
    ids=["swap from ram", "swap from disk", "hub", "delayed updates", "optimizer beside the GPU"],
)
def test_a_run_ends_where_the_cpu_does(tmp_path: Path, settings: list[str], gib: float | None) -> None:
    ended = {}
    for device in ("cpu", "cuda"):
        facts, _ = facts_of(tmp_path, f"compute.device={device}", "train.steps=6", *settings)
        events = run_fleet(facts.config, tmp_path / device, each=lambda name: {"memory_gib": gib} if gib else {})
        joined = [e for e in events if isinstance(e, PeerJoined)]
        assert {e.device.split(":")[0] for e in joined} == {device}
        assert {e.swapped > 1 for e in joined} == {gib is not None}
        assert len([e for e in events if isinstance(e, StepDone)]) == 6
        ended[device] = checkpoint_weights(tmp_path / device)
    assert relative_difference(ended["cuda"], ended["cpu"]) < 1e-2
