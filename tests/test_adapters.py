"""Adapters: those of peft, trained as by a plain loop of peft, in its folders."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bitsandbytes import functional as bnb
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from muletrain.cli.actions.opening import prepare
from muletrain.cli.show.summary import summary_table
from muletrain.config.load import load_config
from muletrain.data.chat import resolved
from muletrain.data.tokens import TokenCache
from muletrain.errors import CheckpointError, ConfigError, DataError
from muletrain.events import StepDone
from muletrain.model.make import load_model, make_stage
from muletrain.model.traced import export, making
from muletrain.model.traced.adapter import check_tensors, merged, write_adapter
from muletrain.model.traced.apart import LENGTHS
from muletrain.model.traced.architecture import build
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.folder import with_adapter
from muletrain.runs.assemble import RunFacts, initial_weights, resolve_start
from muletrain.runs.base import weights_of
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.folder import latest_checkpoint
from muletrain.runs.pretrained import Pretrained
from muletrain.runs.summary import summary_of

from .chats import SMOLLM_3, chat_tokenizer, chats, write_rows
from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly
from .test_equivalence import relative_difference
from .test_survival import command
from .traced_models import NO_DROPOUT, new_model

if TYPE_CHECKING:
    from muletrain.events import Event
    from muletrain.model.dropout import Masks
    from muletrain.runs.fleet import LocalFleet

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User", "Runtime")]  # of peft
VOCAB = 400
EXACT = [
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "compute.precision=fp32",
    "compute.threads=1",
    "model.context=48",
    "train.steps=20",
    "train.batch=8",
    "train.microbatch=2",
    "optimizer.warmup=5",
    "optimizer.lr=5e-3",
    "optimizer.clip=0.5",
    "adapter.rank=4",
]


def base_of(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model's folder with a tokenizer that has a chat template. ``name`` may end with '-tied'."""
    chat_tokenizer(folder, SMOLLM_3, VOCAB)
    kept: dict[str, Any] = {**NO_DROPOUT} if name == "gpt2" else {}
    if name.endswith("-tied"):
        kept["tie_word_embeddings"] = True
    model = new_model(
        name.removesuffix("-tied"), vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=0, **kept
    )
    model.to(dtype).save_pretrained(folder)
    return folder


def facts_of(tmp_path: Path, name: str, *overrides: str) -> tuple[RunFacts, TokenCache]:
    base = tmp_path / "base" if (tmp_path / "base").exists() else base_of(tmp_path / "base", name)
    data = f"data.path={write_rows(tmp_path / 'chat.jsonl', chats(60, silent=True))}"
    asked = [*EXACT, f"model.from={base}", data, f"data.cache={tmp_path / 'cache'}", *overrides]
    config = resolve_start(load_config(None, asked))
    facts = RunFacts.of(config.model_copy(update={"data": resolved(config.data)}))
    cache = facts.data()
    assert isinstance(cache, TokenCache)
    return facts, cache


def first_of(facts: RunFacts) -> dict[str, Tensor]:
    """The first weights of the run's adapter."""
    whole = RunFacts(facts.config, facts.spec, ((0, facts.spec.layers),))
    load = initial_weights(whole, 0)
    assert load is not None
    return {name: load(name) for name in make_stage(facts.spec, None, whole.cut).shapes()}


class Peft(nn.Module):
    """The same model and adapter, made by peft alone, with the run's first weights of the adapter."""

    def __init__(self, facts: RunFacts, base: Path) -> None:
        super().__init__()
        a = facts.config.adapter
        targets = a.targets if isinstance(a.targets, str) else list(a.targets)
        asked = LoraConfig(
            r=a.rank,
            lora_alpha=a.alpha or 2 * a.rank,
            target_modules=targets,
            use_rslora=a.rslora,
            use_dora=a.dora,
            task_type="CAUSAL_LM",
        )
        self.peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), asked)
        first = first_of(facts)
        for name, parameter in self.peft.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(first[name.removeprefix("base_model.model.")])
        if a.quantise != "none":
            for path, layer in self.peft.named_modules():
                if isinstance(layer, nn.Linear | Conv1D) and ".lora_" not in path and "lm_head" not in path:
                    layer.weight.data.copy_(there_and_back(layer.weight.data, a.quantise))

    def forward(self, inputs: Tensor, masks: Masks | None = None) -> Tensor:
        logits: Tensor = self.peft(input_ids=inputs).logits
        return logits


def there_and_back(weight: Tensor, kind: str) -> Tensor:
    """fp32, after ``bitsandbytes`` made codes of it, and numbers of these."""
    if kind == "nf4":
        found: Tensor = bnb.dequantize_4bit(*bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4"))
        return found
    whole: Tensor = bnb.dequantize_blockwise(
        *bnb.quantize_blockwise(weight, code=bnb.create_linear_map(), blocksize=64)
    )
    return whole


def own(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("peft.base_model.model."): w for name, w in weights.items() if ".lora_" in name}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama-linear", ()),
        ("gpt2", ("adapter.rslora=true", "adapter.alpha=3")),
        pytest.param("qwen3", ('adapter.targets=["q_proj", "v_proj"]',)),
        pytest.param("qwen3-moe", ('adapter.targets=["q_proj", "k_proj", "v_proj", "o_proj"]',)),
        ("qwen3-moe", ()),
        ("gpt2", ("adapter.dora=true",)),
        ("llama-linear", ("adapter.dora=true", "adapter.rslora=true")),
        ("qwen3-tied", ()),
        ("llama-linear", ("adapter.quantise=nf4",)),
        ("gpt2", ("adapter.quantise=int8",)),
        ("qwen3", ("adapter.quantise=nf4", 'adapter.targets=["q_proj", "v_proj"]', "adapter.dora=true")),
    ],
)
def test_a_fleet_trains_an_adapter_as_peft_does_though_a_peer_is_killed(
    tmp_path: Path, name: str, overrides: tuple[str, ...]
) -> None:
    """20 steps, fp32, 2 stages x 2 peers, conversations: adapters within 1e-5 of a plain loop of peft, the base the same
    bits."""
    kind = torch.float32 if name == "gpt2" else torch.bfloat16
    base_of(tmp_path / "base", name, kind)
    facts, cache = facts_of(tmp_path, name, *overrides)
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache), Peft(facts, tmp_path / "base"))
    killed: list[Event] = []

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 7 and not killed:
            os.killpg(fleet.pid("peer-3"), signal.SIGKILL)
            killed.append(event)

    events = run_fleet(facts.config, tmp_path / "run", watch=watch, lost=frozenset({"peer-3"}))
    assert killed
    found, first = checkpoint_weights(tmp_path / "run"), first_of(facts)
    assert relative_difference(own(found), own(expected)) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    assert found.keys() == first.keys(), "the base is in no checkpoint"
    trained, cut = sum(w.numel() for w in first.values()), facts.cut
    assert sum(facts.spec.trained_params(cut, s) for s in range(len(cut))) == trained < 0.5 * facts.spec.params
    assert sum(facts.spec.stage_params(cut, s) for s in range(len(cut))) == trained
    assert facts.spec.base_size == kind.itemsize
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    base = weights_of(facts.config, facts.spec)
    assert all(torch.equal(base[name].float(), value) for name, value in plain.named_parameters() if name in base)
    assert {w.dtype for w in base.values() if w.ndim > 1} == {kind}


@pytest.mark.parametrize(
    ("strategy", "dora", "name", "steps"),
    [
        ("hub", "false", "llama-linear", 20),
        ("swap", "false", "llama-linear", 20),
        ("swap", "true", "llama-linear", 6),
        ("swap", "false", "qwen3-tied", 6),
        ("hub", "false", "nf4", 6),
    ],
)
def test_clients_and_swapped_stages_train_adapters(
    tmp_path: Path, strategy: str, dora: str, name: str, steps: int
) -> None:
    profile = tmp_path / "fleet.toml"
    profile.write_text('[[machines]]\nname = "home"\ncount = 8\n[pacing]\nforward_ms = 40.0\nbackward_ms = 80.0\n')
    hub = ("hub.clients=2", "train.microbatch=4", f"fleet.profile={profile}")
    swap = ("swap.whole=true", "fleet.stages=1", "fleet.peers=2")
    asked = (*(hub if strategy == "hub" else swap), f"adapter.dora={dora}", f"train.steps={steps}")
    if name == "nf4":
        name, asked = "llama-linear", (*asked, "adapter.quantise=nf4")
    facts, cache = facts_of(tmp_path, name, *asked)
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache), Peft(facts, tmp_path / "base"))
    small = {"each": lambda name: {"memory_gib": 0.002}} if strategy == "swap" else {}
    events = run_fleet(facts.config, tmp_path / "run", **small)  # type: ignore[arg-type]
    assert relative_difference(own(checkpoint_weights(tmp_path / "run")), own(expected)) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)


def muletrain(where: Path, *arguments: str) -> str:
    """What the command prints."""
    done = subprocess.run(command(*arguments, settings=[]), cwd=where, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "dora", "quantise"),
    [("qwen2", False, "none"), ("qwen2", True, "none"), ("gpt2", True, "none"), ("qwen2", False, "nf4")],
)
def test_from_the_command_line_to_peft_and_back(tmp_path: Path, name: str, dora: bool, quantise: str) -> None:
    """Train, export as an adapter and merged, open both with peft and transformers, and train the adapter further. Beside
    a quantised base, too, the checkpoint and both exports are of the exact base."""
    base = base_of(tmp_path / "base", name)
    data = write_rows(tmp_path / "chat.jsonl", chats(60))
    asked = [
        "--set",
        f"model.from={base}",
        "--set",
        f"data.path={data}",
        "--set",
        "adapter.rank=4",
        "--set",
        f"adapter.dora={str(dora).lower()}",
        "--set",
        f"adapter.quantise={quantise}",
        "--set",
        "train.steps=3",
    ]
    asked += [
        "--set",
        "model.context=48",
        "--set",
        "fleet.stages=1",
        "--set",
        "fleet.peers=1",
        "--set",
        "optimizer.lr=0.01",
    ]
    muletrain(tmp_path, "run", *asked)
    run = next((tmp_path / "runs").glob("*-run"))
    for folder, more in (("adapter", ()), ("whole", ("--merge",))):
        muletrain(tmp_path, "export", str(run), "--hf", folder, *more)
    checkpoint = Checkpoint.open(latest_checkpoint(run))
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = load_model(checkpoint.spec, checkpoint.weights())(tokens)
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        before = plain(tokens).logits
        peft = PeftModel.from_pretrained(plain, tmp_path / "adapter")(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)(tokens).logits
    assert not torch.allclose(before, ours, atol=1e-3), "it has learned something"
    torch.testing.assert_close(peft, ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, ours, rtol=1e-4, atol=1e-4)
    for folder in ("adapter", "whole"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).chat_template == SMOLLM_3
    found = Pretrained.of(str(tmp_path / "adapter")).model()
    torch.testing.assert_close(found(tokens), ours, rtol=1e-4, atol=1e-4)
    facts, _ = facts_of(tmp_path, name, "adapter.rank=none", f"adapter.from={tmp_path / 'adapter'}")
    assert (facts.config.adapter.rank, facts.config.adapter.dora) == (4, dora)
    assert isinstance(facts.spec, TracedModel)
    check_tensors(tmp_path / "adapter", facts.spec)
    again = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = dict(PeftModel.from_pretrained(again, tmp_path / "adapter").named_parameters())
    further = own(first_of(facts))
    assert any("magnitude" in name for name in further) == dora
    for each, weight in further.items():
        assert torch.equal(weight, theirs["base_model.model." + each])
    for where in (str(run), "adapter", "whole"):
        assert "What is" not in muletrain(tmp_path, "generate", where, "What is 2 plus 2?", "--tokens", "4"), where


def test_an_adapter_is_prepared_by_two_traces_and_a_mistake_in_the_data_found_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the small copy that tells whether conversations can be kept apart, and of the chain that the run computes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base, data = base_of(tmp_path / "base", "qwen2"), write_rows(tmp_path / "chat.jsonl", chats(60))
    contexts, trace = list[int](), export.trace

    def traced(module: nn.Module, context: int, *given: Any, **named: Any) -> Any:
        contexts.append(context)
        return trace(module, context, *given, **named)

    monkeypatch.setattr(export, "trace", traced)
    for known in (making.made, making.outlined, making.shapes_of, making.computing):
        known.cache_clear()  # type: ignore[attr-defined]
    asked = [*EXACT, f"model.from={base}", "adapter.rank=4", "model.context=56"]
    with pytest.raises(DataError, match="no such file"):
        prepare(load_config(None, [*asked, f"data.path={tmp_path}/none.jsonl"]))
    assert contexts == []
    config, facts, _ = prepare(load_config(None, [*asked, f"data.path={data}"]))
    assert contexts == [sum(LENGTHS), 56]
    assert isinstance(facts.spec, TracedModel)
    assert (config.model.attention, config.model.chain) == ("conversation", facts.spec.chain_name)
    for spec in (facts.spec, with_adapter(facts.spec, None)):
        assert making._shapes(making._built(spec, torch.float32)[0]) == dict(spec.outline.shapes)


def test_a_run_on_conversations_goes_on_when_its_model_has_moved(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "qwen2", torch.bfloat16)
    data = write_rows(tmp_path / "chat.jsonl", chats(60))
    settings = [f"model.from={base}", f"data.path={data}", "adapter.rank=4", "train.steps=2", "model.context=48"]
    settings += ["fleet.stages=1", "fleet.peers=1", "train.batch=4"]
    muletrain(tmp_path, "run", *(word for text in settings for word in ("--set", text)))
    run = next((tmp_path / "runs").glob("*-run"))

    def resume(*settings: str) -> subprocess.CompletedProcess[str]:
        words = [word for text in settings for word in ("--set", text)]
        asked = command("run", "--resume", str(run), *words, settings=[])
        return subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=200)

    done = resume("train.steps=3")
    assert done.returncode == 0, done.stderr
    measured = json.loads(muletrain(tmp_path, "eval", str(run), "--json"))["loss"]
    written = muletrain(tmp_path, "generate", str(run), "What is 2 plus 2?", "--tokens", "4")
    moved = base.rename(tmp_path / "moved")
    assert json.loads(muletrain(tmp_path, "eval", str(run), "--source", str(moved), "--json"))["loss"] == measured
    assert (
        muletrain(tmp_path, "generate", str(run), "What is 2 plus 2?", "--tokens", "4", "--source", str(moved))
        == written
    )
    assert "--set model.from=FOLDER if a run's moved" in resume("train.steps=4").stderr
    base_of(base, "qwen2", torch.bfloat16)
    weights = load_file(base / "model.safetensors")
    save_file({n: w + 1 for n, w in weights.items()}, base / "model.safetensors", metadata={"format": "pt"})
    said = resume("train.steps=4").stderr
    assert f"{base} has other weights than the model that the adapter was trained with" in said
    done = resume("train.steps=4", f"model.from={moved}")
    assert done.returncode == 0, done.stderr
    assert Checkpoint.open(run).step == 4


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (['adapter.targets=["nothing"]'], r"adapter.targets: \['nothing'\]: Target modules .* not found"),
        (["adapter.rank=100"], r"adapter.rank: 100, but .* has a side of \d+; take a smaller rank"),
        (["adapter.rank=none", "adapter.alpha=3"], r"adapter.alpha: 3.0 has no effect without adapter.rank"),
        (["adapter.rank=none", "adapter.quantise=nf4"], r"adapter.quantise: 'nf4' has no effect without adapter.rank"),
        (
            ["adapter.quantise=nf4", "swap.whole=true", "fleet.stages=1"],
            r"swap.whole: with adapter.quantise = 'nf4'.*use adapter.quantise = 'none', or stages",
        ),
        (["adapter.rank=none", "adapter.from=nowhere"], r"adapter.from: .*nowhere holds no adapter of peft"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, overrides: list[str], why: str) -> None:
    base_of(tmp_path / "base", "qwen2")
    with pytest.raises((ConfigError, CheckpointError), match=why):
        facts_of(tmp_path, "qwen2", *overrides)


def test_tied_weights_beside_an_adapter_bind_no_stages(tmp_path: Path) -> None:
    facts, _ = facts_of(tmp_path, "qwen2-tied", "fleet.stages=3")
    assert {name: found.parts for name, found in facts.spec.tied.items()} == {"model.embed_tokens.weight": (0, 4)}
    assert all("model.embed_tokens.weight" in facts.spec.base_in(part) for part in (0, 4))
    assert facts.plan().tied is None, "no gradients to add"
    assert facts.spec.most_stages == 3


@pytest.mark.parametrize("setting", ["adapter.dropout=0.1", "adapter.dora=true"])
def test_experts_that_are_one_tensor_take_an_adapter_without_dropout_and_dora(tmp_path: Path, setting: str) -> None:
    """The fused projection has the rank of both of its matrices, as peft has it."""
    base_of(tmp_path / "base", "qwen3-moe")
    facts, _ = facts_of(tmp_path, "qwen3-moe")
    shapes = {n: s for n, s in facts.spec.shapes.items() if "layers.0.mlp" in n and ".lora_A." in n}
    assert {n.removeprefix("model.layers.0.mlp."): s for n, s in shapes.items()} == {
        "gate.lora_A.default.weight": (4, 32),
        "experts.lora_A.default.weight": (4 * 4, 32),
        "experts.base_layer.lora_A.default.weight": (4 * 2 * 4, 32),
    }
    with pytest.raises(ConfigError, match=r"take neither dropout nor DoRA: set adapter.dropout=0"):
        facts_of(tmp_path, "qwen3-moe", setting)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "rank_pattern": {"q_proj": 2}},
        {"target_modules": ["v_proj"], "alpha_pattern": {".*1.self_attn.v_proj": 3}},
    ],
)
def test_an_adapter_of_experts_and_of_several_ranks_goes_from_peft_and_back(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Trained further, exported and merged: the same logits in peft, here, and as a whole model."""
    base_of(tmp_path / "base", "qwen3-moe", torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = get_peft_model(plain, LoraConfig(r=4, lora_alpha=5, task_type="CAUSAL_LM", **settings))
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
    facts, _ = facts_of(tmp_path, "qwen3-moe", "adapter.rank=none", f"adapter.from={tmp_path / 'theirs'}")
    spec, first = facts.spec, first_of(facts)
    assert isinstance(spec, TracedModel)
    base = weights_of(facts.config, spec)
    module = load_model(spec, {**base, **first})
    with torch.no_grad():
        torch.testing.assert_close(module(tokens), expected, rtol=1e-5, atol=1e-5)
    without = build(with_adapter(spec, None).config)
    write_adapter(tmp_path / "ours", without, spec.config["adapter"], first, str(tmp_path / "base"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        again = PeftModel.from_pretrained(plain, tmp_path / "ours")(input_ids=tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        plain.load_state_dict(merged(build(spec.config), {**base, **first}))
        whole = plain(input_ids=tokens).logits
    torch.testing.assert_close(again, expected)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_needs_a_model() -> None:
    with pytest.raises(ConfigError, match=r"belongs to a trained model; name one by model.from"):
        resolve_start(load_config(None, ["adapter.rank=4"]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers_to_transform": [1]}, "is an adapter with layers_to_transform, and only LoRA and DoRA"),
        ({"bias": "all"}, "is an adapter with bias = 'all', and only LoRA and DoRA"),
        ({"peft_type": "IA3"}, "is an adapter of the type IA3, and only LoRA and DoRA"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    folder = tmp_path / "adapter"
    LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(str(folder))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    base_of(tmp_path / "base", "qwen2")
    with pytest.raises(CheckpointError, match=why):
        facts_of(tmp_path, "qwen2", "adapter.rank=none", f"adapter.from={folder}")
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"layers_to_transform": None, "bias": "none", "peft_type": "LORA"})
    )
    facts, _ = facts_of(tmp_path, "qwen2", "adapter.rank=none", f"adapter.from={folder}")
    with pytest.raises(CheckpointError, match=r"cannot read .*adapter_model.safetensors"):
        first_of(facts)
    with pytest.raises(ConfigError, match=r"adapter.rank: 8 beside adapter.from, which has 4"):
        facts_of(tmp_path, "qwen2", "adapter.rank=8", f"adapter.from={folder}")


def test_before_a_run_people_see_rank_and_adapted_layers(tmp_path: Path) -> None:
    targets = 'adapter.targets=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]'
    facts, cache = facts_of(tmp_path, "qwen3-moe", targets, "adapter.quantise=nf4")
    found = summary_of(facts, cache, ["cpu"])
    layers = facts.spec.layers
    assert found.adapter == f"rank 4 in experts, q_proj, v_proj ({layers} of each), beside weights in nf4"
    console = Console(file=io.StringIO(), width=80)
    console.print(summary_table(found))
    assert f"adapter (LoRA): {found.adapter}" in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
