"""``generate`` and ``eval`` of a Hugging Face folder: what ``transformers`` computes, and nothing is traced."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from muletrain.cli.main import app
from muletrain.data.chat import chat_template
from muletrain.data.tokens import TokenCache
from muletrain.errors import MuletrainError
from muletrain.model.traced import export
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.pretrained import Pretrained, trained_in
from muletrain.runs.result import quality, write
from tests.test_finite_weights import checkpoints, here  # noqa: F401 # a fixture
from tests.traced_models import write_folder, write_text

PROMPT = "Mule 7 carries"
NAMES = ("llama", "gpt2", "mixtral")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and models of ``NAMES``."""
    made = tmp_path_factory.mktemp("pretrained")
    text = write_text(made / "mine.txt")
    for name in NAMES:
        write_folder(made / name, text, name)
    return made


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tracing fails, and nothing is in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(export, "trace", lambda *given, **named: pytest.fail("it was traced"))


def typed(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_writes_what_transformers_writes(folder: Path, name: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    ids = tokenizer(PROMPT, return_tensors="pt")
    written = theirs.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    ends = [k for k, token in enumerate(written) if token in (2, 17)]
    expected = tokenizer.decode(written[: ends[0]] if ends else written, skip_special_tokens=True)
    model = trained_in(folder / name)
    assert isinstance(model, Pretrained)
    assert model.stops == {2, 17}
    assert write(model, model.writer(), PROMPT, max_tokens=12, temperature=0) == PROMPT + expected


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_measured_as_transformers_measures_it(folder: Path, name: str) -> None:
    model = trained_in(folder / name).measured()  # type: ignore[attr-defined]
    cache = model.corpus(str(folder / "mine.txt"))
    assert isinstance(cache, TokenCache)
    assert len(cache.train) == 0, "all of the text is measured"
    tokens = torch.from_numpy(np.asarray(cache.heldout[:513], dtype=np.int64))
    cut = type(cache)(cache.folder, cache.train, tokens.numpy(), cache.tokenizer_json, cache.digest, cache.stats)
    theirs = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = torch.cat([theirs(tokens[k : k + 64][None]).logits[0] for k in range(0, 512, 64)])
    expected = float(F.cross_entropy(logits, tokens[1:]))
    assert model.spec.context == 64
    assert quality(model, model.computed(), cut).loss == pytest.approx(expected, rel=1e-5)


def test_the_commands_take_a_folder(folder: Path) -> None:
    name = str(folder / "llama")
    said = typed("generate", name, PROMPT, "--tokens", "3", "--json")
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert (found["step"], found["prompt"]) == (0, PROMPT)
    measured = typed("eval", name, "--data", str(folder / "mine.txt"), "--tokens", "500", "--json")
    assert measured.exit_code == 0, measured.output
    about = json.loads(measured.stdout)
    assert (about["kind"], about["step"]) == ("evaluated", 0)
    assert 400 < about["tokens"] <= 500
    assert about["perplexity"] == pytest.approx(math.exp(about["loss"]))
    lacking = typed("eval", name)
    assert "is a model without a text of its own; give one to measure it on" in str(lacking.exception)


def test_a_folder_with_a_chat_template_is_asked_by_it(folder: Path, tmp_path: Path) -> None:
    """As the run is from which it was exported; an adapter's own template goes before that of its model."""
    chatty, adapter = tmp_path / "chatty", tmp_path / "adapter"
    shutil.copytree(folder / "llama", chatty)
    (chatty / "chat_template.jinja").write_text("Ask: {{ messages[0].content }}. Answer:")
    text, asked = (trained_in(folder / "llama"), trained_in(chatty))
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
    said = write(asked, asked.writer(), PROMPT, **options)
    assert write(text, text.writer(), PROMPT, **options).startswith(PROMPT)
    assert said == write(text, text.writer(), f"Ask: {PROMPT}. Answer:", **options).partition("Answer:")[2].strip()
    assert write(asked, asked.writer(), PROMPT, chat=False, **options) == write(text, text.writer(), PROMPT, **options)
    shutil.copytree(folder / "llama", adapter, ignore=lambda *_: ["config.json", "model.safetensors"])
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(chatty)}))
    (adapter / "chat_template.jinja").write_text("adapted")
    assert chat_template(Pretrained.of(str(adapter)).config.data).endswith("\nadapted")
    (adapter / "tokenizer.json").unlink()
    assert "Ask: " in chat_template(Pretrained.of(str(adapter)).config.data), "it brings no tokenizer"
    plain = Pretrained.of(str(chatty)).corpus(str(folder / "mine.txt"))
    assert len(plain.heldout), "it is measured on plain text, too"


def test_a_run_whose_name_is_mistyped_is_no_model_of_the_hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    run = checkpoints(here)[1][0].parent.parent
    monkeypatch.chdir(run.parent.parent)
    with pytest.raises(MuletrainError, match=rf"runs/none: no such folder; .*; there are: .*runs/{run.name}"):
        trained_in(Path("runs/none"))


def test_what_is_written_controls_no_terminal(folder: Path) -> None:
    """The prompt stands for what a model writes, which is printed with it. Lines stay lines, and JSON is escaped."""
    name, bad = str(folder / "gpt2"), "Mules\x1b]0;title\x07\n\tb\rc\x9b31md\u202ee"
    said = typed("generate", name, bad, "--tokens", "1")
    assert said.exit_code == 0, said.output
    assert said.stdout.startswith("Mules\ufffd]0;title\ufffd\n\tb c\ufffd31md\ufffde")
    assert all(c.isprintable() or c in "\n\t" for c in said.stdout)
    line = typed("generate", name, bad, "--tokens", "1", "--json").stdout
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line)["text"].startswith(bad)


def test_a_model_that_is_not_whole_or_not_finite_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (folder / "llama").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    state = load_file(copy / "model.safetensors")
    state["model.norm.weight"][3] = math.nan
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(MuletrainError, match=r"model\.norm\.weight: 1 of 32 values are NaN or infinite"):
        trained_in(copy).model()
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(MuletrainError, match="is not whole"):
        trained_in(copy)
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(MuletrainError, match="names no base_model_name_or_path"):
        trained_in(copy)
    with pytest.raises(MuletrainError, match="no such folder"):
        trained_in(tmp_path / "none")


def test_a_bare_checkpoint_folder_is_taken_without_its_run(here: Path) -> None:  # noqa: F811
    _, (older, newer) = checkpoints(here)
    alone = newer.rename(here / "alone")
    for where, step in ((alone, 8), (older, 4), (older.parent, 4), (older.parent.parent, 4)):
        found = trained_in(where)
        assert type(found) is Checkpoint
        assert found.step == step
        assert len(found.weights()) == 30
