"""Two stages that share parameters (tied weights) train as one process that has them once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.compute.base import Update
from muletrain.compute.estimate import Offer, stage_memory
from muletrain.compute.swap.fit import swap_memory
from muletrain.config.load import load_config
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Codec, Precision
from muletrain.errors import ConfigError
from muletrain.model.chain import TiedParameter
from muletrain.model.make import make_stage, tied_between
from muletrain.model.spec import ModelSpec
from muletrain.model.traced.chain import TracedModel
from muletrain.optim import tied
from muletrain.optim.tied import Tied
from muletrain.runtime.averaging.mean_gradient import MeanGradient
from muletrain.runtime.core.times import AGAIN_S
from muletrain.runtime.members.row import RoundEntry, ShardFacts, TiedEntry
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.step.record import StepRecord
from muletrain.runtime.step.tied import TiedSum
from muletrain.sim.setting import run_cost
from proofs.play import play
from proofs.scenario import Fault, Scenario
from tests.test_ledger import LINEAGE, Alive, entry
from tests.traced_models import CONTEXT, config_of, new_model

if TYPE_CHECKING:
    from collections.abc import Mapping


torch.set_num_threads(1)
GEMMA = json.dumps({**config_of("gemma3", tie_word_embeddings=True), "num_hidden_layers": 2, "vocab_size": 640})
"""Adam hardly sees how a gradient is scaled; here it differs most."""
MODEL = (f"model.architecture={json.dumps(GEMMA)}", "optimizer.clip=0.5")


# The model ------------------------------------------------------------------------------------------------------------


def test_both_stages_have_the_parameter_and_both_count_it() -> None:
    chain, alone = (TracedModel(json.dumps(config_of("qwen2", tie_word_embeddings=t)), CONTEXT) for t in (True, False))
    cut, size = chain.cut(3), chain.vocab * chain.width
    assert chain.tied == {"model.embed_tokens.weight": TiedParameter((0, 4), size)}
    assert chain.params == alone.params - size
    assert [chain.stage_params(cut, s) for s in range(3)] == [alone.stage_params(cut, s) for s in range(3)]
    assert chain.stage_params(chain.cut(1), 0) == chain.params
    assert chain.cut_params(cut) == chain.params, "each counts once, however the model is cut"
    found = tied_between(chain, cut)
    assert found is not None
    assert found.stages == (0, 2)
    for stage in found.stages:
        flat = torch.arange(found.sizes[found.stages.index(stage)], dtype=torch.float32)
        views = dict(make_stage(chain, stage, cut).shapes())
        assert found.part(flat, stage).numel() == size
        assert views["model.embed_tokens.weight"] == (chain.vocab, chain.width)
    assert tied_between(chain, chain.cut(1)) is tied_between(alone, alone.cut(3)) is None


def test_the_exchange_costs_time_bytes_and_memory_in_both_stages() -> None:
    chain, alone = (TracedModel(json.dumps(config_of("qwen2", tie_word_embeddings=t)), CONTEXT) for t in (True, False))
    cut, numbers, run = chain.cut(3), chain.vocab * chain.width, load_config(None, ["wire.gradients=fp16"])
    tied_, untied = (run_cost(run, spec, cut) for spec in (chain, alone))
    assert (tied_.tied, untied.tied) == ((0, 2), ())
    assert [stage.tied_bytes for stage in tied_.stages] == pytest.approx([2 * numbers, 0, 2 * numbers], rel=1e-3)
    for stage, more in enumerate((5 * 4 * numbers, 0, 5 * 4 * numbers)):
        own, plain = (stage_memory(spec, cut, stage, tokens=64, precision=Precision.FP32) for spec in (chain, alone))
        assert (own.total - plain.total, own.on_host - plain.on_host) == (more, more)
        swapped, plainly = (
            swap_memory(spec, cut, stage, 64, Precision.FP32, microbatches=2, lamb=False) for spec in (chain, alone)
        )
        assert swapped.on_host - plainly.on_host == more
        assert swapped.on_device(Offer(1)) - plainly.on_device(Offer(1)) == more, "a machine with one memory"


class Entangled(ModelSpec):
    """Shares parameters between many parts."""

    @property
    def tied(self) -> Mapping[str, TiedParameter]:
        return {"a": TiedParameter((0, 2), 4), "b": TiedParameter((1, 4), 4)}


def test_more_than_two_stages_that_share_are_refused() -> None:
    spec = Entangled.from_config(ModelConfig(layers=3))
    assert spec.most_stages == 1
    spec.check_cut(((0, 2), (2, 3)))
    with pytest.raises(ConfigError, match=r"b is used in stages 0, 2, and at most two stages .*model.untie"):
        spec.check_cut(((0, 1), (1, 2), (2, 3)))


def test_stages_with_copies_are_the_model() -> None:
    model = new_model("gpt2", tie_word_embeddings=True).eval()
    chain = TracedModel(json.dumps(model.config.to_dict(), sort_keys=True, default=str), CONTEXT)
    state, cut = dict(model.named_parameters()), chain.cut(3)
    x: Any = torch.randint(0, chain.vocab, (2, 8))
    expected = model(input_ids=x, use_cache=False).logits
    for stage in range(3):
        module = make_stage(chain, stage, cut)
        x = module.bind({name: state[name].detach() for name in module.shapes()})(x)
    assert torch.allclose(x, expected, atol=1e-5)


# The arithmetic -------------------------------------------------------------------------------------------------------


def test_the_product_does_not_depend_on_who_adds() -> None:
    a, b = (torch.randn(3 * tied.PIECE // 2 + 7, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    found = tied.product(a, b)
    assert found == tied.product(b, a)
    assert found == pytest.approx(float(a.double() @ b.double()), rel=1e-9)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert found == tied.product(a, b)
    torch.set_num_threads(threads)
    a[0] = float("inf")
    assert tied.product(a, b) == 0.0, "all parts that are not finite have the same content"


def test_a_part_is_found_in_pieces_and_added_in_windows() -> None:
    layout = tied.Tied((1, 3), (((2, 4), (7, 9)), ((0, 2), (5, 7))), (10, 9))
    gradient = torch.arange(10.0)
    assert layout.part(gradient, 1).tolist() == [2, 3, 7, 8]
    alone = tied.Tied((1, 3), (((2, 6),), ((0, 4),)), (10, 9)).part(gradient, 1)
    assert (alone.tolist(), alone.data_ptr()) == ([2, 3, 4, 5], gradient[2:].data_ptr()), "without a copy"
    assert layout.pieces(1, 4) == {0: 4, 4: 4, 8: 2}
    assert layout.pieces(3, 4) == {0: 4, 4: 4}
    update = Update(0, 1.0, skip=False, tied=layout.placed(torch.tensor([10.0, 20, 30, 40]), 3))
    whole = torch.zeros(9)
    update.add_tied(whole)
    assert whole.tolist() == [10, 20, 0, 0, 0, 30, 40, 0, 0]
    for size in range(1, 10):
        windows = torch.zeros(9)
        for a in range(0, 9, size):
            update.add_tied(windows[a : a + size], a)
        assert torch.equal(windows, whole)


# The record -----------------------------------------------------------------------------------------------------------


def product_of(value: float, rounds: tuple[bytes, bytes]) -> TiedEntry:
    return TiedEntry(rounds=rounds, product=value)


def test_a_record_needs_a_product_that_most_of_both_stages_state() -> None:
    world = Alive(("a",), ("b", "c"))
    builder = world.builder()
    builder.tied = (0, 1)
    entries = [entry(0, "a"), entry(1, "b", ("b", "c")), entry(1, "c", ("b", "c"))]
    for each in entries:
        builder.add(each)
    rounds = entries[0].round, entries[1].round
    assert builder.record() is None
    builder.add_tied("b", product_of(-1e9, rounds))
    builder.add_tied("a", product_of(1.0, (rounds[0], bytes(32))))
    assert builder.record() is None, "of another round"
    builder.add_tied("a", product_of(1.0, rounds))
    assert builder.record() is None, "one of three lies"
    builder.add_tied("c", product_of(1.0, rounds))
    found = builder.record()
    assert found is not None
    squares = sum(stage.square_norm for stage in found.stages)
    assert found.gradient_norm == pytest.approx((squares + 2.0) ** 0.5)
    assert found.product == 1.0


def test_two_that_state_different_products_are_no_deadlock() -> None:
    world = Alive(("a",), ("b",))
    builder = world.builder()
    builder.tied = (0, 1)
    for each in (entries := [entry(0, "a"), entry(1, "b")]):
        builder.add(each)
    rounds = entries[0].round, entries[1].round
    builder.add_tied("a", product_of(1.0, rounds))
    builder.add_tied("b", product_of(2.0, rounds))
    assert builder.record() is None
    world.now_s += AGAIN_S
    found = builder.record()
    assert found is not None
    assert found.product == 1.0


def test_another_product_is_another_history() -> None:
    world = Alive(("me",), ("b", "c"))
    claimed, told = (entry(0, "me").for_record(), entry(1, "b").for_record()), world.builder()
    told.tied = (0, 1)
    right = StepRecord(4, LINEAGE, claimed, 1.0)
    assert not told.claim("b", claimed, right.hash, 2.0)
    assert told.claim("b", claimed, right.hash, 1.0)
    assert told.record() is None, "one may lie"
    assert told.claim("c", claimed, right.hash, 1.0)
    assert told.record() == right


def test_stages_that_are_both_split_go_on() -> None:
    """Each stage's replicas hold different rounds. Those whose round does not count state no product for those that do."""
    world = Alive(("a1", "a2"), ("b1", "b2"))
    builder = world.builder()
    builder.tied = (0, 1)
    held = [
        entry(stage, name, (name,), round=bytes([k]) * 32)
        for k, (stage, name) in enumerate([(0, "a1"), (0, "a2"), (1, "b1"), (1, "b2")])
    ]
    for each in held:
        builder.add(each)
    builder.record()
    world.now_s += AGAIN_S
    assert builder.record() is None
    x, z = builder.round_of(0), builder.round_of(1)
    assert x is not None
    assert z is not None
    for own in held:
        rounds = (own.round, z.round) if own.stage == 0 else (x.round, own.round)
        builder.add_tied(own.holder, product_of(1.0, rounds))
    assert builder.record() is not None


def test_what_is_equal_makes_one_history() -> None:
    """-0.0 is equal to 0.0, and not the same bytes."""
    hashes = set()
    for order in ("ab", "ba"):
        builder = Alive(("a",), ("b",)).builder()
        builder.tied = (0, 1)
        for each in (entries := [entry(0, "a"), entry(1, "b")]):
            builder.add(each)
        for peer in order:
            rounds = entries[0].round, entries[1].round
            builder.add_tied(peer, product_of(0.0 if peer == "a" else -0.0, rounds))
        found = builder.record()
        assert found is not None
        hashes.add(found.hash)
    assert len(hashes) == 1


def test_a_product_larger_than_the_norms_allow_does_not_count() -> None:
    builder = Alive(("a",), ("b",)).builder()
    builder.tied = (0, 1)
    for each in (entries := [entry(0, "a"), entry(1, "b")]):
        builder.add(each)
    rounds = entries[0].round, entries[1].round
    builder.add_tied("a", product_of(1.0, rounds))
    builder.add_tied("b", product_of(-1e100, rounds))
    builder.record()
    cast("Any", builder.clock).now = lambda: AGAIN_S
    found = builder.record()
    assert found is not None
    assert found.product == 1.0


def test_one_that_claims_another_content_of_what_is_tied_misleads_nobody() -> None:
    told = Alive(("me",), ("b", "c")).builder()
    told.tied = (0, 1)
    right = (entry(0, "me", tied=bytes(32)).for_record(), entry(1, "b", tied=bytes(32)).for_record())
    record = StepRecord(4, LINEAGE, right, 1.0)
    assert not told.claim("b", (right[0], entry(1, "b", tied=b"x" * 32).for_record()), record.hash, 1.0)


# Worlds ---------------------------------------------------------------------------------------------------------------

WORLDS = [
    Scenario(1, (2, 2), 2, 4, 8, 0.01, (Fault(0.35, "kill", ("peer-1b",)),), overrides=MODEL),
    Scenario(2, (2, 2), 2, 4, 8, 0.01, (Fault(0.0, "kill", ("peer-1a",), on="tied", nth=2),), overrides=MODEL),
    Scenario(3, (2, 1), 2, 4, 8, 0.01, (Fault(0.0, "kill", ("peer-0b",), on="tied"),), overrides=MODEL),
    Scenario(4, (2, 2), 2, 12, 8, 0.05, (Fault(1.0, "join", ("peer-1j1",)),), overrides=MODEL),
    Scenario(5, (2, 2), 2, 4, 8, 0.01, (), overrides=(*MODEL, "optimizer.delayed=true")),
    Scenario(6, (2, 2), 2, 4, 8, 0.01, (Fault(0.3, "move", ("peer-1b",)),), overrides=(*MODEL, "optimizer.name=lamb")),
    Scenario(7, (2, 2), 2, 4, 8, 0.01, (), overrides=MODEL, swapped=("peer-0a", "peer-1b")),
]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: str(world.seed))
def test_tied_weights_are_those_of_a_single_process(world: Scenario) -> None:
    assert play(world).violations == []


def test_a_late_peer_takes_what_it_missed_from_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets both gradients of the steps that went on without it; the test could not fail if it took none."""
    right, missed = TiedSum.take_agreed, []

    async def take_agreed(self: TiedSum) -> bool:
        missed.append(not self.ready)
        return await right(self)

    monkeypatch.setattr(TiedSum, "take_agreed", take_agreed)
    assert play(WORLDS[3]).violations == []
    assert any(missed)


@pytest.mark.parametrize("bug", ["no product", "no sum"])
def test_a_planted_bug_of_tied_weights_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "no product":
        monkeypatch.setattr("muletrain.runtime.step.tied.product", lambda a, b: 0.0)
    else:
        monkeypatch.setattr(Update, "add_tied", lambda self, gradient, begin=0: None)
    assert any(play(world).violations for world in WORLDS[:2])


def test_copies_of_tied_parts_go_with_their_step() -> None:
    """The other stage asks for them in each step, and they stood in no account of memory."""
    size, limit = 4000, 60_000
    shared = Tied((0, 1), (((0, size // 2),), ((0, size // 2),)), (size, size))

    async def kept() -> tuple[int, int]:
        tasks = set[asyncio.Task[Any]]()

        async def offload(work: Any, *args: Any) -> Any:
            return work(*args)

        def spawn(work: Any, name: str) -> asyncio.Task[Any]:
            tasks.add(task := asyncio.create_task(work))
            return task

        plan = SimpleNamespace(alone=False, tied=shared, gradients=Codec.FP16)
        compute = SimpleNamespace(offload=offload, n_trained=size)
        ctx: Any = SimpleNamespace(plan=plan, compute=compute, clock=LoopClock(), spawn=spawn)
        log, gradients = GradientLog(ctx, limit), list[MeanGradient]()
        for step in range(4):
            shard = ShardFacts(content=bytes(32), square_norm=1.0, finite=True)
            about: dict[str, Any] = {"lineage": bytes(32), "step": step, "stage": 0, "round": bytes([step]) * 32}
            about |= {"members": ("a", "b"), "shards": (shard, shard), "stop": False, "leaves": (), "expelled": ()}
            gradients.append(MeanGradient(RoundEntry(**about, tied=bytes(32), holder="a"), torch.randn(size)))
            await gradients[-1].image(ctx, tied=True)
            log.follow("newcomer", 0)
            builder: Any = SimpleNamespace(step=step, lineage=bytes(32), record=object)
            log.add(builder, gradients[-1])
            while making := [task for task in tasks if not task.done()]:
                await asyncio.wait(making)
        copies = [task.result().size for g in gradients[:-1] for task in g._packed.values()]
        return sum(copies), sum(g.nbytes for g in gradients[:-1])

    held, stated = asyncio.run(kept())
    assert held == stated > 0
