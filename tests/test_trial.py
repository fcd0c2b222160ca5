"""What came over the network is built in a process with limits first, whatever its fields say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muletrain.compute.estimate import Offer
from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.errors import AdmissionError, CapacityError, ConfigError, MuletrainError
from muletrain.runs.join import trial
from muletrain.runs.join.trial import Trial
from tests.newcomers import GIB

pytestmark = pytest.mark.timeout(600)
SMALL = {"vocab_size": 300, "n_positions": 32, "n_embd": 64, "n_head": 2, "n_layer": 2}
HUGE: dict[str, dict[str, Any]] = {
    "gpt_neo masks": {
        "model_type": "gpt_neo",
        "num_layers": 64,
        "hidden_size": 64,
        "num_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 32768,
        "attention_types": [[["global"], 64]],
    },
    "bart layers": {"model_type": "bart", "decoder_layers": 10**8, "encoder_layers": 10**8, "vocab_size": 300},
    "prophetnet layers": {
        "model_type": "prophetnet",
        "num_decoder_layers": 10**8,
        "num_encoder_layers": 10**8,
        "vocab_size": 300,
    },
    "xlstm layers": {"model_type": "xlstm", "num_hidden_layers": 10**8, "num_blocks": 10**8, "vocab_size": 300},
    "labels": {"model_type": "gpt2", "num_labels": 10**8, **SMALL},
}


class Joiner:
    """A machine with a GiB. One process answers for several tests, since its program takes seconds to import."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._trial = loop, loop.run_until_complete(self._begin())

    async def _begin(self) -> Trial:
        made = Trial()
        made.bound(Offer(GIB, None))
        return made

    def says(self, config: str) -> MuletrainError | None:
        """The error of a founder's configuration, if any."""
        return self.error(lambda: self._trial.build(config, 0))

    def says_of_tokenizer(self, config: str, tokenizer: bytes, data: Path, digest: str) -> MuletrainError | None:
        return self.error(lambda: self._trial.tokens(config, tokenizer, str(data), digest))

    def error(self, ask: Any) -> MuletrainError | None:
        try:
            self.loop.run_until_complete(ask())
        except MuletrainError as e:
            return e
        return None

    async def close(self) -> None:
        await self._trial.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "BUILD_S", 20.0)


@pytest.fixture(scope="module")
def joiner() -> Iterator[Joiner]:
    loop = asyncio.new_event_loop()
    made = Joiner(loop)
    yield made
    loop.run_until_complete(made.close())
    loop.close()


def told(architecture: dict[str, Any]) -> str:
    model = {"architecture": json.dumps(architecture), "layers": 2, "width": 64, "vocab": 300, "context": 32}
    return json.dumps({"model": model, "fleet": {"stages": 1}})


def test_a_usual_configuration_passes(joiner: Joiner) -> None:
    assert joiner.says(load_config(None, []).model_dump_json(by_alias=True)) is None


@pytest.mark.parametrize("name", HUGE)
def test_no_field_of_an_architecture_takes_more_than_this_machine_gives(joiner: Joiner, name: str) -> None:
    error = joiner.says(told(HUGE[name]))
    assert isinstance(error, CapacityError | ConfigError), error
    assert "nothing was taken" in str(error) or "at most" in str(error), error


def test_nor_does_a_number_of_layers(joiner: Joiner) -> None:
    config = {"model": {"layers": 10**9}, "fleet": {"stages": 2, "layers": [5 * 10**8, 5 * 10**8]}}
    error = joiner.says(json.dumps(config))
    assert isinstance(error, CapacityError), error
    assert "give more (--memory)" in str(error)


def test_a_tokenizer_is_tried_before_it_gets_this_machines_text(joiner: Joiner, tmp_path: Path) -> None:
    """One that is none, one that takes gigabytes, and the run's own, whose corpus is another one."""
    text = tmp_path / "ours.txt"
    text.write_text("\n\n".join(f"Mules carry {n} loads over bad roads." for n in range(300)))
    config = load_config(None, [f"data.path={text}", f"data.cache={tmp_path}/cache", "model.vocab=300"])
    whole, cache = config.model_dump_json(by_alias=True), TokenCache.build(config.data, config.model.vocab)
    assert "cannot be used" in str(joiner.says_of_tokenizer(whole, b'{"version": "1.0"', text, cache.digest))
    greedy = json.loads(cache.tokenizer_json)
    greedy["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 3000}] * 3,
    }
    error = joiner.says_of_tokenizer(whole, json.dumps(greedy).encode(), text, cache.digest)
    assert isinstance(error, CapacityError), error
    assert joiner.says_of_tokenizer(whole, cache.tokenizer_json, text, cache.digest) is None
    error = joiner.says_of_tokenizer(whole, cache.tokenizer_json, text, "00" * 32)
    assert isinstance(error, AdmissionError)
    assert "this corpus has digest" in str(error)
