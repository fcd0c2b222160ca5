"""The decoder: sizes of presets, cuts, stages against the whole, dropout's masks, generation."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from muletrain.config.model_sections import ModelConfig
from muletrain.errors import ConfigError
from muletrain.model.dropout import Masks, dropout, keep_mask
from muletrain.model.generate import generate, generate_ids
from muletrain.model.presets import PRESETS
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import Stage, initial_weight
from muletrain.planning.partition import partition
from tests.decoders import tiny, tokens, trained
from tests.whole_model import build_full

if TYPE_CHECKING:
    from collections.abc import Sequence


CPU = torch.device("cpu")


def stages(spec: ModelSpec, count: int, seed: int = 0) -> list[Stage]:
    cut = spec.cut(count)
    built = [Stage(spec, index, cut) for index in range(count)]
    for stage in built:
        stage.bind({n: initial_weight(spec, n, shape, seed) for n, shape in stage.shapes().items()})
    return built


# Sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "params"),
    [
        ("gpt3-125m", 162e6),
        ("gpt3-175b", 174.6e9),
        ("llama-7b", 6.74e9),
        ("llama-13b", 13.0e9),
        ("llama-65b", 65.3e9),
        ("llama3-8b", 8.03e9),
        ("llama3-70b", 70.6e9),
    ],
)
def test_presets_have_the_published_parameter_counts(preset: str, params: float) -> None:
    """GPT-3's counts are ours with an untied head: 125M + 38.6M."""
    assert ModelSpec.from_config(ModelConfig(preset=preset)).params == pytest.approx(params, rel=0.01)


def test_fields_given_beside_a_preset_override_it() -> None:
    spec = ModelSpec.from_config(ModelConfig(preset="llama3-8b", vocab=1000, layers=2))
    assert (spec.vocab, spec.layers, spec.width, spec.kv_heads, spec.dropout) == (1000, 2, 4096, 8, 0.0)
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves(name: str) -> None:
    assert ModelSpec.from_config(ModelConfig(preset=name)).params > 1e8


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.preset.*gpt3-125m"):
        ModelSpec.from_config(ModelConfig(preset="gpt5"))
    with pytest.raises(ConfigError, match=r"model\.heads: 5 heads"):
        ModelSpec.from_config(ModelConfig(preset="llama-7b", heads=5))
    with pytest.raises(ConfigError, match=r"5 stages for model\.layers = 4"):
        tiny().cut(5)
    with pytest.raises(ConfigError, match="not a model spec"):
        ModelSpec.from_json('{"layers": 1}')


@pytest.mark.parametrize("share", [False, True])
def test_stage_params_count_what_stages_hold(share: bool) -> None:
    spec = tiny(share_layers=share, kv_heads=2)
    cut = spec.cut(3)
    for index, stage in enumerate(stages(spec, 3)):
        assert sum(p.numel() for p in stage.parameters()) == spec.stage_params(cut, index)
    assert sum(p.numel() for p in build_full(tiny(kv_heads=2), 0).parameters()) == spec.params


# The cut ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "count"), [(1, 1), (5, 1), (6, 3), (7, 3), (7, 7), (8, 4)])
@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (0.2, 2.4), (5.0, 0.0)])
def test_partition_is_as_good_as_trying_all(layers: int, count: int, first: float, last: float) -> None:
    costs = [1.0 + 0.3 * (n % 3) for n in range(layers)]

    def loads(ends: Sequence[int]) -> list[float]:
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, layers))]
        sums[0] += first
        sums[-1] += last
        return sums

    cut = partition(costs, count, first_extra=first, last_extra=last)
    assert [a for a, _ in cut] == [0, *[b for _, b in cut[:-1]]]
    assert cut[-1][1] == layers
    best = min(max(loads(ends)) for ends in itertools.combinations(range(1, layers), count - 1))
    assert max(loads([b for _, b in cut[:-1]])) == pytest.approx(best)


def test_a_large_vocabulary_relieves_the_last_stage_of_layers() -> None:
    sizes = [end - first for first, end in tiny(layers=12, vocab=2000).cut(4)]
    assert sizes[-1] < min(sizes[:-1])
    assert [end - first for first, end in tiny(layers=12, vocab=2).cut(4)] == [3, 3, 3, 3]


# Stages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_stages_compute_what_the_whole_model_computes(count: int, share: bool) -> None:
    """Same weights, outputs, gradients, with dropout on: to the last bit, for it is the same sequence of operations."""
    spec = tiny(share_layers=share, kv_heads=2)
    masks = Masks(seed=1, step=2, index=3)
    ids = tokens(spec)
    whole = build_full(spec, 7, spec.cut(count))
    expected = whole(ids, masks)
    torch.autograd.backward(_loss(expected, ids))

    x = ids
    parts = stages(spec, count, seed=7)
    for part in parts:
        x = part(x, masks)
    torch.autograd.backward(_loss(x, ids))
    assert torch.equal(x, expected)
    reference = {name: p.grad for name, p in whole.named_parameters()}
    found = {name: p.grad for part in parts for name, p in part.named_parameters()}
    assert found.keys() == reference.keys()
    for name, gradient in found.items():
        expected_gradient = reference[name]
        assert gradient is not None
        assert expected_gradient is not None
        assert torch.equal(gradient, expected_gradient), name


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    spec = tiny(width=128, heads=4)
    name = "model.layers.3.self_attn.o_proj.weight"
    weight = initial_weight(spec, name, (128, 128), 0)
    assert torch.equal(weight, initial_weight(spec, name, (128, 128), 0))
    assert not torch.equal(weight, initial_weight(spec, name, (128, 128), 1))
    assert float(weight.std()) == pytest.approx(0.02 / 8**0.5, rel=0.05)
    other = initial_weight(spec, name.replace("o_proj", "q_proj"), (128, 128), 0)
    assert float(other.std()) == pytest.approx(0.02, rel=0.05)


def test_binding_other_shapes_is_refused() -> None:
    stage = stages(tiny(), 2)[0]
    weights = {name: torch.zeros(1) for name in stage.shapes()}
    with pytest.raises(ValueError, match="shape"):
        stage.bind(weights)


# Dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_masks_keep_their_share_independently(probability: float) -> None:
    """Five standard deviations for the mean of one mask, and for the correlation of neighbours, of sites and of
    microbatches.
    """
    count = 1 << 18
    keep = keep_mask(Masks(0, 0, 0), 0, count, probability, CPU).double()
    expected = 1 - round(probability * 256) / 256
    spread = (expected * (1 - expected)) ** 0.5
    assert float(keep.mean()) == pytest.approx(expected, abs=5 * spread / count**0.5)
    others = [
        keep_mask(m, s, count, probability, CPU).double()
        for m, s in [(Masks(1, 0, 0), 0), (Masks(0, 1, 0), 0), (Masks(0, 0, 1), 0), (Masks(0, 0, 0), 1)]
    ]
    for other in (*others, keep.roll(1), keep.roll(4), keep.roll(192)):
        correlation = float(((keep - expected) * (other - expected)).mean()) / spread**2
        assert abs(correlation) < 5 / count**0.5


def test_masks_equal_the_hash_in_plain_integers() -> None:
    """Any device that wraps int32 as two's complement computes this; constants pin the function for other versions."""
    found = keep_mask(Masks(3, 1, 4), 15, 37, 0.3, CPU).tolist()
    word = (1 << 32) - 1
    state = 0
    for value in (3, 1, 4, 15):
        state = (state ^ value) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        state ^= state >> 31
    expected = []
    for element in range(37):
        h = (element // 4 * 0x9E3779B9 + (state & word)) & word
        h = (h ^ h >> 16) * 0x7FEB352D & word
        h = ((h ^ h >> 15) + (state >> 32)) * 0x846CA68B & word
        h ^= h >> 16
        expected.append(int((h >> 8 * (element % 4) & 255) >= 77))
    assert found == expected


def test_dropout_scales_by_the_exact_probability_and_gates_the_gradient() -> None:
    x = torch.full((50, 40), 3.0, requires_grad=True)
    y = dropout(x, Masks(0, 0, 0), 1, 0.1)
    torch.autograd.backward(y.sum())
    assert x.grad is not None
    assert torch.equal(y.detach(), 3 * x.grad)
    assert torch.unique(x.grad).tolist() == pytest.approx([0.0, 256 / 230])
    assert dropout(x, None, 1, 0.1) is x


def test_every_place_of_the_model_has_a_mask_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = []

    def record(x: torch.Tensor, masks: Masks | None, site: int, probability: float) -> torch.Tensor:
        sites.append(site)
        return x

    monkeypatch.setattr("muletrain.model.stage.dropout", record)
    monkeypatch.setattr("muletrain.model.stage.dropout", record)
    spec = tiny(share_layers=True)
    x = tokens(spec)
    for stage in stages(spec, 2):
        x = stage(x, Masks(0, 0, 0))
    assert sites == list(range(1 + 2 * spec.layers))


def test_dropout_is_off_outside_of_training() -> None:
    spec = tiny()
    model = build_full(spec, 0)
    ids = tokens(spec)
    assert torch.equal(model(ids), build_full(tiny(dropout=0.0), 0)(ids))
    assert not torch.equal(model(ids), model(ids, Masks(0, 0, 0)))


# At work ------------------------------------------------------------------------------------------------------------


def test_generation_with_the_cache_equals_recomputing_every_token() -> None:
    spec = tiny(kv_heads=2)
    model = trained(build_full(spec, 3))
    prompt = tokens(spec, 1, 5)[0].tolist()
    found = list(generate_ids(model, prompt, max_tokens=50, temperature=0, top_k=0, seed=0))
    expected = list(prompt)
    with torch.no_grad():
        while len(expected) < spec.context:
            expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    assert prompt + found == expected


def test_sampling_repeats_with_the_seed_and_keeps_to_top_k() -> None:
    class Letters:
        def prompt(self, text: str) -> list[int]:
            return [ord(c) % 61 for c in text]

        def continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
            return "".join(chr(65 + i) for i in ids)

    model = trained(build_full(tiny(), 3))
    texts = [generate(model, Letters(), "mule", max_tokens=12, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 12
    greedy = generate(model, Letters(), "mule", max_tokens=12, temperature=0)
    assert generate(model, Letters(), "mule", max_tokens=12, temperature=1.0, top_k=1) == greedy
    assert generate(model, Letters(), "mule", max_tokens=12, temperature=0, stops=[ord(greedy[3]) - 65]) in greedy[:3]
    with pytest.raises(ValueError, match="no tokens"):
        generate(model, Letters(), "")


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
