"""Models that are traced: a chain cut into stages computes what ``transformers`` does, and what cannot be cut says why."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from muletrain.config.load import load_config
from muletrain.config.model_sections import ModelConfig
from muletrain.errors import CheckpointError, ConfigError
from muletrain.model.dropout import Masks
from muletrain.model.generate import generate_ids
from muletrain.model.make import load_model, make_model, make_stage, model_from_json
from muletrain.model.traced.architecture import build
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.cutting import cut
from muletrain.model.traced.export import trace
from muletrain.model.traced.folder import import_traced, load_traced, traced_in, whole_in
from muletrain.model.traced.stage import Tables, TracedStage, numbers, pack, unpack
from muletrain.runs.assemble import resolve_start
from tests.traced_models import (
    CONTEXT,
    EACH,
    NO_DROPOUT,
    STRETCHED,
    VOCAB,
    HashedDropout,
    bound,
    chain_of,
    config_of,
    new_model,
    off,
    write_folder,
    write_text,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def run(stages: list[Any], x: Tensor, masks: Masks | None = None) -> Tensor:
    for stage in stages:
        x = stage(x, masks)
    return x


@pytest.mark.parametrize("name", EACH)
def test_stages_compute_what_transformers_does(name: str) -> None:
    """Logits at every shape, one token of one sequence included; gradients; parameters counted; equal blocks shared."""
    model = new_model(name, **(NO_DROPOUT if name == "gpt2" else {}))
    chain = chain_of(model)
    stages = bound(chain, model, 2)
    for shape in [(3, 24), (1, 32), (2, 7), (1, 2), (1, 1), (4, 1)]:
        tokens = torch.randint(0, VOCAB, shape)
        expected = model(input_ids=tokens, use_cache=False).logits
        found = run(stages, tokens)
        assert off(found, expected) <= 1e-6, shape
    wanted = dict(model.named_parameters())
    names = [name for stage in stages for name in stage.shapes()]
    assert sorted(names) == sorted(wanted)
    theirs = torch.autograd.grad(expected.square().mean(), [wanted[n] for n in names])
    ours = torch.autograd.grad(found.square().mean(), [p for stage in stages for p in stage.parameters()])
    for n, a, b in zip(names, ours, theirs, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm()) + 1e-9, n
    assert chain.params == sum(p.numel() for p in model.parameters())
    assert sum(chain.stage_params(chain.cut(2), s) for s in range(2)) == chain.params
    functions = {id(part.function) for part in chain.parts[1:-1]}
    assert len(functions) == 1, "all layers have one function"


@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("name", STRETCHED)
def test_rotary_frequencies_are_those_of_the_runs_length(name: str, length: int) -> None:
    """Below the length that the source was trained with, and beyond. A text that is written has those of its own length,
    for all of its tokens: it crosses the border here."""
    model, tokens = new_model(name), torch.randint(0, VOCAB, (2, length))
    chain = chain_of(model, length)
    expected = model(input_ids=tokens, use_cache=False).logits
    assert off(run(bound(chain, model, 2), tokens), expected) <= 1e-6
    whole = load_model(chain, {n: p.detach() for n, p in model.named_parameters()})
    assert off(whole(tokens), expected) <= 1e-6
    fresh, caches = new_model(name).eval(), whole.caches()
    with torch.no_grad():
        whole(tokens[:1, :10], None, caches)
        for end in range(11, min(length, 20)):
            found = whole(tokens[:1, end - 1 : end], None, caches)[0, -1]
            assert off(found, fresh(input_ids=tokens[:1, :end], use_cache=False).logits[0, -1]) <= 1e-5


def test_rotary_embeddings_made_for_longer_texts_get_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama-dynamic")))
    assert traced_in(tmp_path, context=64).context == 64
    assert traced_in(tmp_path).context == 16
    with pytest.raises(CheckpointError, match=r"was made for 64 tokens; set model.context = 64 or less, not 65"):
        traced_in(tmp_path, context=65)


def test_rotary_settings_are_of_the_name_that_transformers_looks_at_first(tmp_path: Path) -> None:
    """A folder of version 4 that version 5 has written again has both names."""
    dynamic, plain = {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "default", "rope_theta": 10000.0}
    config = config_of("qwen2", rope_scaling=dynamic, rope_parameters=plain)
    assert CONFIG_MAPPING["qwen2"].from_dict(config).rope_parameters["rope_type"] == "dynamic"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert traced_in(tmp_path, context=128).context == 128
    with pytest.raises(CheckpointError, match="was made for 128 tokens"):
        traced_in(tmp_path, context=129)


def test_a_chain_states_its_costs() -> None:
    """FLOPs as the sizes give them; a longer sequence costs more per token; what is kept is at least what must be."""
    chain = chain_of(new_model("qwen2"))
    width, ffn, heads = 32, 64, 32 + 2 * 16
    matrices = width * heads + width * width + 3 * width * ffn
    assert chain.layers == 3
    assert chain.width == width
    assert chain.flops_of(0, 16) == pytest.approx(2 * matrices + 2 * 16 * width)
    assert chain.head_flops == pytest.approx(2 * width * VOCAB + 5 * VOCAB)
    assert chain.embedding_params == width * VOCAB
    assert chain.kept_bytes(0, 4) > 4 * (6 * width + 3 * ffn)
    assert model_from_json(chain.to_json()) == chain


def test_dropout_is_the_counter_hash_attention_included() -> None:
    """The same masks in a stage as in the whole model, and in a loop in which torch's own dropout is replaced."""
    model = new_model("gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.3).train()
    stages = bound(chain_of(model), model, 3)
    tokens, dropout = torch.randint(0, VOCAB, (4, 16)), HashedDropout()
    dropout.begin(7, 3, 1)
    with dropout.patched():
        expected = model(input_ids=tokens, use_cache=False).logits
    found = run(stages, tokens, Masks(7, 3, 1))
    assert off(found, expected) <= 1e-6
    parts = torch.cat([run(stages, tokens[k : k + 2], Masks(7, 3, 1, k)) for k in (0, 2)])
    assert torch.allclose(parts, found, atol=1e-5), "parts of a microbatch drop what the whole drops"
    assert not torch.allclose(run(stages, tokens, Masks(7, 3, 2)), found, atol=1e-2)
    plain = run(stages, tokens)
    assert torch.allclose(plain, model.eval()(input_ids=tokens, use_cache=False).logits, atol=1e-5)


def test_a_run_in_16_bits_is_traced_in_16_bits() -> None:
    model = new_model("qwen3").to(torch.bfloat16)
    stages = bound(chain_of(model), model, 2)
    tokens = torch.randint(0, VOCAB, (2, 16))
    between = stages[0](tokens)
    assert between.dtype == torch.bfloat16
    found, expected = stages[1](between.float()), model(input_ids=tokens, use_cache=False).logits
    assert off(found.float(), expected.float()) <= 0.02


class TwoStreams(torch.nn.Module):
    """Two tensors go from layer to layer, of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, 8)
        self.wide = torch.nn.ModuleList([torch.nn.Linear(12, 12) for _ in range(3)])
        self.head = torch.nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = torch.cat([x, x[..., :4] * 2], dim=-1)
        for layer in self.wide:
            y = torch.tanh(layer(y)) + y
            x = x + y[..., :8]
        out: Tensor = self.head(torch.cat([x, y[..., 8:]], dim=-1))
        return out


def test_all_values_that_live_on_travel_together() -> None:
    with torch.device("meta"):
        traced = trace(module := TwoStreams(), CONTEXT)
    chain = cut(traced, module)
    assert [len(nodes) for nodes in chain.passed] == [2, 2, 2, 3]
    real, spec = (
        TwoStreams(),
        cast("Any", SimpleNamespace(width=8 + 12 + 12, own_loss=False, borders=(), base=frozenset())),
    )
    state, tokens = dict(real.named_parameters()), torch.randint(0, VOCAB, (3, 5))
    tables = Tables(chain, {})
    stages = [TracedStage(spec, lambda _: tables, run_, traced.shapes) for run_ in ((0, 2), (2, 3), (3, 4), (4, 5))]
    for stage in stages:
        stage.bind({name: state[name].detach() for name in stage.shapes()})
    assert stages[0](tokens).shape == (3, 5, 32)
    assert torch.allclose(run(stages, tokens), real(tokens), atol=1e-6)
    values = {node.name: torch.randn(2, 5, numbers(node, 2)) for node in chain.passed[1]}
    packed = pack(list(values.values()), 24, (2, 5))
    assert packed.shape == (2, 5, 24)
    again = unpack(packed, chain.passed[1], 2)
    assert all(torch.equal(again[name], value) for name, value in values.items())


@pytest.mark.parametrize("name", [*EACH, pytest.param("bert", marks=pytest.mark.slow)])
def test_text_goes_on_as_if_every_token_were_computed_again(name: str) -> None:
    """Past a sliding window, to the end of the context; BERT has a cache for decoders only, and reads both ways."""
    model = new_model(name, **(NO_DROPOUT if name == "gpt2" else {})).eval()
    whole = load_model(chain_of(model), {n: p.detach() for n, p in model.named_parameters()})
    text = [7, 30, 99]
    found = list(generate_ids(whole, text, max_tokens=CONTEXT, temperature=0, top_k=0, seed=0))
    with torch.no_grad():
        while len(text) < CONTEXT:
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        caches = whole.caches()
        computed = [whole(torch.tensor([tokens]), None, caches).shape[1] for tokens in (text[:5], text[5:6])]
    assert found == text[3:]
    assert computed == [5, 6 if name == "bert" else 1]


def test_tied_weights_may_be_untied(tmp_path: Path) -> None:
    text = write_text(tmp_path / "mine.txt")
    model = write_folder(tmp_path / "hf", text, "qwen2", tie_word_embeddings=True)
    chain = import_traced(tmp_path / "hf", context=CONTEXT)
    assert chain.params == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(0, VOCAB, (2, 8))
    expected = model(input_ids=tokens, use_cache=False).logits
    whole = load_model(chain, {n: load_traced(tmp_path / "hf", chain)(n) for n in chain.shapes})
    assert torch.allclose(whole(tokens), expected, atol=1e-5)
    untied = import_traced(tmp_path / "hf", context=CONTEXT, untie=True)
    load = load_traced(tmp_path / "hf", untied)
    stages = [make_stage(untied, s, untied.cut(2)) for s in range(2)]
    for stage in stages:
        stage.bind({name: load(name) for name in stage.shapes()})
    assert torch.allclose(run(stages, tokens), expected, atol=1e-5), "the head begins as a copy"


def test_weights_under_older_names_are_found(tmp_path: Path) -> None:
    """GPT-2's published files lack a prefix; Mixtral's have a tensor for each expert."""
    text = write_text(tmp_path / "mine.txt")
    write_folder(tmp_path / "gpt2", text, "gpt2", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    model.transformer.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").write_text((tmp_path / "gpt2" / "config.json").read_text())
    for folder in ("gpt2", "bare"):
        chain = import_traced(tmp_path / folder, context=CONTEXT)
        load = load_traced(tmp_path / folder, chain)
        assert all(torch.equal(load(n), p) for n, p in model.named_parameters())
    experts = write_folder(tmp_path / "mixtral", text, "mixtral")
    chain = import_traced(tmp_path / "mixtral", context=CONTEXT)
    load = load_traced(tmp_path / "mixtral", chain)
    assert all(torch.equal(load(n), p) for n, p in experts.named_parameters())


def test_reading_weights_shows_no_bars_of_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They stood in the midst of what 'eval' prints. A notebook that wants them keeps them."""
    write_folder(tmp_path / "hf", write_text(tmp_path / "mine.txt"), "qwen2")
    capfd.readouterr()
    whole_in(str(tmp_path / "hf"), (tmp_path / "hf" / "config.json").read_text())
    assert capfd.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert "100%" in capfd.readouterr().err


def test_dropout_of_the_configuration_can_be_replaced(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", write_text(tmp_path / "mine.txt"), "gpt2")
    config = resolve_start(
        load_config(None, [f"model.from={tmp_path / 'hf'}", "model.context=32", "model.dropout=0.5"])
    )
    kept = json.loads(config.model.architecture or "")
    assert {kept[name] for name in NO_DROPOUT} == {0.5}
    assert resolve_start(config) == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("qwen2", auto_map={"AutoModel": "theirs.Model"}), "remote code.*without it"),
        (config_of("qwen2", quantization_config={"bits": 4}), "quantization_config.*without it"),
        (config_of("qwen2", num_hidden_layers=5000), "num_hidden_layers = 5000; at most"),
        (config_of("qwen2", num_attention_heads="many"), "cannot build|does not describe"),
        ({"model_type": "of-tomorrow"}, "transformers .* cannot build a 'of-tomorrow' model.*install"),
        ({}, "cannot build a None model"),
        ({"model_type": "vit"}, "a 'vit' model is no causal language model"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, r"model.layers.0.mlp.*draws random numbers.*switch it off"),
    ],
)
def test_what_cannot_be_traced_is_named_with_its_place(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = TracedModel(json.dumps(config_of(name, **changes)), CONTEXT).layers


class NoList(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.embedding(tokens)
        return out


class BackAndForth(TwoStreams):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = torch.cat([x, x[..., :4]], dim=-1)
        for layer in (*self.wide, self.wide[0]):
            y = torch.tanh(layer(y))
        out: Tensor = self.head(y)
        return out


class Counts(TwoStreams):
    """Its layers need to know how often a token occurs: a number for each sequence, not for each token."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y, most = torch.cat([x, x[..., :4]], dim=-1), x.amax(dim=1)
        for layer in self.wide:
            y = torch.tanh(layer(y)) * most[:, None, :1]
        out: Tensor = self.head(y)
        return out


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoList, "no list of layers"),
        (BackAndForth, "wide.0 computes after a later block did"),
        (Counts, r"only floating-point tensors \[samples, tokens, \.\.\.\] can be sent"),
    ],
)
def test_what_is_no_chain_of_blocks_is_refused(kind: type[torch.nn.Module], message: str) -> None:
    with torch.device("meta"):
        module = kind()
    with pytest.raises(ConfigError, match=message):
        cut(trace(module, CONTEXT), module)


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    write_folder(folder, write_text(tmp_path / "mine.txt"), "qwen2")

    def refused(*settings: str) -> str:
        with pytest.raises((ConfigError, CheckpointError)) as e:
            resolve_start(load_config(None, [f"model.from={folder}", *settings]))
        return str(e.value)

    assert "was made for 64 tokens; set model.context = 64 or less, not 65" in refused("model.context=65")
    assert "model.layers: 7 beside model.from" in refused("model.layers=7")
    (folder / "config.json").write_text(json.dumps(config_of("qwen2", intermediate_size=96)))
    assert "gate_proj.weight in" in (said := refused("model.context=32"))
    assert "has shape (64, 32), config.json says (96, 32)" in said
    (folder / "config.json").write_text(json.dumps(config_of("qwen2", num_hidden_layers=4)))
    assert "has no tensor model.layers.3" in refused("model.context=32")
    (folder / "model.safetensors").unlink()
    assert "has no weights as safetensors (model.safetensors or" in refused("model.context=32")


@pytest.mark.parametrize("kind", [pytest.param("qwen2", marks=pytest.mark.slow), "llama"])
def test_a_run_takes_1024_tokens_of_models_made_for_more(tmp_path: Path, kind: str) -> None:
    """An attention over 40,960 tokens takes minutes and gigabytes even of a tiny model."""
    config = config_of("qwen2", max_position_embeddings=40960) | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def context(*settings: str) -> int:
        asked = load_config(None, [f"model.from={tmp_path}", *settings])
        return resolve_start(asked, weights=False).model.context

    assert context() == 1024
    assert context("model.context=2048") == 2048


def test_another_chain_than_the_founders_is_refused() -> None:
    architecture = json.dumps(config_of("qwen2"))
    model = ModelConfig.model_validate({"architecture": architecture, "context": CONTEXT, "chain": "0123 (torch 1)"})
    with pytest.raises(ConfigError, match=r"blocks are 0123 \(torch 1\), and this machine makes .*install the same"):
        make_model(model)


def test_memory_and_cuts_are_planned_from_the_chain() -> None:
    chain = chain_of(new_model("qwen2"))
    assert [end - first for first, end in chain.cut(3)] == [1, 1, 1]
    with pytest.raises(ConfigError, match="a stage needs at least one layer"):
        chain.cut(4)
    needs = [chain.stage_kept_bytes(chain.cut(3), s, 1, 4) for s in range(3)]
    assert needs[2] > needs[0] == pytest.approx(needs[1] + 8), "the first one keeps the tokens, too"
    assert all(chain.flops_of(layer) > 0 for layer in range(chain.layers))


def test_infinity_in_a_configuration_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["mamba2"](
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=4
    )
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert build(written).config.time_step_limit == [0.0, float("inf")]
