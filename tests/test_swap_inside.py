"""Blocks cut inside: the same numbers in less memory than two blocks need, or one (ATOM sec. III-C)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.compute.base import Microbatch
from muletrain.compute.estimate import Offer
from muletrain.compute.profile import Conditions, part_times
from muletrain.compute.swap.chain import chain_cut, chain_of, sub_models
from muletrain.compute.swap.fit import blocks_of, fitted, swap_memory
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.errors import CapacityError
from muletrain.model.chain import Compression
from muletrain.model.make import make_stage
from muletrain.model.pieces import WHOLE, Inside, most_pieces, pieces_of
from muletrain.model.spec import ModelSpec
from muletrain.planning.swapping import places_bytes
from tests.swapped_stages import CLIP, SEQUENCES, Made, stages_in, train

from .small_stages import data, run, through
from .test_swap import MEASURE, check_same_training, states, worst

if TYPE_CHECKING:
    from muletrain.compute.estimate import SwapMemory
    from muletrain.compute.swap.swapped import SwappedCompute
    from muletrain.compute.torch_compute import TorchCompute

made = pytest.fixture(stages_in)
SPEC = ModelSpec.from_config(
    ModelConfig(layers=3, width=64, heads=8, kv_heads=4, ffn=512, vocab=61, context=16, dropout=0.2)
)
WORDY = replace(SPEC, ffn=64, vocab=2048)
"""Its largest blocks are the embedding and the head."""
ADAMW = OptimizerConfig(lr=0.001, warmup=2, clip=CLIP)
"""With ten times that rate AdamW enlarges the rounding: where a gradient is as small as that, its direction differs. Then
a resident stage that adds its three microbatches in another order differs by 2e-5 in weights and 5e-5 in moments, and
pieces by up to 4e-4; with this one, by 2e-7 and 6e-7."""
LAMB = OptimizerConfig(name="lamb", lr=0.001, warmup=2, clip=CLIP)
TOKENS = SEQUENCES * SPEC.context


def needs(spec: ModelSpec, cut: int = 1, stage: int = 0, *, tokens: int = TOKENS, lamb: bool = False) -> SwapMemory:
    return swap_memory(spec, spec.cut(cut), stage, tokens, Precision.FP32, microbatches=4, lamb=lamb, disk=True)


def one_block(spec: ModelSpec, tokens: int = TOKENS) -> int:
    """Bytes of the largest block that computes, with nothing beside it."""
    return int(max(b.load_bytes + b.work_bytes for b in blocks_of(spec, spec.cut(1), 0, tokens, Precision.FP32, 1.0)))


def check_same_few_steps(resident: list[TorchCompute], swapped: list[SwappedCompute]) -> None:
    """Losses, weights and moments after five steps, within 1e-5."""
    expected, _ = run(train(resident, 5))
    assert run(train(swapped, 5))[0] == pytest.approx(expected, rel=1e-5)
    assert worst(run(states(swapped)), run(states(resident))) <= 1e-5


# The same numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [ADAMW, LAMB], ids=["adamw", "lamb"])
@pytest.mark.parametrize("below", ["two blocks", "one block"])
def test_a_stage_trains_in_less_memory_than_its_blocks_need(made: Made, below: str, optimizer: OptimizerConfig) -> None:
    """Weights and moments of every tensor within 1e-5 after 20 steps with dropout and clipping that is hit."""
    lamb = optimizer.name == "lamb"
    budget = needs(SPEC).least - 1 if below == "two blocks" else one_block(SPEC)
    assert needs(SPEC, lamb=lamb).least > budget
    (swapped,) = made.swapped(1, SPEC, budget=budget, optimizer=optimizer)
    assert swapped.plan.runs[-1][1] > SPEC.layers + 2, "there are more pieces than blocks"
    check_same_training(made.resident(1, SPEC, optimizer=optimizer), [swapped], loss=1e-5, tensor=1e-5)


@pytest.mark.parametrize("alone", [False, True], ids=["joined", "alone"])
@pytest.mark.parametrize("spec", [SPEC, WORDY], ids=["large layers", "large vocabulary"])
def test_the_finest_pieces_give_the_same_numbers(made: Made, spec: ModelSpec, alone: bool) -> None:
    """In memory. Rows of the embedding and of the head are cut, too."""
    finest = needs(spec).finer[-1]
    (swapped,) = made.swapped(1, spec, budget=finest.least, disk=False, alone=alone, optimizer=ADAMW)
    kinds = {piece.kind for part in range(spec.layers + 2) for piece in pieces_of(spec, part, finest.inside)}
    assert kinds == (
        {"attention", "feed-forward"} if spec is SPEC else {"embedding", "attention", "feed-forward", "head"}
    )
    check_same_few_steps(made.resident(1, spec, optimizer=ADAMW), [swapped])


def test_stages_of_a_pipeline_are_cut_inside(made: Made) -> None:
    """With compressed borders: the first piece of a layer decompresses, the last one compresses."""
    plain = replace(SPEC, compression=Compression("bottleneck", 2))
    spec = plain.placed(plain.cut(3))
    budget = max(needs(spec, 3, stage).finer[-1].least for stage in range(3))
    assert all(needs(spec, 3, stage).least > budget for stage in range(3))
    resident, swapped = made.resident(3, spec, optimizer=ADAMW), made.swapped(3, spec, budget=budget, optimizer=ADAMW)
    check_same_few_steps(resident, swapped)


def test_halves_of_layers_give_the_same_bits(made: Made) -> None:
    """A layer computes its two halves in turn anyway; only what is cut into slices is summed in another order."""
    halves = next(cut for cut in needs(SPEC).finer if (cut.inside.attention, cut.inside.ffn) == (1, 1))
    resident, swapped = made.resident(1, SPEC), made.swapped(1, SPEC, budget=halves.least, most=1)
    run(train(resident, 3))
    run(train(swapped, 3))
    assert run(swapped[0].digest()) == run(resident[0].digest())


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_pieces_in_16_bits(made: Made, precision: Precision) -> None:
    """Between pieces, sums are in fp32."""
    need = swap_memory(WORDY, WORDY.cut(1), 0, TOKENS, precision, microbatches=4, lamb=False, disk=True)
    resident = made.resident(1, WORDY, precision=precision, optimizer=ADAMW)
    budget = next(cut.least for cut in need.finer if min(cut.inside) > 1)
    swapped = made.swapped(1, WORDY, budget=budget, precision=precision, optimizer=ADAMW)
    expected, _ = run(train(resident, 3))
    assert run(train(swapped, 3))[0] == pytest.approx(expected, rel=0.02)
    weights = {n: t for n, t in run(states(resident)).items() if n.startswith("model/")}
    assert worst({n: t for n, t in run(states(swapped)).items() if n in weights}, weights) <= 0.02


def test_logits_of_a_slice_are_computed_in_chunks(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out targets may be missing; those of a slice's first and last row are not."""
    x, targets = data(Microbatch(0, 0))
    targets[0, :4] = torch.tensor([0, WORDY.vocab - 1, WORDY.vocab, WORDY.vocab // 3])
    heldout = Microbatch(0, 0, heldout=True)
    (resident,), (swapped,) = made.resident(1, WORDY), made.swapped(1, WORDY, budget=needs(WORDY).finer[-1].least)
    expected = run(resident.loss_backward(heldout, x, targets, accumulate=False))[0]
    assert run(swapped.loss_backward(heldout, x, targets, accumulate=False))[0] == pytest.approx(expected, rel=1e-6)
    run(through([resident], Microbatch(0, 1)))
    monkeypatch.setattr("muletrain.model.pieces.LOSS_CHUNK", 12 * 64 * 5)
    assert all(piece.loss_tokens < TOKENS for piece in pieces_of(WORDY, WORDY.layers + 1, Inside(head=4)))
    run(through([swapped], Microbatch(0, 1)))
    gradient = run(resident.gradient(0))
    assert float((run(swapped.gradient(0)) - gradient).norm()) <= 1e-6 * float(gradient.norm())


# What is cut ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [Inside(2, 1, 1, 3), Inside(3, 3, 5, 2), most_pieces(SPEC)])
def test_pieces_have_each_number_of_a_block_once(inside: Inside) -> None:
    """As places in the stage's flat buffer, and as the plan counts them."""
    cut = SPEC.cut(1)
    chain, layout = chain_of(SPEC, cut, 0, inside), make_stage(SPEC, 0, cut).layout()
    flat = torch.arange(layout.size, dtype=torch.float32)
    runs = tuple((i, min(i + 2, len(chain))) for i in range(0, len(chain), 2))
    for models in (sub_models(chain, runs, layout), sub_models(chain, ((0, len(chain)),), layout)):
        seen = torch.zeros(layout.size)
        for model in models:
            weights = torch.zeros(model.size)
            for part in model.pieces(40):
                part.own(weights).copy_(part.of(flat))
                part.of(seen).add_(1)
            model.bind(weights, {})
            for block in model.blocks:
                whole = layout.views(flat)
                for name, parameter in block.named_parameters():
                    dimension, first, _ = block.slices.get(name, (0, 0, 0))
                    assert torch.equal(parameter, whole[name].narrow(dimension, first, parameter.shape[dimension]))
        assert torch.equal(seen, torch.ones(layout.size))
    blocks = blocks_of(SPEC, cut, 0, TOKENS, Precision.FP32, 1e9, inside=inside)
    assert [int(block.load_bytes) // 4 for block in blocks] == [sum(p.numel() for p in m.parameters()) for m in chain]
    whole_s = sum(block.forward_s for block in blocks_of(SPEC, cut, 0, TOKENS, Precision.FP32, 1e9))
    assert sum(block.forward_s for block in blocks) == pytest.approx(whole_s)


def test_blocks_are_cut_only_where_they_do_not_fit() -> None:
    need = needs(SPEC)
    assert need.at(Offer(need.least)) is need
    levels = [need.least, *(cut.least for cut in need.finer)]
    assert levels == sorted(levels, reverse=True)
    for cut, above in zip(need.finer, levels, strict=False):
        for device in (cut.least, above - 1):
            assert need.at(Offer(device)).inside == cut.inside, "no finer than it must be"
        blocks = blocks_of(SPEC, SPEC.cut(1), 0, TOKENS, Precision.FP32, 1e9, inside=cut.inside)
        alone = tuple((i, i + 1) for i in range(len(blocks)))
        assert cut.least == need.beside + int(places_bytes(blocks, alone)), "a shortened stage stands for it"
        assert cut.between == 4 * int(sum(block.cut_bytes for block in blocks[:-1]))
        fitted(blocks, need.at(Offer(cut.least)), Offer(cut.least), 1e9, 4)
    shared = needs(replace(SPEC, share_layers=True))
    assert shared.finer == ()


def test_what_is_too_small_for_the_finest_pieces_is_told() -> None:
    need = needs(SPEC)
    with pytest.raises(CapacityError, match=r"the largest piece of its blocks, which are cut.*512 KiB may be used"):
        fitted([], need, Offer(1 << 19), 1e9, 4)


def test_a_piece_of_each_kind_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole block may not fit (ATOM sec. III-D)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("muletrain.compute.profile.QUICK_S", 0.01)
    at, inside = Conditions(2, torch.device("cpu"), Precision.FP32), Inside(1, 2, 3, 2)
    times = part_times(SPEC, at, inside)
    assert times.keys() == {0, "attention", "feed-forward", "head"}
    assert part_times(SPEC, at, WHOLE).keys() == {*range(SPEC.layers + 2)}
    assert part_times(SPEC, at, inside) == times, "kept"
    blocks = blocks_of(SPEC, SPEC.cut(1), 0, TOKENS, Precision.FP32, 1.0, times, inside)
    assert [b.forward_s for b in blocks[1:6]] == [
        TOKENS * times[k][0] for k in ["attention"] * 2 + ["feed-forward"] * 3
    ]


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize("share", [0.9, 0.45], ids=["below one block", "half of a block"])
def test_it_needs_less_memory_than_one_block(tmp_path: Path, share: float) -> None:
    """Counted by the kernel. Whole blocks, two at a time, need more, so the count can fail."""
    spec = replace(SPEC, layers=3, width=512, ffn=4096, context=64, vocab=512)
    tokens = SEQUENCES * spec.context
    budget = int(share * one_block(spec, tokens))

    def measured(budget: int) -> tuple[int, int]:
        command = [sys.executable, "-c", MEASURE, spec.to_json(), str(budget), str(tmp_path / str(budget)), "swapped"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stderr
        peak, runs = ran.stdout.split()
        return int(peak), int(runs)

    peak, runs = measured(budget)
    assert runs > spec.layers + 2
    assert peak <= 1.1 * budget, (peak, budget)
    if share < 0.5:
        assert measured(needs(spec, tokens=tokens).least)[0] > 1.5 * budget


# ATOM's workload ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("card", [8, 11, 32], ids=["GTX 1080", "GTX 1080 Ti", "V100"])
def test_gpt3_175b_passes_through_the_cards_of_atom(card: int, precision: Precision) -> None:
    """Sec. V-A: one sequence of 2,048 tokens. Whole blocks need 29.8 GiB in fp32, and 18.9 in 16 bits."""
    spec = ModelSpec.from_config(ModelConfig(preset="gpt3-175b"))
    cut, offer, tokens = spec.cut(1), Offer(card * 10**9, 1 << 46), spec.context
    need = swap_memory(spec, cut, 0, tokens, precision, microbatches=4, lamb=False, disk=False)
    assert need.least / 2**30 == pytest.approx(29.8 if precision is Precision.FP32 else 18.9, abs=0.1)
    assert need.fits(offer)
    own = need.at(offer)
    blocks = blocks_of(spec, cut, 0, tokens, precision, 1e13, inside=own.inside)
    found = fitted(blocks, own, offer, 12e9, 4)
    size = 4 if precision is Precision.FP32 else 2
    models = [blocks[a:b] for a, b in found.runs]
    loads = [sum(b.load_bytes for b in m) for m in models]
    turns = [load for n, load in enumerate(loads) if n not in found.kept]
    lines = {
        "two sub-models that take turns": max([*turns, *(a + b for a, b in pairwise(turns))]),
        "sub-models that stay": sum(loads[n] for n in found.kept),
        "summed gradient": max(sum(b.sum_bytes for b in m) for m in models),
        "gradient and graph of one": max(sum(b.work_bytes - b.sum_bytes for b in m) for m in models),
        "what passes, and windows": own.beside,
    }
    assert sum(lines.values()) <= offer.device, lines
    assert found.device_bytes + own.beside == pytest.approx(sum(lines.values()))
    assert sum(b.load_bytes for b in blocks) == size * spec.params, "no number is missing"
    shown = " | ".join(f"{n / 2**30:.1f}" for n in (*lines.values(), sum(lines.values())))
    row = f"| {card} GB, {precision.value} | {str(own.inside) or 'whole blocks'} | {shown} |"
    assert row in (Path(__file__).parents[1] / "docs" / "swap.md").read_text("utf-8")


def test_the_chain_of_pieces_follows_the_blocks() -> None:
    """One name for each unit, in order."""
    _, own = chain_cut(SPEC, SPEC.cut(1), 0)
    units = [piece for part in own for piece in pieces_of(SPEC, part, Inside(2, 1, 2, 2))]
    assert [unit.passed for unit in units] == [65, 64, *[64, 128, 64] * SPEC.layers, 66, 64]
    assert [unit.enters for unit in units[1:]] == [unit.passed for unit in units[:-1]]
