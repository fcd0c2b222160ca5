"""Machines make the same chain of a model, whatever order the code of ``transformers`` goes through its sets in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama4 import modeling_llama4

from benchmarks.traced.architectures import KINDS, architecture
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.cutting import by_need
from muletrain.model.traced.making import made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

torch.set_num_threads(1)
aten = torch.ops.aten
SEEDS = range(8)
CHANGES: dict[str, dict[str, Any]] = {
    "llama4_text": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
"""So that there are two kinds of layers."""
ORDERS: list[Callable[[Iterable[str]], list[str]]] = [sorted, lambda names: sorted(names, reverse=True)]


@pytest.mark.parametrize(
    ("kind", "module"), [("llama4_text", modeling_llama4), ("gemma3_text", modeling_gemma3)], ids=["llama4", "gemma3"]
)
def test_the_order_of_a_set_makes_no_other_chain(
    kind: str, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, orders = [], []
    for number, order in enumerate(ORDERS):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        monkeypatch.setattr(
            module, "set", lambda names, order=order: orders.append(order) or order({*names}), raising=False
        )
        made.cache_clear()
        spec = TracedModel(architecture(kind, **CHANGES[kind]), 32)
        parts = spec._made.parts
        shapes = [[tuple(map(str, node.meta["val"].shape)) for node in nodes] for nodes in parts.passed]
        found.append(([part.code for part in parts.parts], parts.tables.code, parts.constants, shapes, spec.chain_name))
    assert len({*orders}) == 2
    assert found[0] == found[1]


PARTS = {"a": 0, "b": 0, "far": 0, "unused": 0, "c": 1, "d": 1, "e": 1, "f": 2}
TAKES = {"c": "a", "d": "b", "e": "cd", "f": ["far", "e"]}


def in_need(order: Iterable[str], drops: str = "") -> list[list[str]]:
    """The parts of a graph whose code computes in this ``order``, in the order of need. ``drops``: dropouts."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    parts: list[list[fx.Node]] = [[], [], []]
    for name in order:
        args = tuple(nodes[taken] for taken in TAKES.get(name, "x"))
        if name in drops:
            nodes[name] = graph.create_node("call_function", aten.dropout.default, (*args, 0.5, True), name=name)
        else:
            nodes[name] = graph.create_node("call_function", torch.add, (*args, args[0])[:2], name=name)
        parts[PARTS[name]].append(nodes[name])
    return [[node.name for node in part] for part in by_need(parts, nodes["f"])]


def test_nodes_come_in_the_order_of_need_whatever_order_they_were_made_in() -> None:
    """A value that a later part alone needs comes after what the next part needs, and what nobody needs is left out."""
    expected = [["a", "b", "far"], ["c", "d", "e"], ["f"]]
    assert in_need(["a", "b", "far", "unused", "c", "d", "e", "f"]) == expected
    assert in_need(["unused", "far", "b", "d", "a", "c", "e", "f"]) == expected


def test_nodes_that_draw_random_numbers_stay_where_they_are() -> None:
    """The second dropout draws what the model's code has drawn second."""
    for order, first in (("abcd", ["a", "b"]), ("bacd", ["b", "a"]), ("abdc", ["a", "b"])):
        assert in_need([*order, "far", "e", "f"], drops="ab") == [[*first, "far"], ["c", "d", "e"], ["f"]]


PRINT = """
import json, logging, sys, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
from benchmarks.traced.architectures import architecture
from muletrain.errors import ConfigError
from muletrain.model.traced.chain import TracedModel
for kind in sys.argv[2:]:
    try:
        name = TracedModel(architecture(kind, **json.loads(sys.argv[1]).get(kind, {})), 32).chain_name
    except ConfigError as e:
        name = f"refused: {e}"
    print(kind, name, flush=True)
"""


@pytest.mark.slow  # all architectures eight times: an hour on one core
@pytest.mark.timeout(7200)
def test_every_architecture_makes_one_chain_in_eight_processes(tmp_path: Path) -> None:
    seen = []
    for seed in SEEDS:
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "XDG_CACHE_HOME": str(tmp_path / str(seed))}
        command = [sys.executable, "-c", PRINT, json.dumps(CHANGES), *KINDS, "gemma3_text"]
        seen.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert seen == [seen[0]] * len(seen)
    assert seen[0].count("transformers") >= 45
