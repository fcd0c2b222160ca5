"""``muletrain profile``: each distinct block alone on the device, kept in a cache, and what 'plan' makes of it."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import weakref
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from muletrain.compute import profile as measuring
from muletrain.compute.profile import Conditions, alike, needed, now, profiled
from muletrain.compute.swap.fit import blocks_of
from muletrain.config.profile_file import BlockCost, Profile, read_profile
from muletrain.config.schema import ModelConfig, Precision
from muletrain.errors import CapacityError, ConfigError
from muletrain.model.chain import Compression
from muletrain.model.dropout import Masks
from muletrain.model.hf import spec_in
from muletrain.model.make import make_model, make_stage
from muletrain.model.measured import MeasuredModel, speed_of
from muletrain.runs.measure import profile as cached
from muletrain.runs.measure.profile import digest_of, measured_profile, model_named
from tests.traced_models import write_folder, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.model.chain import Model

SIZES = {"width": 64, "heads": 2, "layers": 4, "context": 64, "vocab": 512}
CPU = Conditions(2, torch.device("cpu"), Precision.FP32)


def native() -> Model:
    return make_model(ModelConfig(**SIZES))  # type: ignore[arg-type]


def traced(tmp_path: Path, name: str = "qwen3", **changes: Any) -> Model:
    write_folder(tmp_path / "hf", write_text(tmp_path / "mine.txt"), name, **changes)
    return model_named(str(tmp_path / "hf"), context=32, untie=False)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "BUDGET_S", 0.05)


@pytest.mark.parametrize("kind", ["native", "traced"])
def test_every_distinct_block_is_measured_once(kind: str, tmp_path: Path) -> None:
    model = native() if kind == "native" else traced(tmp_path)
    blocks = list(profiled(model, CPU))
    last = model.layers + 1
    assert [list(b.parts) for b in blocks] == [[0], list(range(1, last)), [last]]
    assert [b.name for b in blocks] == ["embedding", "block 0", "head"]
    params = [model.embedding_params, model.params_of(0), model.head_params]
    assert [b.parameter_bytes for b in blocks] == [4 * n for n in params]
    tokens = CPU.sequences * model.context
    for block, kept in ((blocks[1], model.kept_bytes(0, 4)), (blocks[2], model.head_kept_bytes(4))):
        assert 0.3 < block.activation_bytes / (tokens * kept) < 1.3, "near the estimate, which may be too high"
        beyond = block.activation_bytes + block.workspace_bytes
        assert beyond >= block.parameter_bytes, "all gradients of the weights are there at the end"
        assert beyond < 4 * (block.parameter_bytes + block.activation_bytes)
    assert all(b.forward_s > 0 and b.backward_s > 0 and b.load_s > 0 for b in blocks)


@pytest.mark.parametrize(
    ("model", "data"), [("wrong", "images_with_numbers"), ("partly_frozen", "images_with_numbers"), ("words", None)]
)
def test_a_users_module_is_profiled_from_its_configuration(tmp_path: Path, model: str, data: str | None) -> None:
    """Also where nothing is trained before the first block, or in a block."""
    lines = ["[model]", f'factory = "tests.own_models:{model}"']
    lines += ['arguments = {kind = "fine"}'] if model == "wrong" else []
    lines += ["vocab = 300", "context = 32"] if data is None else ["[data]", f'factory = "tests.own_models:{data}"']
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    found = model_named(str(tmp_path / "mine.toml"), context=None, untie=False)
    for precision in (Precision.FP32, Precision.BF16):
        at = Conditions(3, CPU.device, precision)
        profile = measured_profile(found, "mine.toml", at, lambda what, share: None)
        parts = profile.by_part()
        assert sum(part.parameter_bytes for part in parts) == at.dtype.itemsize * found.params
        assert len(parts) == found.layers + 2
        assert (parts[0].parameter_bytes == 0) == (model == "wrong")
        assert all(math.isfinite(MeasuredModel(found, profile).flops_of(k, 1)) for k in range(found.layers))


def test_layers_that_differ_are_measured_each(tmp_path: Path) -> None:
    """Attention over a window takes a mask, over all earlier tokens none."""
    full, window = "full_attention", "sliding_attention"
    model = traced(tmp_path, "gemma3", layer_types=[window, full, window])
    assert alike(model) == [[0], [1, 3], [2], [4]]


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["native", "traced"])
def test_the_blocks_together_take_about_what_the_whole_takes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "BUDGET_S", 1.0)
    model = make_model(ModelConfig(**{**SIZES, "width": 256, "heads": 4})) if kind == "native" else traced(tmp_path)  # type: ignore[arg-type]
    blocks = list(profiled(model, CPU))
    parts = sum(len(b.parts) * b.both_s for b in blocks)
    module = make_stage(model, None, ((0, model.layers),))
    module.bind({n: torch.randn(s) * 0.02 if len(s) > 1 else torch.ones(s) for n, s in module.shapes().items()})
    ids = torch.randint(0, model.vocab, (CPU.sequences, model.context))

    def once() -> float:
        begin = now(CPU.device)
        loss = F.cross_entropy(module(ids, Masks(0, 0, 0)).float().flatten(0, 1), ids.flatten())
        torch.autograd.grad(loss, list(module.parameters()))
        return now(CPU.device) - begin

    once()
    whole = median(once() for _ in range(20))
    assert whole / 2 < parts < 2 * whole


def test_only_one_block_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the weights of a block are copied to the device, nothing is left of those before."""
    loaded: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    right, numbers = measuring.Block.load, itertools.count()

    def watched(self: Any) -> float:
        own = self.__dict__.setdefault("number", next(numbers))
        assert [block for block, ref in loaded if block != own and ref() is not None] == []
        took_s = right(self)
        loaded.extend((own, weakref.ref(parameter)) for parameter in self._module.parameters())
        return took_s

    monkeypatch.setattr(measuring.Block, "load", watched)
    assert len(list(profiled(native(), CPU))) == 3
    assert len({block for block, _ in loaded}) == 3


def test_a_block_that_does_not_fit_is_refused_with_the_numbers() -> None:
    model = native()
    largest = max(needed(model, part[0], CPU) for part in alike(model))
    whole = 2 * 4 * model.params
    room = Conditions(2, CPU.device, CPU.precision, memory=largest)
    assert largest < whole
    assert len(list(profiled(model, room))) == 3, "a device that holds one block profiles them all"
    small = Conditions(2, CPU.device, CPU.precision, memory=largest - 1)
    with pytest.raises(CapacityError, match=r"needs about .* of 2 x 64 tokens, and .* may be used on cpu: take fewer"):
        list(profiled(model, small))


def test_a_profile_is_kept_until_what_it_depends_on_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, told = native(), []
    first = measured_profile(model, "mine", CPU, lambda what, share: told.append(share))
    assert told[-1] == 1.0
    calls: list[Conditions] = []
    right = cached.profiled

    def counted(model: Model, at: Conditions) -> Any:
        calls.append(at)
        return right(model, at)

    def measure(asked: Model = model, at: Conditions = CPU, **more: bool) -> Profile:
        return measured_profile(asked, "again", at, lambda what, share: None, **more)

    monkeypatch.setattr(cached, "profiled", counted)
    assert measure() == first.model_copy(update={"title": "again"})
    assert calls == []
    measure(again=True)
    measure(at=Conditions(1, CPU.device, CPU.precision))
    measure(make_model(ModelConfig(**{**SIZES, "layers": 3})))  # type: ignore[arg-type]
    assert len(calls) == 3
    (tmp_path / "cache" / "muletrain" / "profiles").mkdir(exist_ok=True)
    for kept in (tmp_path / "cache" / "muletrain" / "profiles").iterdir():
        kept.write_text("{")
    measure()
    assert len(calls) == 4


def test_a_llama_folder_is_the_native_decoder_that_a_run_would_train(tmp_path: Path) -> None:
    """Without weights, and with the digest of the model that 'plan' has."""
    config = {
        **{"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6},
        **{"hidden_act": "silu", "architectures": ["LlamaForCausalLM"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = model_named(str(tmp_path), context=16, untie=False)
    assert digest_of(model) == digest_of(spec_in(tmp_path, context=16))
    assert digest_of(model) != digest_of(spec_in(tmp_path, context=32))


# What 'plan' makes of it -----------------------------------------------------------------------------------------------


def invented(model: Model, *, head: float = 1.0, factor: float = 1.0) -> Profile:
    """Times of no device: 10 ms a block, ``head`` times that for the head."""
    times = [0.1, *[1.0] * model.layers, head]
    blocks = [
        BlockCost(
            first=part,
            parts=(part,),
            name=str(part),
            forward_s=factor * 0.01 * t,
            backward_s=factor * 0.03 * t,
            load_s=1e-3,
            parameter_bytes=1,
            activation_bytes=1,
            workspace_bytes=1,
        )
        for part, t in enumerate(times)
    ]
    about = {"version": 1, "model": digest_of(model), "title": "x", "device": "cpu", "precision": "fp32"}
    more = {"sequences": 2, "context": model.context, "params": model.params, "versions": {}, "passes": 3}
    return Profile.model_validate({**about, **more, "blocks": blocks})


def test_planning_takes_the_measured_times() -> None:
    model = native()
    profile = invented(model, head=3.0)
    measured, speed = MeasuredModel(model, profile), speed_of(model, profile)
    cut = ((0, 1), (1, 4))
    seconds = [3 * measured.stage_flops(cut, s) * 2 * model.context / speed for s in range(2)]
    assert seconds == pytest.approx([0.04 * 1.1, 0.04 * (3 + 3.0)])
    assert sum(seconds) == pytest.approx(profile.total_s)
    assert measured.params == model.params
    assert measured.cut(2) == ((0, 3), (3, 4)), "the head takes as long as three blocks"
    assert model.cut(2) != measured.cut(2)
    with pytest.raises(ConfigError, match="measure this model"):
        MeasuredModel(make_model(ModelConfig(**{**SIZES, "layers": 3})), profile)  # type: ignore[arg-type]


FLEET = """
[[machines]]
name = "box"
device = "cpu"
count = 2
memory_gib = 8.0
"""
MODEL = [part for name, value in SIZES.items() for part in ("--set", f"model.{name}={value}")]


def cli(*arguments: str, folder: Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "muletrain.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def plan_with(tmp_path: Path, profile: Profile, *more: str, code: int = 0) -> Any:
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "p.json").write_text(profile.model_dump_json())
    arguments = ["plan", "fleet.toml", *MODEL, "--batch", "32", "--microbatch", "2", "--stages", "2", *more]
    out = cli(*arguments, "--profile", "p.json", "--json", folder=tmp_path, code=code)
    return out if code else json.loads(out)


@pytest.mark.slow
def test_plan_predicts_with_a_profile(tmp_path: Path) -> None:
    """Twice the times, twice the seconds of compute."""
    model = native()
    fast, slow = (plan_with(tmp_path, invented(model, factor=f)) for f in (1.0, 2.0))
    for a, b in zip(fast["strategies"], slow["strategies"], strict=True):
        if not a["problem"]:
            assert b["split"]["compute_s"] == pytest.approx(2 * a["split"]["compute_s"], rel=0.1), a["strategy"]
    swarm = next(p for p in fast["strategies"] if p["strategy"] == "swarm")
    assert swarm["split"]["compute_s"] == pytest.approx(16 * 0.04 * 3.1 / 1, rel=0.25), "16 microbatches, slower stage"


@pytest.mark.slow
def test_plan_refuses_profiles_that_are_not_of_its_model_and_fleet(tmp_path: Path) -> None:
    model = native()
    right = invented(model)
    other = right.model_copy(update={"model": "0" * 32})
    assert "is not of the planned model" in plan_with(tmp_path, other, code=2)
    elsewhere = right.model_copy(update={"device": "NVIDIA T4"})
    assert "no machine of the fleet file has device = 'NVIDIA T4'; it names cpu" in plan_with(
        tmp_path, elsewhere, code=2
    )
    (tmp_path / "bad.json").write_text('{"version": 1}')
    said = cli("plan", "fleet.toml", *MODEL, "--profile", "bad.json", folder=tmp_path, code=2)
    assert "not an output of 'muletrain profile MODEL --json'" in said
    (tmp_path / "p.json").write_text(right.model_dump_json())
    (tmp_path / "fleet.toml").write_text(FLEET + "tflops = 1.0\n")
    said = cli("plan", "fleet.toml", *MODEL, "--profile", "p.json", folder=tmp_path, code=2)
    assert "the fleet file states the speed of 'box' itself" in said
    with pytest.raises(ConfigError, match="'muletrain profile MODEL --json"):
        read_profile(tmp_path / "none.json")


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_the_command_shows_draws_and_prints_a_profile_that_plan_takes(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", write_text(tmp_path / "mine.txt"), "qwen3")
    common = ["profile", "hf", "--device", "cpu", "--precision", "fp32", "--context", "32", "--sequences", "2"]
    profile = cli(*common, "--json", folder=tmp_path)
    (tmp_path / "q.json").write_text(profile)
    found = read_profile(tmp_path / "q.json")
    assert found.device == "cpu"
    assert math.isfinite(found.total_s)
    for name in ("p.png", "p.svg"):
        text = cli(*common, "--plot", name, folder=tmp_path)
        assert (tmp_path / name).stat().st_size > 1000
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:3] == ["block", "0", "3"] for row in rows)
    assert "hf on cpu fp32, 2 sequences of 32 tokens" in text
    (tmp_path / "fleet.toml").write_text(FLEET)
    of = ["--set", f"model.from={tmp_path / 'hf'}", "--set", "model.context=32"]
    plan = json.loads(cli("plan", "fleet.toml", *of, "--batch", "8", "--profile", "q.json", "--json", folder=tmp_path))
    assert plan["recommended"] is not None
    said = cli(*common[:-1], "1", "--memory", "0.0001", "--again", folder=tmp_path, code=2)
    assert "needs about" in said
    assert "--plot p.txt: the name must end in" in cli(*common, "--plot", "p.txt", folder=tmp_path, code=2)


@pytest.mark.cuda
def test_a_gpu_profiles_a_model_larger_than_what_it_may_use() -> None:
    model = make_model(ModelConfig(**{**SIZES, "layers": 24, "width": 512, "heads": 8}))  # type: ignore[arg-type]
    at = Conditions(2, torch.device("cuda", 0), Precision.FP32)
    largest = max(needed(model, part[0], at) for part in alike(model))
    before = torch.cuda.memory_allocated(at.device)
    blocks = list(profiled(model, Conditions(2, at.device, at.precision, memory=largest)))
    assert 4 * model.params > largest
    assert [len(b.parts) for b in blocks] == [1, 24, 1]
    assert all(b.load_s > 0 and b.activation_bytes + b.workspace_bytes >= b.parameter_bytes for b in blocks[1:])
    assert torch.cuda.memory_allocated(at.device) - before < largest


def test_part_times_measure_each_kind_once_and_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ATOM, sec. III-D."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = make_model(ModelConfig(layers=3, width=64, heads=2, vocab=16384, context=64))
    at, asked = Conditions(2, torch.device("cpu"), Precision.FP32), list[int]()
    quick = measuring._quick

    def watched(model: Model, part: int, at: Conditions, budget_s: float) -> measuring.BlockTimes:
        asked.append(part)
        return quick(model, part, at, 0.01)

    monkeypatch.setattr(measuring, "_quick", watched)
    first, again = measuring.part_times(model, at), measuring.part_times(model, at)
    assert asked == [0, 1, 4], "the embedding, one block, the head"
    assert first == again
    assert first[1] == first[2] == first[3]
    assert sum(first[4]) > sum(first[1]), "the head has twenty times a block's work"
    blocks = blocks_of(model, ((0, 3),), 0, 128, Precision.FP32, 1.0, first)
    assert [b.forward_s for b in blocks] == [128 * first[part][0] for part in range(5)]
    assert [b.backward_s for b in blocks] == pytest.approx([128 * sum(first[part]) for part in range(5)])
    measuring.part_times(model, replace(at, precision=Precision.BF16))
    assert asked == [0, 1, 4, 0, 1, 4]


def test_blocks_are_measured_without_the_compression_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kind of block comes after a border: its input would be narrower."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "QUICK_S", 0.01)
    window, full = "sliding_attention", "full_attention"
    plain = traced(tmp_path, "gemma3", layer_types=[window, full, window])
    placed = plain.compressed(Compression("bottleneck", 2)).placed(((0, 1), (1, 3)))
    assert digest_of(placed) == digest_of(plain)
    assert measuring.part_times(placed, CPU).keys() == set(range(5))
    assert [b.parts for b in profiled(placed, CPU)] == [b.parts for b in profiled(plain, CPU)]
