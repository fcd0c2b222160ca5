"""Clients of a hub, and its servers, whose stage is larger than their device (HYBRID sec. 4.4)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch
from muletrain.compute.estimate import Offer
from muletrain.compute.swap.fit import swap_memory
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.load import load_config
from muletrain.config.schema import OptimizerConfig
from muletrain.events import ClientBegan, PeerJoined, PoolWorked, StepDone
from muletrain.runs.assemble import RunFacts

from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly
from .small_stages import SPEC, data
from .test_equivalence import check_every_microbatch_once, facts_of, relative_difference
from .test_hub_fleet import HUB, paced

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)
WHOLE = 4
SETUP = StageSetup(OptimizerConfig(), 10, seed=9, sequences=WHOLE, updates=False)


@pytest.mark.parametrize("disk", [True, False])
def test_parts_have_the_same_gradients_and_sketches_and_count_once(tmp_path: Path, disk: bool) -> None:
    """Parts computed, counted, dropped and cancelled by a swapped client and by one that holds its stage."""
    cut, weights = SPEC.cut(1), None
    tokens = WHOLE * SPEC.context
    need = swap_memory(SPEC, cut, 0, tokens, SETUP.precision, microbatches=2, lamb=False, disk=disk, client=True)
    offer = Offer(need.least, None if disk else 1 << 31)
    swapped = SwappedCompute(SPEC, cut, 0, SETUP, Swap(offer, tmp_path if disk else None, 2))
    resident = TorchCompute(SPEC, cut, 0, SETUP)
    assert swapped.parts > 1

    async def work() -> None:
        nonlocal weights
        weights = torch.randn(SPEC.params, generator=torch.Generator().manual_seed(1)) * 0.05
        for compute in (swapped, resident):
            await compute.load_weights(weights)
        both = data(Microbatch(0, 0)), data(Microbatch(0, 1))
        inputs, targets = (torch.cat(pair) for pair in zip(*both, strict=True))
        for step, counts in ((0, (True, False, True)), (1, (True, True, True))):
            parts = [Microbatch(step, 0, first, WHOLE) for first in (0, 1, 2)]
            for mb in parts:
                rows = slice(mb.first, mb.first + (2 if mb.first == 2 else 1))
                found = [
                    await c.loss_backward(mb, inputs[rows], targets[rows], accumulate=True) for c in (swapped, resident)
                ]
                assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
                sketches = [await c.part_sketch(mb, b"seed") for c in (swapped, resident)]
                torch.testing.assert_close(*map(torch.from_numpy, sketches), rtol=1e-4, atol=1e-4)
            late = Microbatch(step, 1, 0, WHOLE)
            cancelled = asyncio.ensure_future(swapped.loss_backward(late, inputs, targets, accumulate=True))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            with pytest.raises(KeyError):
                swapped.count(late)
            for mb, counted in zip(parts, counts, strict=True):
                for compute in (swapped, resident):
                    (compute.count if counted else compute.discard)(mb)
            sums = [(await c.gradient(step)).clone() for c in (swapped, resident)]
            torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-6)
            assert sums[0].norm() > 0
            for compute in (swapped, resident):
                compute.clear(step)
            assert (await swapped.gradient(step)).norm() == 0
            swapped.clear(step)

    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    finally:
        swapped.close()
        resident.close()


@pytest.mark.parametrize("who", ["clients", "all"])
def test_a_hub_whose_machines_have_a_tenth_of_the_memory_equals_one_process(tmp_path: Path, who: str) -> None:
    """fp32, 2 stages x 2 servers, 4 clients that swap, and servers that do: every tensor within 1e-5."""
    sizes = ("model.width=128", "model.layers=12", "model.dropout=0.1")
    sizes += ("train.microbatch=1", "train.batch=8", "train.steps=4", "optimizer.lr=1e-3")
    facts, cache = facts_of(tmp_path, *HUB, paced(tmp_path), *sizes)
    tenth = {
        kind: 0.1 * min(need.total for need in needs) / 2**30
        for kind, needs in (("client", facts.client_needs()), ("peer", facts.needs()))
    }
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache))

    def memory(name: str) -> dict[str, float]:
        kind = name.partition("-")[0]
        return {"memory_gib": tenth[kind]} if who == "all" or kind == "client" else {}

    events = run_fleet(facts.config, tmp_path / "run", each=memory)
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    check_every_microbatch_once(events, facts)
    assert {e.swapped > 1 for e in events if isinstance(e, ClientBegan)} == {True}
    assert {e.swapped > 1 for e in events if isinstance(e, PeerJoined)} == {who == "all"}
    worked = [e for e in events if isinstance(e, PoolWorked)]
    assert sum(c.get("parts", 0) for e in worked for c in e.clients.values()) >= 4


def test_llama_33b_in_three_stages_fits_servers_of_24_gb_and_clients_of_10() -> None:
    """HYBRID sec. 4.4: three stages, RTX 4090 as servers and RTX 3080 as clients; bytes beside the device by estimate."""
    asked = ["model.preset=llama-30b", "fleet.stages=3", "fleet.peers=3", "hub.clients=6", "compute.precision=fp16"]
    facts = RunFacts.of(load_config(None, [*asked, "train.microbatch=1", "model.context=2048"]))
    for servers, needs, device in ((True, facts.needs(), 24), (False, facts.client_needs(), 10)):
        for need in needs:
            offer = Offer(device * 10**9, 2048 << 30)
            assert not need.resident(offer)
            assert need.swapped is not None
            assert need.swapped.at(offer).on_device(offer) <= offer.device
            params = need.swapped.state / (12 if servers else 4)
            assert need.swapped.on_host < params * (100 if servers else 40)
