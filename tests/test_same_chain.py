"""Machines make the same chain of a model, whatever order the code of ``transformers`` goes through its sets in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama4 import modeling_llama4

from benchmarks.traced.architectures import KINDS, architecture
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.making import made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

torch.set_num_threads(1)
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
