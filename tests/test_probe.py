"""What is known of a machine and a stage before it computes: precision, devices, memory, the loss scale."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

from muletrain.compute import probe
from muletrain.compute.estimate import COPIES, Offer, stage_memory, stash_bytes
from muletrain.compute.scaling import GOOD_STEPS, LossScale
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision
from muletrain.errors import ConfigError
from muletrain.model.dropout import Masks
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import Stage


@pytest.mark.alone
def test_precision_is_what_was_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.perf_counter()
    assert probe.choose_precision(torch.device("cpu")) in (Precision.FP32, Precision.BF16)
    assert time.perf_counter() - begin < 1.0
    for bf16_s, expected in [(2.0, Precision.FP32), (0.95, Precision.FP32), (0.5, Precision.BF16)]:
        seconds = {torch.float32: 1.0, torch.bfloat16: bf16_s}
        monkeypatch.setattr(probe, "product_seconds", lambda _, dtype, seconds=seconds: seconds[dtype])
        assert probe.choose_precision(torch.device("cpu")) is expected


def test_devices_and_memory() -> None:
    assert probe.pick_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="no cuda:77 here"):
        probe.pick_device("cuda:77")
    assert 2**26 < probe.free_memory(torch.device("cpu")) < 2**50


def test_what_a_stage_needs_and_where_it_lies() -> None:
    spec = ModelSpec.from_config(ModelConfig(preset="llama-7b"))
    cut = spec.cut(4)
    params = spec.stage_params(cut, 1)
    need = stage_memory(spec, cut, 1, tokens=2048, precision=Precision.BF16)
    assert need.weights == 6 * params
    assert need.fits(Offer(need.total))
    assert not need.fits(Offer(need.total - 1))
    assert 0 < need.on_device - (need.weights + need.moments + params * (4 + 2)) < need.activations, "of the CPU"
    assert need.fits(Offer(need.on_device, need.on_host))
    assert not need.fits(Offer(need.on_device - 1, need.on_host))
    assert not need.fits(Offer(need.on_device, need.on_host - 1))
    aside = stage_memory(spec, cut, 1, tokens=2048, precision=Precision.BF16, state_on_cpu=True)
    assert need.on_device - aside.on_device == 12 * params, "masters and moments went to the machine's memory"
    assert aside.on_host - need.on_host == 12 * params
    assert aside.total == need.total, "where there is one memory, it is all the same"
    kept = stage_memory(spec, cut, 1, tokens=2048, precision=Precision.BF16, graphs=3)
    assert kept.total == need.total + 2 * need.graph


@pytest.mark.parametrize(("precision", "size"), [(Precision.FP32, 4), (Precision.BF16, 2)])
@pytest.mark.parametrize("aside", [False, True])
def test_delayed_updates_need_weights_and_a_gradient_more_and_larger_copies(
    precision: Precision, size: int, aside: bool
) -> None:
    spec = ModelSpec.from_config(ModelConfig(preset="llama-7b"))
    cut = spec.cut(4)
    params = spec.stage_params(cut, 1)
    at_once, delayed = (
        stage_memory(spec, cut, 1, tokens=2048, precision=precision, state_on_cpu=aside, delayed=d)
        for d in (False, True)
    )
    assert delayed.weights - at_once.weights == size * params
    assert delayed.gradient - at_once.gradient == 4 * params
    assert delayed.on_device - at_once.on_device == (size + 4) * params
    assert delayed.on_host - at_once.on_host == delayed.copies - at_once.copies == COPIES * 4 * params
    assert delayed.delayed == delayed.total - at_once.total
    assert "for delayed updates" in str(delayed)
    assert "delayed" not in str(at_once)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stash_estimate_is_near_what_autograd_keeps(stage: int) -> None:
    spec = ModelSpec.from_config(ModelConfig(layers=6, width=128, heads=4, kv_heads=2, ffn=384, vocab=300, context=64))
    cut = ((0, 2), (2, 4), (4, 6))
    module = Stage(spec, stage, cut)
    module.bind({name: torch.randn(shape) * 0.1 for name, shape in module.shapes().items()})
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.zeros(4, 64, dtype=torch.int64) if stage == 0 else torch.randn(4, 64, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = module(x, Masks(0, 0, 0))
        if stage == 2:
            output = F.cross_entropy(output.flatten(0, 1), torch.zeros(256, dtype=torch.int64))
    assert output.requires_grad
    assert stash_bytes(spec, cut, stage, 256, Precision.FP32) == pytest.approx(sum(kept.values()), rel=0.2)


def test_loss_scale_is_a_function_of_the_skips() -> None:
    scale = LossScale(fp16=True)
    first = scale.of(0)
    scale.update(0, skipped=True)
    assert scale.of(1) == first / 2
    for step in range(1, GOOD_STEPS):
        scale.update(step, skipped=False)
    assert scale.of(GOOD_STEPS) == first / 2
    scale.update(GOOD_STEPS, skipped=False)
    assert scale.of(GOOD_STEPS + 1) == first
    scale = LossScale(fp16=True)
    for step in range(10):
        scale.update(step, skipped=True)
    assert scale.of(10) < 2**-14, "as many skips as end a run reach every scale that a loss can need"
    plain = LossScale(fp16=False)
    plain.update(0, skipped=True)
    assert plain.of(1) == 1.0


def test_loss_scale_of_delayed_updates_changes_two_steps_later() -> None:
    """What computes already goes on with the scale it began with; a state has both."""
    scale, resumed = LossScale(fp16=True, versions=2), LossScale(fp16=True, versions=2)
    first = scale.of(0)
    scale.update(0, skipped=True)
    assert [scale.of(1), scale.of(2)] == [first, first / 2]
    scale.update(1, skipped=True)
    resumed.load_state(scale.state(), 2)
    for one in (scale, resumed):
        assert [one.of(2), one.of(3)] == [first / 2, first / 4]
