"""What a user's own module or samples cannot be, and what no other machine can make this one import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from muletrain.config.load import load_config
from muletrain.data import samples
from muletrain.errors import AdmissionError, ConfigError, DataError, ProtocolError
from muletrain.model.traced.architecture import checked
from muletrain.model.traced.chain import TracedModel
from muletrain.runs.assemble import resolve_start
from muletrain.runs.corpus import own_data
from muletrain.runs.host import Host
from tests import own_models
from tests.test_factory import named, of


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "cannot be imported.*own_models.py. has no nowhere; name the function"),
        ("NAME", "is int, not a function"),
        ("raises", r"raises ValueError \(in raises, tests/own_models.py:\d+\): no such thing as a free mule"),
        ("leaves", r"raises SystemExit \(in leaves, tests/own_models.py:\d+\): no mule today"),
        ("nothing", "returns NoneType; it must return an nn.Module"),
        (
            "vit",
            r"cannot be traced \(in forward, tests/own_models.py:\d+\).*float32\[3, 8, 8\] and targets float32\[2\]",
        ),
    ],
)
def test_a_factory_that_cannot_be_used_says_why(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.factory: .*{message}"):
        named(model, "images_with_numbers")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("batchnorm", "norm changes .* while it computes.*GroupNorm or LayerNorm for BatchNorm"),
        ("unused", "extra.bias takes no part in the loss"),
        ("frozen", "no parameter is trained"),
        ("plain", "the module.scale is a tensor that is neither parameter nor buffer"),
        ("taken", "bind.weight begins with a name that muletrain uses; rename bind"),
        ("early", "uses the targets before the last block has computed"),
        (
            "again",
            "layers.1 computes after a later block did.*call the members of model.layers in their order, each once",
        ),
        ("flag", r"makes a value .*used after part 1, .*only floating-point tensors \[samples, \.\.\.\]"),
        ("shape", r"cannot be traced \(in forward, tests/own_models.py:\d+\).*inputs float32\[3, 8, 8\]"),
        (
            "loop",
            r"cannot be traced \(in .*, tests/own_models.py:\d+\): unbind makes the number of samples a constant",
        ),
        ("value", "cannot be traced .*data-dependent.*shapes must not depend on data"),
        ("sizes", "whose shape depends on data, so microbatches would not add up"),
        ("random", "rand_like.*draws random numbers"),
        ("vector", r"returns torch.float32 .*, not a loss; return the mean"),
        ("logits", "returns dict, not a loss"),
    ],
)
def test_a_module_that_cannot_be_trained_says_why(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.factory: .*{message}"):
        named("wrong", "images_with_numbers", f"model.arguments.kind={kind}")


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            "words",
            ["model.vocab=301"],
            "embed looks up 300 rows, and model.vocab = 301, .*: make it 301 in the module, or",
        ),
        ("vit", ["data.factory=tests.own_models:images_with_classes", "model.vocab=9"], "compares 5 classes"),
        ("windowed", ["model.vocab=300", "model.context=33"], "takes at most 32 tokens, and model.context = 33"),
        ("placed", ["model.vocab=300", "model.context=33"], "place looks up 32 rows, and in 33 tokens .* go to 32"),
    ],
)
def test_a_module_with_too_small_a_table_is_refused(model: str, settings: list[str], message: str) -> None:
    """Before a peer looks up what is not there."""
    with pytest.raises(ConfigError, match=f"^model.factory: .*{message}"):
        resolve_start(load_config(None, [f"model.factory=tests.own_models:{model}", *settings]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("nowhere", "cannot be imported"),
        ("uneven", r"sample 1 of .* is float32\[4\] and float32\[\], others are float32\[3\]"),
        ("empty", "1 samples to train on and 0 held out"),
        ("texts", r"sample 0 of .* is not \(input, target\)"),
        ("one", r"does not return \(train, heldout\)"),
        ("unlimited", "not finite"),
        ("restless", "another one each time"),
        ("images_with_classes", "integers from 0 to 4, and model.vocab = 3; set model.vocab = 5"),
    ],
)
def test_samples_that_cannot_be_used_say_why(data: str, message: str) -> None:
    model = "vit" if data == "images_with_classes" else "regression"
    with pytest.raises((ConfigError, DataError), match=f"^data.factory: .*{message}"):
        named(model, data, "model.vocab=3").data()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.factory=os"], "model.factory"),
        (["model.arguments.width=3"], "model.arguments: .* has no effect without model.factory"),
        (["data.factory=a.b:c"], "set model.factory too"),
        (
            ["model.factory=a.b:c", "data.factory=a.b:d", "data.share=true"],
            "data.share: True has no effect with data.factory",
        ),
        (["model.factory=tests.own_models:words", "model.from=x"], "comes from model.from as well"),
        (
            ["model.factory=tests.own_models:words", "model.vocab=300", "model.layers=7"],
            "model.layers: 7 beside model.factory",
        ),
        (["model.factory=tests.own_models:words", "model.arguments.height=1"], "unexpected keyword argument 'height'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_start(load_config(None, settings))


def test_arriving_samples_must_be_what_the_chain_declares() -> None:
    """The shapes and types of all inputs and targets, as of tokens."""
    from muletrain.compute.checks import check_sample_shape, check_sample_values, check_targets

    spec = of("vit").spec
    images, labels = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    check_sample_shape("inputs", images, spec.inputs, spec, 2)
    check_targets(labels, images, spec, 2)
    for wrong in (images.half(), images.long(), images[:, :2], torch.zeros(3, 3, 8, 8), images[:0], images.flatten(1)):
        with pytest.raises(ProtocolError, match="expected float32 of at most"):
            check_sample_shape("inputs", wrong, spec.inputs, spec, 2)
    for other in (labels[:1], labels.float(), labels[:, None]):
        with pytest.raises(ProtocolError, match="targets"):
            check_targets(other, images, spec, 2)
    for values in (images + torch.nan, labels + spec.vocab, labels - 1):
        with pytest.raises(ProtocolError):
            check_sample_values("forward", values, spec.vocab)


def test_a_machine_whose_factory_gives_other_samples_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it gets any weights. It may still serve a stage, without the factory."""
    facts, host = of("regression"), cast(Host, SimpleNamespace(spec=SimpleNamespace(data="config")))
    digest = facts.data().digest
    assert own_data(host, facts, b"", digest) is not None
    monkeypatch.setattr(own_models, "images_with_numbers", lambda: (own_models.Images(7, 50, classes=False),) * 2)
    samples._built.cache_clear()  # another process
    with pytest.raises(AdmissionError, match=r"have digest .* here, the run's have .*, or join without --factory"):
        own_data(host, facts, b"", digest)
    samples._built.cache_clear()


def test_nothing_is_imported_that_only_another_machine_names(tmp_path: Path) -> None:
    """A configuration as a founder sends it, a manifest, a configuration of Hugging Face: in a fresh process."""
    (tmp_path / "planted.py").write_text("open('imported', 'w').close()\nbuild = print\n")
    about = {"factory": "planted:build", "arguments": {}, "inputs": "int64[T]", "targets": "int64[T]", "vocab_size": 9}
    code = f"""
import json
from muletrain.runs.join.limits import told_config
from muletrain.runs.assemble import RunFacts, resolve_start
from muletrain.model.make import model_from_json
about = {about!r}
model = {{"factory": "planted:build", "architecture": json.dumps(about), "chain": "0123 (planted 1)"}}
told = told_config(json.dumps({{"model": model, "data": {{"factory": "planted:build"}}}}))
spec = json.dumps({{"architecture": json.dumps(about), "context": 128}})
for make in (lambda: RunFacts.of(told), lambda: resolve_start(told), lambda: model_from_json(spec).layers):
    try:
        make()
    except Exception as e:
        assert "add --factory planted:build" in str(e), e
    else:
        raise AssertionError("built")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
    with pytest.raises(ConfigError, match=r"config\.json has factory"):
        checked({"model_type": "gpt2", "factory": "planted:build"})


@pytest.mark.parametrize(
    "change", [{"arguments": {"a": [1]}}, {"factory": "os"}, {"inputs": "float32[T]"}, {"inputs": None}]
)
def test_an_architecture_that_describes_no_factory_is_refused(change: dict[str, Any]) -> None:
    about = {"factory": "a:b", "arguments": {}, "inputs": "int64[T]", "targets": "int64[T]", "vocab_size": 9}
    with pytest.raises(ConfigError):
        TracedModel(json.dumps(about | change), 128)
