"""``SwappedCompute`` against ``TorchCompute``: the same numbers in a fraction of the memory, whatever is cancelled."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import Offer, stage_memory
from muletrain.compute.slot import Turn
from muletrain.compute.swap.fit import blocks_of, fitted, swap_memory
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.data.samples import SampleData
from muletrain.errors import CapacityError, CheckpointError, ProtocolError
from muletrain.model.spec import ModelSpec
from muletrain.model.traced.factory import first_weights
from muletrain.model.traced.stage import TABLES
from muletrain.planning.swapping import hidden, places_bytes
from tests.small_stages import SPEC, data, run, through
from tests.swapped_stages import ADAMW, LAMB, MICROBATCHES, SEQUENCES, SETUP, STEPS, Made, stages_in, train

from .test_factory import of as module_facts
from .traced_models import chain_of, new_model

made = pytest.fixture(stages_in)
LEAST = 1 << 23


@pytest.mark.parametrize("vocab", [512, 128_256])
def test_what_the_device_holds_fits_though_each_place_is_as_large_as_its_largest_use(vocab: int) -> None:
    """The head has the largest weights, and a layer of the model in 16 bits the largest graph."""
    model = ModelConfig(layers=16, width=2048, heads=32, ffn=8192, vocab=vocab, context=4096)
    spec, tokens, over = ModelSpec.from_config(model), 8192, 0
    need = swap_memory(spec, spec.cut(1), 0, tokens, Precision.BF16, microbatches=4, lamb=False)
    blocks = blocks_of(spec, spec.cut(1), 0, tokens, Precision.BF16, 5e13)
    for share in (1.0, 1.02, 1.1, 1.3, 2.0):
        room = int(share * (need.least - need.beside))
        found = fitted(blocks, need, Offer(need.beside + room, 1 << 50), 2e10, 8)
        params = [sum(b.load_bytes for b in blocks[a:e]) / 2 for a, e in found.runs]
        rest = [sum(b.work_bytes for b in blocks[a:e]) - 4 * p for (a, e), p in zip(found.runs, params, strict=True)]
        turns = [p for n, p in enumerate(params) if n not in found.kept]
        places = max([*turns, *(a + b for a, b in pairwise(turns))], default=0) + sum(params[n] for n in found.kept)
        assert 2 * places + 4 * max(params) + max(rest) == pytest.approx(found.device_bytes)
        assert found.device_bytes <= room + 1
        over += places_bytes(blocks, hidden(blocks, room, 2e10, 8).runs) > room + 1
    assert over or vocab == 512, "neighbours' own bytes would not do"


async def states(stages: list[Any]) -> dict[str, torch.Tensor]:
    return {name: t for stage in stages for name, t in (await stage.state()).items()}


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest norm of a difference over the tensor's norm."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).norm() / max(1e-30, float(e.norm()))) for n, e in expected.items())


def check_same_training(
    resident: list[TorchCompute], swapped: list[SwappedCompute], *, loss: float, tensor: float
) -> None:
    """Losses and each tensor of the states agree within these relative differences."""
    assert all(len(c.plan.runs) > 1 for c in swapped), "it is cut"
    expected, clipped = run(train(resident))
    assert clipped > STEPS // 2
    assert run(train(swapped))[0] == pytest.approx(expected, rel=loss)
    assert worst(run(states(swapped)), run(states(resident))) <= tensor
    assert swapped[0].rounds.microbatches > swapped[0].rounds.rounds, "several pass a load together"


# The same numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("optimizer", [ADAMW, LAMB], ids=["adamw", "lamb"])
def test_a_swapped_stage_trains_as_a_resident_one(made: Made, stages: int, optimizer: OptimizerConfig) -> None:
    """Weights and moments of every tensor within 1e-5 after 20 steps with dropout and clipping that is hit."""
    resident, swapped = made.resident(stages, optimizer=optimizer), made.swapped(stages, optimizer=optimizer)
    check_same_training(resident, swapped, loss=1e-4, tensor=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama-yarn", "mixtral"])
def test_a_traced_model_is_swapped(made: Made, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(new_model(name), SPEC.context)
    weights = dict(new_model(name).named_parameters())
    cut, setup = chain.cut(2), SETUP
    resident, swapped = [], []
    for s in range(2):
        source = lambda name: weights[name].detach()  # noqa: E731
        memory = swap_memory(
            chain, cut, s, SEQUENCES * chain.context, setup.precision, microbatches=4, lamb=False, disk=True
        )
        swap = Swap(Offer(memory.least), made.folder / f"traced-{s}", 4)
        resident.append(TorchCompute(chain, cut, s, setup, source))
        swapped.append(SwappedCompute(chain, cut, s, setup, swap, source))
    made.opened += [*resident, *swapped]
    assert all(len(c.plan.runs) > 1 for c in swapped), "it is cut"
    expected, clipped = run(train(resident, 6))
    assert clipped
    assert run(train(swapped, 6))[0] == pytest.approx(expected, rel=1e-4)
    assert worst(run(states(swapped)), run(states(resident))) <= 1e-5
    tables = chain._made.tables
    assert tables.of.cache_info().misses <= 2, (
        "all blocks share their tables: those of microbatches, and of the one measured"
    )
    kept = tables.of(SEQUENCES, chain.context, torch.device("cpu")).values()
    assert 0 < TABLES * sum(t.nbytes for t in kept if isinstance(t, torch.Tensor)) <= chain.tables_bytes(SEQUENCES)
    plain = swap_memory(chain, cut, 0, SEQUENCES * chain.context, setup.precision, microbatches=4, lamb=False).beside
    monkeypatch.setattr(type(chain), "tables_bytes", lambda self, sequences: 0)
    without = swap_memory(chain, cut, 0, SEQUENCES * chain.context, setup.precision, microbatches=4, lamb=False).beside
    assert plain - without >= TABLES * 4, "they are on the device beside the blocks"


@pytest.mark.parametrize("kind", ["resident", "swapped"])
def test_a_backward_whose_turn_was_refused_has_another(made: Made, kind: str) -> None:
    """The peer stood still meanwhile, and asks first whether another replica has the microbatch by now."""
    stage, mb = getattr(made, kind)(2)[0], Microbatch(0, 0)

    def refuse() -> None:
        raise ProtocolError("not now")

    async def scenario() -> None:
        output = await (await stage.forward(mb, torch.zeros(SEQUENCES, SPEC.context, dtype=torch.int64)))
        with pytest.raises(ProtocolError, match="not now"):
            await stage.backward(mb, torch.ones_like(output), Turn(0, refuse), accumulate=True)
        await stage.backward(mb, torch.ones_like(output), accumulate=True)
        await stage.gather(0)
        assert (await stage.gradient(0)).any()

    run(scenario())


@pytest.mark.parametrize("kind", ["regression", "vit"])
def test_a_module_of_samples_is_swapped(made: Made, kind: str) -> None:
    """What goes from one sub-model to the next has another shape than its samples, whose gradient nobody wants."""
    facts = module_facts(kind)
    spec, own = facts.spec, facts.data()
    assert isinstance(own, SampleData)
    inputs, targets = map(torch.from_numpy, own.batch(own.train, np.arange(SEQUENCES), spec.vocab))
    weights = first_weights(json.loads(str(facts.config.model.architecture)), 0)
    cut, source = spec.cut(1), weights.__getitem__
    memory = swap_memory(spec, cut, 0, SEQUENCES * spec.context, SETUP.precision, microbatches=4, lamb=False, disk=True)
    swapped = SwappedCompute(spec, cut, 0, SETUP, Swap(Offer(memory.least), made.folder / kind, 4), source)
    made.opened += (pair := [TorchCompute(spec, cut, 0, SETUP, source), swapped])
    assert len(swapped.plan.runs) > 1, "it is cut"
    found = [run(c.loss_backward(Microbatch(0, 0), inputs, targets, accumulate=True)) for c in pair]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[0][1] is None
    assert found[1][1] is None
    expected, own_gradient = (run(c.gradient(0)) for c in pair)
    assert float((own_gradient - expected).norm()) <= 1e-5 * float(expected.norm())


def test_weights_that_two_blocks_share_are_not_swapped(made: Made) -> None:
    chain = chain_of(new_model("gpt2", tie_word_embeddings=True), SPEC.context)
    swap = Swap(Offer(1 << 30), made.folder / "tied", 4)
    with pytest.raises(CapacityError, match=r"model\.untie=true"):
        SwappedCompute(chain, chain.cut(1), 0, SETUP, swap)


@pytest.mark.parametrize("alone", [False, True], ids=["joined", "alone"])
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
def test_microbatches_one_by_one_give_the_same_bits(made: Made, disk: bool, alone: bool) -> None:
    """Then sums are taken in the same order, and digests of replicas agree, whichever swaps."""
    resident, swapped = made.resident(2), made.swapped(2, disk=disk, most=1, alone=alone)

    async def one_by_one(stages: list[Any]) -> None:
        for step in range(4):
            for index in range(MICROBATCHES):
                await through(stages, Microbatch(step, index))
            for stage in stages:
                await stage.apply(await stage.gradient(step) / MICROBATCHES, Update(step, 0.5, skip=False))

    run(one_by_one(resident))
    run(one_by_one(swapped))
    assert [run(c.digest()) for c in swapped] == [run(c.digest()) for c in resident]


def test_an_update_from_one_gradient_gives_the_same_bits(made: Made) -> None:
    """Replicas update with the same mean: what they swap must not be seen in their weights."""
    odd = replace(SPEC, width=264, ffn=531, vocab=67)  # several windows, none of whole vectors
    for optimizer in (ADAMW, LAMB):
        pair = [*made.resident(1, odd, optimizer=optimizer), *made.swapped(1, odd, optimizer=optimizer)]
        mean = torch.randn(pair[0].n_params, generator=torch.Generator().manual_seed(1))
        for step in range(3):
            for c in pair:
                run(c.apply(mean, Update(step, 0.7, skip=step == 1)))
        assert run(pair[0].digest()) == run(pair[1].digest()), optimizer.name


def test_shared_layers_and_half_precision(made: Made) -> None:
    shared = replace(SPEC, share_layers=True)
    for spec, precision, tolerance in (
        (shared, Precision.FP32, 1e-5),
        (SPEC, Precision.BF16, 0.02),
        (SPEC, Precision.FP16, 0.02),
    ):
        resident = made.resident(2, spec, precision=precision)
        swapped = made.swapped(2, spec, precision=precision)
        expected, _ = run(train(resident, 4))
        assert run(train(swapped, 4))[0] == pytest.approx(expected, rel=tolerance)
        weights = {n: t for n, t in run(states(resident)).items() if n.startswith("model/")}
        found = {n: t for n, t in run(states(swapped)).items() if n.startswith("model/")}
        assert worst(found, weights) <= tolerance


def test_a_state_goes_from_one_kind_to_the_other(made: Made) -> None:
    resident, swapped = made.resident(1), made.swapped(1)
    run(train(resident, 3))
    before = run(states(resident))
    run(swapped[0].load_state(before))
    assert worst(run(states(swapped)), before) == 0
    (other,) = made.resident(1)
    run(other.load_state(run(states(swapped))))
    assert run(other.digest()) == run(swapped[0].digest()) == run(resident[0].digest())
    kept = run(states(swapped))
    first = {name: t.clone() for name, t in kept.items()}
    run(train(swapped, 1))
    assert worst(kept, first) == 0, "a copy does not change with the weights"
    assert worst(run(states(swapped)), first) > 0
    with pytest.raises(CheckpointError, match="another model"):
        run(swapped[0].load_state({"model/x": torch.zeros(1)}))


# Memory ---------------------------------------------------------------------------------------------------------------

MEASURE = """
import asyncio, sys, threading, time, torch
from pathlib import Path
from tests.test_swap import *
torch.set_num_threads(1)
spec, budget = ModelSpec.from_json(sys.argv[1]), int(sys.argv[2])
def anonymous():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["RssAnon"].split()[0])
small = Made(Path(sys.argv[3]) / "small")
run(train(small.resident(1), 2))  # libraries load
made, peak, over = Made(Path(sys.argv[3])), 0, False
base = anonymous()
def watch():
    global peak
    while not over:
        peak = max(peak, anonymous() - base)
        time.sleep(0.0005)
threading.Thread(target=watch, daemon=True).start()
import tests.small_stages
tests.small_stages.SPEC = spec  # of the microbatches
stages = made.resident(1, spec) if sys.argv[4] == "resident" else made.swapped(1, spec, budget=budget)
async def steps():
    for step in range(2):
        await asyncio.gather(*(through(stages, Microbatch(step, i)) for i in range(MICROBATCHES)))
        await stages[0].apply(await stages[0].gradient(step), Update(step, 0.5, skip=False))
    await stages[0].digest()
    return await stages[0].state()
state = run(steps())
over = True
print(peak, len(getattr(stages[0], "plan").runs) if sys.argv[4] != "resident" else 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_it_needs_the_memory_that_it_may_use_and_no_more(tmp_path: Path) -> None:
    """A budget of a quarter of what the stage needs otherwise; counted by the kernel. The resident stage needs several
    times as much, so the count can fail."""
    spec = ModelSpec.from_config(ModelConfig(layers=8, width=256, heads=4, vocab=512, context=64, dropout=0.1))
    need = stage_memory(spec, spec.cut(1), 0, tokens=SEQUENCES * spec.context, precision=Precision.FP32)
    budget = need.total // 4

    def measured(kind: str) -> tuple[int, int]:
        command = [sys.executable, "-c", MEASURE, spec.to_json(), str(budget), str(tmp_path / kind), kind]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stderr
        peak, runs = ran.stdout.split()
        return int(peak), int(runs)

    peak, runs = measured("swapped")
    assert runs > 1
    assert peak <= 1.1 * budget, (peak, budget)
    assert measured("resident")[0] > 1.5 * budget


def test_what_does_not_fit_is_told_with_numbers_and_a_way_out(tmp_path: Path) -> None:
    def built(offer: Offer, folder: Path | None, spec: ModelSpec = SPEC) -> None:
        SwappedCompute(spec, spec.cut(1), 0, replace(SETUP, inline=True), Swap(offer, folder, 4))

    with pytest.raises(CapacityError, match=r"largest piece of.*256 KiB may be used.*smaller train\.microbatch"):
        built(Offer(1 << 18), tmp_path / "small")
    with pytest.raises(CapacityError, match=r"beside a GPU, and 1 MiB may be used.*swap\.backing = 'disk'"):
        built(Offer(1 << 30, host=1 << 20), None)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CapacityError, match=r"swap\.folder.*name another folder"):
        built(Offer(1 << 30), blocked / "x")
    large = replace(SPEC, width=8192, ffn=1 << 16, layers=400)  # 43 TB
    with pytest.raises(CapacityError, match=r"TiB are needed.*are free.*larger disk \(swap\.folder\)"):
        built(Offer(1 << 40), tmp_path / "large", large)
    assert not list((tmp_path / "large").iterdir()), "nothing was written"


def test_what_no_correct_peer_sends_is_refused(made: Made) -> None:
    first, last = made.swapped(2)
    x, targets = data(Microbatch(0, 0))
    with pytest.raises(ProtocolError, match="inputs"):
        run(first.forward(Microbatch(0, 0), x.int()))
    with pytest.raises(ProtocolError, match="token ids"):
        run(first.forward(Microbatch(0, 0), x + SPEC.vocab))
    with pytest.raises(ProtocolError, match="targets"):
        run(last.loss_backward(Microbatch(0, 0), torch.zeros(2, 16, 32), targets[:, :3], accumulate=True))
    with pytest.raises(KeyError):
        run(first.backward(Microbatch(0, 0), torch.zeros(2, 16, 32), accumulate=True))
    with pytest.raises(ProtocolError, match="gradient"):
        run(first.apply(torch.zeros(3), Update(0, 1.0, skip=False)))


# Cancelled calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.04])
def test_a_call_counts_exactly_if_it_returned(made: Made, stages: int, after_s: float) -> None:
    """Three go together, and the middle one is cancelled at some time: before, while and after they are computed."""
    swapped, resident = made.swapped(stages), made.resident(stages)

    async def disturbed() -> list[int]:
        tasks = [asyncio.create_task(through(swapped, Microbatch(0, i))) for i in range(3)]
        await asyncio.sleep(after_s)
        tasks[1].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return [i for i, result in enumerate(ended) if not isinstance(result, BaseException)]

    async def expected(counting: list[int]) -> torch.Tensor:
        for i in counting:
            await through(resident, Microbatch(0, i))
        return torch.cat([await c.gradient(0) for c in resident])

    async def compared() -> tuple[torch.Tensor, torch.Tensor]:
        counting = await disturbed()
        assert {0, 2} <= set(counting)
        found = torch.cat([(await c.gradient(0)).clone() for c in swapped])
        if stages == 2 and len(counting) == 2:  # its later stage may have been through
            await through(resident, Microbatch(0, 1), accumulate=False)
        return found, await expected(counting)

    found, wanted = run(compared())
    if stages == 1:
        assert float((found - wanted).norm() / wanted.norm()) <= 1e-5
    first = swapped[0].n_params
    assert float((found[:first] - wanted[:first]).norm() / wanted[:first].norm()) <= 1e-5


@pytest.mark.parametrize("alone", [False, True], ids=["joined", "alone"])
def test_of_a_round_only_those_that_resumed_count(made: Made, alone: bool) -> None:
    """Cancelled when the device is through, but before its caller resumed. An earlier round of the step counts."""
    (swapped,), (resident,) = made.swapped(1, alone=alone), made.resident(1)

    async def disturbed() -> None:
        await through([swapped], Microbatch(0, 3))
        computed = swapped.arithmetic.loss

        def and_cancel(passages: Any) -> None:
            computed(passages)
            loop.call_soon_threadsafe(tasks[0].cancel)

        loop = asyncio.get_running_loop()
        swapped.arithmetic.loss = and_cancel  # type: ignore[method-assign]
        tasks = [asyncio.create_task(through([swapped], Microbatch(0, i))) for i in range(3)]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        swapped.arithmetic.loss = computed  # type: ignore[method-assign]
        assert isinstance(ended[0], asyncio.CancelledError)
        assert [type(e) for e in ended[1:]] == [float, float]

    async def compared() -> tuple[torch.Tensor, torch.Tensor]:
        await disturbed()
        for i in (1, 2, 3):
            await through([resident], Microbatch(0, i))
        return (await swapped.gradient(0)).clone(), await resident.gradient(0)

    found, wanted = run(compared())
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-5


def test_each_took_its_share_of_the_time(made: Made) -> None:
    (swapped,) = made.swapped(1)

    async def shares() -> list[float]:
        await asyncio.gather(*(through([swapped], Microbatch(0, i)) for i in range(3)))
        return [swapped.busy_s(Microbatch(0, i), 6.0) for i in range(4)]

    assert run(shares()) == [2.0, 2.0, 2.0, 6.0]
    swapped.discard(Microbatch(0, 0))
    assert swapped.busy_s(Microbatch(0, 0), 6.0) == 6.0


def test_what_a_step_left_behind_is_cleared(made: Made) -> None:
    (swapped,) = made.swapped(1)
    run(through([swapped], Microbatch(0, 0)))
    assert float(run(swapped.gradient(0)).norm()) > 0
    swapped.clear(0)
    assert float(run(swapped.gradient(0)).norm()) == 0
    swapped.add(0, torch.ones(swapped.n_params))
    swapped.add(0, torch.ones(swapped.n_params))
    assert torch.equal(run(swapped.gradient(0)), torch.full((swapped.n_params,), 2.0))
    assert run(through([swapped], Microbatch(0, 0), accumulate=False)) > 0
    assert torch.equal(run(swapped.gradient(0)), torch.full((swapped.n_params,), 2.0))
