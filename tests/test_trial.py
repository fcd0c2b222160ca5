"""What came over the network is built in a process with limits first, whatever its fields say."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
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

    def cpu_limit(self) -> str:
        process = self.loop.run_until_complete(self._trial._process)
        limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
        return next(line.split()[3] for line in limits if line.startswith("Max cpu time"))

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


@pytest.mark.parametrize(("work", "code"), [("while True: pass", -signal.SIGXCPU), ("bytearray(1 << 28)", 1)])
def test_time_and_bytes_are_bounded_each_by_itself(work: str, code: int) -> None:
    limited = f"from muletrain.runs.join.trial import _limit\n_limit(1 << 27, 0.0)\n{work}"
    ended = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert code < 0 or "MemoryError" in ended.stderr


def test_who_computes_nothing_and_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[asyncio.subprocess.Process] = []

    async def sleeps() -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        begun.append(await asyncio.create_subprocess_exec("sleep", "30", stdin=pipe, stdout=pipe))
        return begun[-1]

    async def scenario() -> None:
        made = Trial()
        with pytest.raises(CapacityError, match="the run's model takes more than 0 s to build; nothing was taken"):
            await made.build("{}", 0)
        await made.close()
        assert [process.returncode for process in begun] == [-signal.SIGKILL] * 2, "the next question had another one"

    for name, value in (("_begun", sleeps), ("BUILD_S", 0.1), ("STARTED_S", 0.1)):
        monkeypatch.setattr(trial, name, value)
    asyncio.run(scenario())


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


def test_a_tokenizer_is_tried_before_it_gets_this_machines_text(
    joiner: Joiner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is none, one that takes gigabytes, one that takes minutes, and the run's own, whose corpus is another one."""
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
    assert joiner.cpu_limit() == "unlimited", "what got through the sample may take hours for a corpus"
    error = joiner.says_of_tokenizer(whole, cache.tokenizer_json, text, "00" * 32)
    assert isinstance(error, AdmissionError)
    assert "this corpus has digest" in str(error)
    endless = json.loads(cache.tokenizer_json)
    same = {"type": "Replace", "pattern": {"String": "e"}, "content": "e"}
    endless["normalizer"] = {"type": "Sequence", "normalizers": [same] * 20_000}
    text.write_text("Mules.")
    monkeypatch.setattr(trial, "BUILD_S", 1.0)
    error = joiner.says_of_tokenizer(whole, json.dumps(endless).encode(), text, cache.digest)
    assert isinstance(error, CapacityError), error
