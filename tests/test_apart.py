"""Conversations that share a row are trained as if each had a row of its own, where the architecture allows it."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from muletrain.compute.checks import check_positions, check_target_values, weighed
from muletrain.config.load import load_config
from muletrain.data.chat import Template, conversation, resolved, tokens_of
from muletrain.data.encoder import Encoder
from muletrain.data.microbatch import HeldoutSource, MicrobatchSource, begins, unmarked
from muletrain.data.tokens import TokenCache
from muletrain.errors import ConfigError, ProtocolError
from muletrain.events import StepDone, Validated
from muletrain.model.chain import TensorType
from muletrain.model.loss import positions_in
from muletrain.model.make import load_model
from muletrain.model.stage import Stage
from muletrain.model.traced import apart
from muletrain.model.traced.apart import mixed_by
from muletrain.model.traced.chain import TracedModel
from muletrain.runs.assemble import RunFacts, attending, resolve_start

from .chats import chats, write_rows
from .decoders import tiny, trained
from .fleet_run import checkpoint_weights, run_fleet, run_losing_a_replica
from .reference import train_plainly
from .test_adapters import base_of
from .test_chat import facts_of as native_facts
from .test_equivalence import check_every_microbatch_once, relative_difference
from .traced_models import config_of

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.data.microbatch import IntArray
    from muletrain.events import Event
    from muletrain.model.dropout import Masks

EXACT = [
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "compute.precision=fp32",
    "compute.threads=1",
    "model.context=64",
    "train.batch=8",
    "train.microbatch=2",
    "optimizer.warmup=5",
    "optimizer.lr=5e-3",
    "optimizer.clip=0.5",
]


def short(count: int) -> list[dict[str, Any]]:
    """Conversations of which several fit into a row; some end before the assistant speaks."""
    rows = [row["messages"][:2] for row in chats(count, silent=True)]
    return [{"messages": [{**m, "content": m["content"][:24]} for m in messages]} for messages in rows]


class OneARow:
    """The microbatches of ``inner``, with a row for each conversation."""

    def __init__(self, inner: MicrobatchSource, vocab: int) -> None:
        self._inner, self._vocab = inner, vocab

    def microbatch(self, step: int, index: int) -> tuple[IntArray, IntArray]:
        inputs, targets = self._inner.microbatch(step, index)
        rows: list[tuple[IntArray, IntArray]] = []
        for x, y in zip(inputs, targets[:, :-1], strict=True):
            ends = [*(np.flatnonzero(y > self._vocab) + 1).tolist(), len(x)]
            for begin, end in zip([0, *ends], ends, strict=False):
                row = np.zeros_like(x), np.full_like(x, self._vocab)
                row[0][: end - begin], row[1][: end - begin] = x[begin:end], np.minimum(y[begin:end], self._vocab)
                rows.append(row)
        return np.stack([x for x, _ in rows]), np.stack([y for _, y in rows])


class Plain(nn.Module):
    """A model of ``transformers`` that gets no positions."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def forward(self, inputs: Tensor, masks: Masks | None = None) -> Tensor:
        logits: Tensor = self.inner(input_ids=inputs).logits
        return logits


def facts_of(tmp_path: Path, name: str, *overrides: str) -> tuple[RunFacts, TokenCache]:
    """``name``: 'native', or one of ``traced_models.ARCHITECTURES``."""
    rows, steps = short(90), ("train.steps=12", *overrides)
    if name == "native":
        facts, _ = native_facts(tmp_path, rows, "model.dropout=0", "train.microbatch=2", *steps)
        config = facts.config
    else:
        base = tmp_path / "base" if (tmp_path / "base").exists() else base_of(tmp_path / "base", name)
        data = [f"data.path={write_rows(tmp_path / 'chat.jsonl', rows)}", f"data.cache={tmp_path / 'cache'}"]
        config = resolve_start(load_config(None, [*EXACT, *steps, *data, f"model.from={base}"]))
    config = attending(config.model_copy(update={"data": resolved(config.data)}), pytest.fail)
    facts = RunFacts.of(config)
    cache = facts.data()
    assert isinstance(cache, TokenCache)
    return facts, cache


def trained_one_a_row(facts: RunFacts, cache: TokenCache, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    source = facts.source(cache)
    assert isinstance(source, MicrobatchSource)
    model = Plain(folder / "base") if isinstance(facts.spec, TracedModel) else None
    torch.set_num_threads(1)
    weights, losses = train_plainly(facts, OneARow(source, facts.spec.vocab), model)  # type: ignore[arg-type]
    return {name.removeprefix("inner."): weight for name, weight in weights.items()}, losses


def check(events: list[Event], tmp_path: Path, expected: dict[str, Tensor], losses: list[float]) -> None:
    found = checkpoint_weights(tmp_path / "run")
    for name in (
        name for name in found if name.endswith("c_attn.bias")
    ):  # of keys: no effect, and Adam follows roundings
        for weights in (found, expected):
            weights[name][weights[name].numel() // 3 :][: weights[name].numel() // 3] = 0
    assert relative_difference(found, {name: expected[name] for name in found}) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)


# The data -------------------------------------------------------------------------------------------------------------


def test_targets_say_where_conversations_begin(tmp_path: Path) -> None:
    """Each piece between two marks is one conversation, whole, or padding; with ``data.pack=false`` nothing is marked."""
    rows = short(100)
    facts, cache = native_facts(tmp_path, rows, "data.heldout=0", "model.context=64")
    encoder, template = Encoder(cache.tokenizer_json), Template(facts.config.data.chat_template or "", "assistant")
    whole = [tokens_of(encoder, template.rendered(conversation(row, "messages", ""), "")) for row in rows]
    known = {unmarked(marked)[0][:64].tobytes() for marked in whole}
    ids, marks = unmarked(cache.train)[0], begins(cache.train)
    assert marks.sum() > len(ids) // 64, "rows hold several"
    ends = sorted({*np.flatnonzero(marks).tolist(), *range(0, len(ids), 64)})
    pieces = [ids[a:b] for a, b in itertools.pairwise(ends)]
    assert all(not piece.any() or piece.tobytes() in known for piece in pieces)
    assert not unmarked(cache.train)[1][marks].any()
    source = MicrobatchSource(cache.train, 0, 8, 4, 64, ignored=512, apart=True)
    plain = MicrobatchSource(cache.train, 0, 8, 4, 64, ignored=512)
    for index in range(2):
        (x, y), (a, b) = source.microbatch(3, index), plain.microbatch(3, index)
        assert np.array_equal(x, a)
        assert np.array_equal(np.minimum(y[:, :-1], 512), b[:, :-1])
        assert np.array_equal(y[:, -1], b[:, -1])
    _, cache = native_facts(tmp_path, rows, "data.heldout=0", "model.context=64", "data.pack=false")
    assert not begins(cache.train).any()


def test_positions_begin_anew() -> None:
    targets = torch.tensor([[1, 10, 2, 9, 10, 10], [9, 9, 9, 9, 9, 9], [10, 10, 3, 4, 5, 10]])
    positions, cleaned = positions_in(targets, 9)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]]
    assert cleaned.tolist() == [[1, 9, 2, 9, 9, 9], [9] * 6, [9, 9, 3, 4, 5, 9]]


def test_marks_are_taken_only_where_the_run_has_them() -> None:
    marked = torch.tensor([[1, 10, 2, 2]])
    for apart_ in (True, False):
        declared = TensorType("int64", column=True, apart=apart_)
        if apart_:
            check_target_values(marked, declared, 9, heldout=False)
            assert weighed(marked, declared, 3, 9, 1)[1] == 1.0, "two of two count"
        else:
            with pytest.raises(ProtocolError, match=r"token ids 1\.\.10"):
                check_target_values(marked, declared, 9, heldout=False)
    for wrong in (torch.tensor([[0, 3]]), torch.tensor([[0, -1]]), torch.tensor([[0, 1, 2]]), torch.zeros(1, 2)):
        with pytest.raises(ProtocolError, match="positions: "):
            check_positions(wrong, torch.zeros(1, 2, 8))


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_block", [False, True])
def test_the_decoder_sees_each_conversation_alone(by_block: bool) -> None:
    spec = tiny(attention="conversation", kv_heads=2)
    assert spec.apart
    stage = trained(Stage(spec, None, ((0, 4),)).bind(_drawn(Stage(spec, None, ((0, 4),)))))
    stage.by_block = by_block
    _equals_each_alone(stage, 61)


def _drawn(stage: nn.Module) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, generator=draws) * 0.1 + (p.dim() == 1) for n, p in stage.named_parameters()}


def _equals_each_alone(stage: Any, vocab: int) -> None:
    lengths = (5, 11, 8)
    tokens = torch.randint(0, vocab, (2, 24), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = vocab
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    logits = stage(tokens, positions=positions)
    alone = torch.cat([stage(part) for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(stage(tokens), alone, atol=1e-2)
    wanted = [p for p in stage.parameters() if p.requires_grad]
    loss = stage.loss(tokens, targets, positions=positions)
    parts = [
        stage.loss(x, y) * (y < vocab).sum() / (targets < vocab).sum()
        for x, y in zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True)
    ]
    torch.testing.assert_close(loss, sum(parts))  # type: ignore[arg-type]
    for a, b in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(sum(parts), wanted), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gpt2", "mistral", "gemma3", "mixtral"])
def test_a_traced_model_sees_each_conversation_alone(name: str) -> None:
    """Without positions it computes what it did."""
    plain = TracedModel(json.dumps(config_of(name), sort_keys=True), 32)
    model = plain.with_apart()
    stage = model.stage(None, ((0, model.layers),))
    weights = _drawn(stage)
    stage.bind(weights)
    _equals_each_alone(stage, model.vocab)
    tokens = torch.randint(0, model.vocab, (2, 24), generator=torch.Generator().manual_seed(3))
    other = plain.stage(None, ((0, plain.layers),)).bind(weights)
    torch.testing.assert_close(stage(tokens), other(tokens), rtol=0, atol=0)
    assert model.chain_name != plain.chain_name, "machines compare the graph that they compute with"
    whole = load_model(model, weights)
    positions = torch.cat([torch.arange(16), torch.arange(8)]).expand(2, -1)
    torch.testing.assert_close(
        whole(tokens, positions=positions), stage(tokens, positions=positions), rtol=1e-4, atol=1e-4
    )


def test_a_model_that_mixes_tokens_otherwise_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one is judged by a small copy; the run says in a line that tokens see earlier conversations, or refuses."""
    assert mixed_by(TracedModel(json.dumps(config_of("qwen3"), sort_keys=True), 32)) == ""
    large = config_of("qwen3", hidden_size=1024, num_hidden_layers=16, vocab_size=50_000, intermediate_size=3000)
    large["layer_types"] = ["full_attention"] * 16
    small = apart._shrunk(large)
    assert (small["num_hidden_layers"], len(small["layer_types"]), small["vocab_size"]) == (8, 8, 64)
    assert (small["hidden_size"], small["num_attention_heads"], small["num_key_value_heads"]) == (1024, 4, 2)
    bloom = {
        "model_type": "bloom",
        "vocab_size": 64,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
    }  # takes no positions
    assert "from those of each alone" in mixed_by(TracedModel(json.dumps(bloom), 32))
    monkeypatch.setattr("muletrain.runs.assemble.mixed_by", lambda spec: "it looks around")
    facts, _ = native_facts(tmp_path, chats(3), "data.heldout=0")
    base = base_of(tmp_path / "base", "qwen3")
    config = resolve_start(load_config(None, [*EXACT, f"model.from={base}"]))
    config = config.model_copy(update={"data": facts.config.data})
    said = list[str]()
    assert attending(config, said.append).model.attention == "row"
    assert said == [
        "model.attention: in a row, a token sees earlier conversations, too (it looks around); data.pack=false gives each "
        "a row of its own"
    ]
    asked = config.model_copy(update={"model": config.model.model_copy(update={"attention": "conversation"})})
    with pytest.raises(ConfigError, match=r"cannot keep conversations apart: it looks around; leave it out"):
        attending(asked)


# Fleets ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["native", "llama3", "qwen3", "gpt2"])
def test_a_fleet_trains_packed_conversations_as_if_each_had_a_row(tmp_path: Path, name: str) -> None:
    """fp32, 2 stages x 2 peers, one killed: weights within 1e-5 of the same conversations, one a row. The held-out loss
    during training is that of the weights then."""
    facts, cache = facts_of(tmp_path, name, "train.validate_every=6")
    assert facts.config.model.attention == "conversation"
    expected, losses = trained_one_a_row(facts, cache, tmp_path)
    events = run_losing_a_replica(facts.config, tmp_path / "run")
    check(events, tmp_path, expected, losses)
    measured = [e for e in events if isinstance(e, Validated)]
    assert measured
    heldout = HeldoutSource(cache.heldout, 64, 2, facts.spec.vocab, column=True, apart=True)
    assert {e.tokens for e in measured} == {heldout.targets}


@pytest.mark.parametrize("name", ["native", "qwen3"])
@pytest.mark.parametrize("strategy", ["hub", "swap"])
def test_clients_and_swapped_stages_do_too(tmp_path: Path, strategy: str, name: str) -> None:
    profile = tmp_path / "fleet.toml"
    profile.write_text('[[machines]]\nname = "home"\ncount = 8\n[pacing]\nforward_ms = 40.0\nbackward_ms = 80.0\n')
    hub = ("hub.clients=2", "train.microbatch=4", "hub.verify=0.5", f"fleet.profile={profile}")
    swap = ("swap.whole=true", "fleet.stages=1", "fleet.peers=2")
    facts, cache = facts_of(tmp_path, name, "train.steps=6", *(hub if strategy == "hub" else swap))
    expected, losses = trained_one_a_row(facts, cache, tmp_path)
    small = {"each": lambda name: {"memory_gib": 0.003}} if strategy == "swap" else {}
    events = run_fleet(facts.config, tmp_path / "run", **small)  # type: ignore[arg-type]
    check(events, tmp_path, expected, losses)
    if strategy == "hub":
        check_every_microbatch_once(events, facts)
