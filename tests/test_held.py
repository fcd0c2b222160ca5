"""Weights that are held in another form than operators take: numbers exist for one operator at a time."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bitsandbytes import functional as bnb
from torch.multiprocessing.reductions import StorageWeakRef

from muletrain.compute.arithmetic import StageArithmetic, StageSetup
from muletrain.compute.base import Microbatch
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.errors import ConfigError
from muletrain.model.make import make_stage
from muletrain.model.traced import held
from muletrain.runs import assemble
from muletrain.runs.assemble import RunFacts, initial_weights, resolve_start
from muletrain.runs.base import check_quantising, weights_of
from muletrain.sim.plan import swap
from muletrain.sim.plan.question import Question

from .test_adapters import base_of, facts_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from muletrain.config.schema import Checkpointing

CPU = torch.device("cpu")


def arithmetic_of(facts: RunFacts, stage: int, checkpointing: Checkpointing) -> StageArithmetic:
    base, state = weights_of(facts.config, facts.spec), initial_weights(facts, stage)
    assert state is not None
    setup = StageSetup(facts.config.optimizer, 1, 0, sequences=2, checkpointing=checkpointing, inline=True)
    module = make_stage(facts.spec, stage, facts.cut)
    return StageArithmetic(stage, [module], setup, lambda name: base[name] if name in base else state(name))


@pytest.mark.parametrize("checkpointing", ["never", "always", "block"])
@pytest.mark.parametrize("name", ["llama-linear", "gpt2"])
def test_the_numbers_of_one_matrix_exist_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, checkpointing: Checkpointing
) -> None:
    """In forward and in backward, whether autograd keeps the graph or not, no other matrix has numbers."""
    made: list[StorageWeakRef] = []
    at_once: list[int] = []
    dequantise = bnb.dequantize_4bit

    def counted(*args: Any) -> Tensor:
        at_once.append(sum(not ref.expired() for ref in made))
        found: Tensor = dequantise(*args)
        made.append(StorageWeakRef(found.untyped_storage()))
        return found

    monkeypatch.setattr(bnb, "dequantize_4bit", counted)
    facts, _ = facts_of(tmp_path, name, "adapter.quantise=nf4")
    stage = arithmetic_of(facts, 0, checkpointing)
    matrices, mb = sum(n in facts.spec.quantised for n in stage.module(0).base_shapes()), Microbatch(0, 0)
    kept, out = stage.forward(mb, torch.randint(facts.spec.vocab, (2, 48)), stash=checkpointing != "always")
    assert len(at_once) == matrices > 0
    gradients, _ = stage.backward(mb, kept, torch.ones_like(out), accumulate=True)
    assert len(at_once) >= 2 * matrices - 3, "but for those of the first block, whose inputs need no gradient"
    assert max(at_once) == 0
    assert sum(bool(g.count_nonzero()) for g in gradients) >= matrices, "each adapter's B learns"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_estimate_counts_what_is_held(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    base_of(tmp_path / "base", "llama-linear", dtype)
    facts, _ = facts_of(tmp_path, "llama-linear", f"adapter.quantise={kind}")
    base = weights_of(facts.config, facts.spec)

    def bytes_of(weight: Tensor) -> int:
        if not isinstance(weight, held.Held):
            return weight.nbytes
        found = inspect.getclosurevars(weight.make).nonlocals
        return int(found["codes"].nbytes + found["state"].absmax.nbytes)

    for stage in range(len(facts.cut)):
        module = make_stage(facts.spec, stage, facts.cut)
        all_of = [module.held(name, base[name], torch.float32, CPU) for name in module.base_shapes()]
        assert sum(map(bytes_of, all_of)) == facts.spec.base_bytes(facts.cut, stage)
        exact = sum(base[name].nbytes for name in module.base_shapes())
        assert facts.spec.base_bytes(facts.cut, stage) < exact
        largest = max(weight.numel() for name, weight in base.items() if name in facts.spec.quantised)
        assert (
            facts.spec.recast_bytes(facts.spec.parts_of(facts.cut, stage), dtype.itemsize) == dtype.itemsize * largest
        )


def test_numbers_are_the_same_in_all_precisions_up_to_rounding() -> None:
    """Codes of a part of a matrix are those of the whole matrix; the exact matrix is let go."""
    weight = torch.randn(300, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert weight.numel() > held._CHUNK
    for kind in ("int8", "nf4"):
        exact, rounded = (held.quantised(weight, kind, dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
        assert torch.equal(exact.make().bfloat16(), rounded.make())  # type: ignore[attr-defined]
        error = (exact.make() - weight.float()).std()  # type: ignore[attr-defined]
        assert error < {"int8": 0.007, "nf4": 0.1}[kind]
    whole: Tensor = bnb.dequantize_4bit(*bnb.quantize_4bit(weight.float(), blocksize=64, quant_type="nf4"))
    assert torch.equal(exact.make(), whole)  # type: ignore[attr-defined]
    gone = StorageWeakRef(weight.untyped_storage())
    del weight
    assert gone.expired()


def test_linear_layers_of_blocks_are_quantised(tmp_path: Path) -> None:
    """Beside them, a router of experts and the experts stay exact, as the embedding, norms and the output matrix."""
    facts, _ = facts_of(tmp_path, "qwen3-moe", 'adapter.targets=["q_proj"]', "adapter.quantise=int8")
    base = "q_proj.base_layer", "k_proj", "v_proj", "o_proj"
    names = {f"model.layers.{k}.self_attn.{name}.weight" for k in range(facts.spec.layers) for name in base}
    assert {*facts.spec.quantised} == names
    assert {*facts.spec.quantised.values()} == {"int8"}


def test_plans_swap_no_codes(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('[[machines]]\nname = "pc"\ncount = 1\ndevice = "RTX 3060"\n')
    facts, _ = facts_of(tmp_path, "llama-linear", "adapter.quantise=nf4")
    assert all(need.swapped is None for need in [*facts.needs(), *facts.client_needs()])
    question = Question(load_fleet(tmp_path / "fleet.toml"), facts.config, facts.spec)
    assert "use adapter.quantise = 'none'" in swap.predict(question).problem


def test_a_machine_without_bitsandbytes_is_told_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something is fetched")

    monkeypatch.setattr(assemble, "local_folder", fetch)
    for module in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, module, None)
    held.library.cache_clear()
    config = load_config(None, ["model.from=owner/name", "adapter.rank=4", "adapter.quantise=nf4"])
    for check in (resolve_start, check_quantising):  # of the founder, and of each machine
        with pytest.raises(ConfigError, match=r"adapter.quantise: .*pip install 'muletrain\[quantized\]'"):
            check(config)  # type: ignore[operator]
