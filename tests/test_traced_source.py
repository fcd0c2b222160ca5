"""A traced model written as Python: it reads well, and trains to the same numbers."""

from __future__ import annotations

import importlib.util
import json
import re
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

from muletrain.cli.main import app
from muletrain.data.samples import SampleData
from muletrain.model.dropout import Masks
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.source import source_of
from muletrain.model.traced.statements import Writer
from tests.test_factory import loop_model, named, of
from tests.traced_models import (
    EACH,
    NO_DROPOUT,
    VOCAB,
    bound,
    chain_of,
    config_of,
    new_model,
    off,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def written(chain: TracedModel, folder: Path) -> Any:
    """The source of ``chain``, loaded as a module."""
    (folder / "blocks.py").write_text(source_of(chain))
    spec = importlib.util.spec_from_file_location("blocks", folder / "blocks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def computed(module: Any, chain: TracedModel, **given: Any) -> tuple[dict[str, Any], list[tuple[Tensor, str]]]:
    """Runs the code in a written module's docstring. Returns its variables, and all parameters with their names."""
    lines = [line for line in module.__doc__.splitlines() if line.startswith("    ")]
    found = {**vars(module), **given, "constants": chain.constants}
    exec(textwrap.dedent("\n".join(lines)), found)
    blocks = [found["embedding"], *found["blocks"], found["head"]]
    pairs = [zip(b.parameters(), part.weights, strict=True) for b, part in zip(blocks, chain.parts, strict=True)]
    return found, [pair for part in pairs for pair in part]


def check_training(module: Any, chain: TracedModel, model: torch.nn.Module, **samples: torch.Tensor) -> None:
    """The code in the header of ``module`` computes the loss and gradients of a stage, with dropout."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    given, used = computed(module, chain, **samples, state=state, dropout_key=Masks(1, 2, 3))
    (stage,) = bound(chain, model, 1)
    expected = stage.loss(*samples.values(), given["dropout_key"])
    assert off(given["loss"], expected) <= 1e-6
    weights = dict(stage.named_parameters())
    assert all(p.requires_grad == weights[n].requires_grad for p, n in used)
    used = [(p, n) for p, n in used if p.requires_grad]
    theirs = torch.autograd.grad(expected, [weights[n] for _, n in used])
    ours = torch.autograd.grad(given["loss"], [p for p, _ in used])
    assert all(float((a - b).norm()) <= 1e-6 * float(b.norm()) + 1e-9 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", [p for p in EACH if p.values[0] in ("gpt2", "gemma3", "mixtral", "qwen3")])
def test_the_written_source_trains_to_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Its header's code, with the model's weights: logits and gradients as ``transformers`` has them."""
    model = new_model(name, **(NO_DROPOUT if name == "gpt2" else {}))
    chain = chain_of(model)
    module = written(chain, tmp_path)
    tokens, targets = torch.randint(0, VOCAB, (2, 2, 12))
    given, used = computed(module, chain, input_ids=tokens, targets=targets, state=model.state_dict())
    state = dict(model.named_parameters())
    expected = model(input_ids=tokens, use_cache=False).logits
    assert off(given["logits"], expected) <= 1e-6
    theirs = torch.autograd.grad(expected.square().mean(), [state[n] for _, n in used])
    ours = torch.autograd.grad(given["logits"].square().mean(), [p for p, _ in used])
    assert all(float((a - b).norm()) <= 1e-6 * float(b.norm()) + 1e-9 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {}),
        (
            "gemma3",
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_dropout": 0.1},
        ),
        ("qwen3-moe", {"mlp_only_layers": [1]}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_the_written_source_draws_each_dropout_and_mask_of_the_run(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Its header's code computes the loss and gradients of a stage: with dropout, tables and classes that differ by layer,
    and tied parameters."""
    model = new_model(name, **changes)
    chain = chain_of(model)
    module = written(chain, tmp_path)
    tokens, targets = torch.randint(0, VOCAB, (2, 3, 20))
    check_training(module, chain, model, input_ids=tokens, targets=targets)


@pytest.mark.parametrize("kind", ["frozen", "vit", "words", "gaps"])
def test_the_written_source_of_a_users_module_trains_to_the_same_numbers(kind: str, tmp_path: Path) -> None:
    """Its header's code computes loss and gradients of a stage: samples, text, frozen parameters, dropout; and where
    nothing comes before the first block, and the numbers of layers have gaps."""
    if kind == "words":
        facts = named("words", None, "model.vocab=300", "model.context=16")
    elif kind == "gaps":
        facts = named("wrong", "images_with_numbers", "model.arguments.kind=gaps")
    else:
        facts = of(kind)
    chain, model = facts.spec, loop_model(facts)
    assert isinstance(chain, TracedModel)
    module = written(chain, tmp_path)
    if kind == "words":
        inputs, targets = torch.randint(0, VOCAB, (2, 3, 7))
    else:
        data = facts.data()
        assert isinstance(data, SampleData)
        inputs, targets = map(torch.from_numpy, data.batch(data.train, np.arange(3), chain.vocab))
    check_training(module, chain, model, inputs=inputs, targets=targets)


def test_the_written_source_names_values_by_their_roles() -> None:
    """After the module that makes them, and what attention takes; a plainly causal mask is written so."""
    text = source_of(chain_of(new_model("qwen3")))
    for line in (
        "# self_attn",
        "q_norm = self.q_norm_weight * (q_proj_view * ((q_proj_view ** 2).mean(-1, keepdim=True) + 1e-06).rsqrt())",
        "q = q_norm_transpose * cos_unsqueeze + rotated",
        "k = rotary.unsqueeze(2).expand([sequences, 2, 2, tokens, 16]).reshape([sequences, 4, tokens, 16])",
        "attention = operators.attention(q, k, v, attention_mask, scale=0.25)",
        "residual = x + o_proj",
        "# mlp",
        "down_proj = F.linear(F.silu(gate_proj) * up_proj, self.down_proj_weight)",
        "attention_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().expand(sequences, 1, -1, -1)",
    ):
        assert f" {line}\n" in text
    assert text.count("\n") <= 175
    assert max(map(len, text.splitlines())) <= 120
    assert ".tril()" not in source_of(chain_of(new_model("mistral")))  # its window is shorter than the context


def test_operands_keep_their_order_where_one_line_has_several_operators() -> None:
    """Python binds ``**`` before a sign, signs before products, and from left to right."""

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x - (y - (x - y)) * (-(x + y)) ** 2 - -((y * 3) ** 2)
        return (a / (x / (y + 5))) / (a.abs() + 1) * ((x < y) == (y < a))

    graph = make_fx(compute)(torch.ones(3), torch.ones(3)).graph
    graph.output_node().args = ((graph.output_node().args[0],),)
    lines = Writer(graph).body(["x", "y"])
    assert len(lines) <= 3
    given: dict[str, Any] = {"torch": torch}
    exec("\n".join(["def again(x, y):", *(f"    {line}" for line in lines)]), given)
    x, y = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(given["again"](x, y), compute(x, y))


def test_trace_writes_a_models_blocks_without_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")))
    answer = CliRunner().invoke(app, ["trace", str(tmp_path), "--out", str(tmp_path / "out"), "--json"])
    assert answer.exit_code == 0, answer.output
    about = json.loads((tmp_path / "out" / "blocks.json").read_text())
    assert json.loads(answer.stdout) == about
    assert [row["class"] for row in about["parts"]] == ["Embedding", "Block", "Block", "Block", "Head"]
    assert about["parameters"] == sum(row["parameters"] for row in about["parts"])
    assert "class Block(nn.Module)" in (tmp_path / "out" / "blocks.py").read_text()


# What is refused ------------------------------------------------------------------------------------------------------


def test_no_line_computes_what_another_one_has() -> None:
    """Gemma's masks make the same positions four times, and begin with 'true, and'."""
    text = source_of(chain_of(new_model("gemma3")))
    for part in re.split(r"\n(?=class |def )", text):
        made = re.findall(r"^ +\w+ = (.+)$", part, re.MULTILINE)
        assert len(made) == len({*made})
    assert "new_ones" not in text
    assert "table_0" not in text, "a buffer that is given on as it is"
