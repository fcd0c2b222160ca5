"""A traced model written as Python: every part computes what the run computes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from muletrain.cli.main import app
from muletrain.model.dropout import Masks
from muletrain.model.traced.source import class_names, source_of
from tests.test_factory import of
from tests.traced_models import NO_DROPOUT, VOCAB, bound, chain_of, config_of, new_model, off

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.model.traced.chain import TracedModel


def written(chain: TracedModel) -> dict[str, Any]:
    """The functions of the source of ``chain``."""
    found: dict[str, Any] = {}
    exec(compile(source_of(chain), "blocks.py", "exec"), found)
    return found


def computed(chain: TracedModel, model: torch.nn.Module, tokens: torch.Tensor, masks: Masks | None) -> torch.Tensor:
    """What the written functions make of ``tokens``, one after the other: logits."""
    functions, state = written(chain), dict(model.state_dict(keep_vars=True))
    constants = chain.constants.values()
    tables = functions["tables"](*constants, *tokens.shape, tokens.device)
    named = dict(zip(chain.tables, tables, strict=True))
    values: dict[str, Any] = dict.fromkeys(chain.parts[0].inputs, tokens)
    for name, part in zip(class_names(chain), chain.parts, strict=True):
        given = [*(state[n] for n in part.weights), *(values[n] for n in part.inputs), *(named[n] for n in part.tables)]
        values |= zip(part.outputs, functions[name](*given, tokens.device, masks, part.site, len(tokens)), strict=True)
    logits: torch.Tensor = values[chain.parts[-1].outputs[0]]
    return logits


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mixtral", "qwen3"])
def test_the_written_source_computes_the_models_logits_and_gradients(name: str) -> None:
    model = new_model(name, **(NO_DROPOUT if name == "gpt2" else {}))
    chain = chain_of(model)
    tokens = torch.randint(0, VOCAB, (2, 12))
    expected, ours = model(input_ids=tokens, use_cache=False).logits, computed(chain, model, tokens, None)
    assert off(ours, expected) <= 1e-6
    weights = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(x.square().mean(), weights) for x in (ours, expected)), strict=True):
        assert float((a - b).norm()) <= 1e-6 * float(b.norm()) + 1e-9


def test_the_written_source_draws_the_dropouts_of_the_run() -> None:
    model = new_model("gpt2")
    chain = chain_of(model)
    tokens = torch.randint(0, VOCAB, (2, 12))
    (stage,) = bound(chain, model, 1)
    assert off(computed(chain, model, tokens, Masks(1, 2, 3)), stage(tokens, Masks(1, 2, 3))) <= 1e-6


def test_the_source_of_a_users_module_names_its_parameters() -> None:
    chain = of("frozen").spec
    text = source_of(chain)
    assert all(f": {name} {list(chain.shapes[name])}" in text for name in chain.parts[0].weights)


def test_trace_writes_a_models_blocks_without_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")))
    answer = CliRunner().invoke(app, ["trace", str(tmp_path), "--out", str(tmp_path / "out"), "--json"])
    assert answer.exit_code == 0, answer.output
    about = json.loads((tmp_path / "out" / "blocks.json").read_text())
    assert json.loads(answer.stdout) == about
    assert [row["class"] for row in about["parts"]] == ["Embedding", "Block", "Block", "Block", "Head"]
    assert about["parameters"] == sum(row["parameters"] for row in about["parts"])
    assert "def Block(weight_0" in (tmp_path / "out" / "blocks.py").read_text()
