"""The scripts and the notebook of ``examples/`` run, with tiny models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from .chats import SMOLLM_3, chat_tokenizer, chats, write_rows
from .traced_models import new_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def script(folder: Path, name: str, *arguments: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tiny_chat_model(folder: Path) -> Path:
    """A model and its tokenizer, as from the Hub."""
    chat_tokenizer(folder, SMOLLM_3, 400)
    new_model("qwen3", vocab_size=400, bos_token_id=0, eos_token_id=1, pad_token_id=0).save_pretrained(folder)
    return folder


def test_an_adapter_learns_from_conversations(tmp_path: Path) -> None:
    tiny_chat_model(tmp_path / "model")
    out = script(tmp_path, "chat_lora.py", "model", write_rows(tmp_path / "chat.jsonl", chats(60)), "3")
    assert "held-out loss: " in out
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()


def test_a_callback_stops_a_run(tmp_path: Path) -> None:
    out = script(tmp_path, "early_stop.py", "3")
    assert "step     0" in out
    assert "step     3" in out


def test_three_machines_meet_by_a_ticket(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "several_machines.py")]
    with subprocess.Popen([*command, "4"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        line = next(line for line in first.stdout if line.startswith("on the other machines: "))
        others = [subprocess.Popen([*command, line.split()[-1]], cwd=tmp_path) for _ in range(2)]
        said = first.stdout.read()
        codes = [other.wait(240) for other in others]
    assert "'step': 4, 'steps': 4" in said
    assert codes == [0, 0]


def test_a_module_of_the_script_learns_from_its_images(tmp_path: Path) -> None:
    out = script(tmp_path, "own_module.py", "40")
    found = re.search(r"held-out loss [\d.]+, (\d+)% of 100 held-out images right", out)
    assert found is not None, out
    assert int(found[1]) > 60, "one in four is right by chance"


def test_a_notebook_trains_an_adapter_and_shows_progress(tmp_path: Path) -> None:
    tiny_chat_model(tmp_path / "model")
    write_rows(tmp_path / "chat.jsonl", chats(60))
    notebook = nbformat.read(ROOT / "examples" / "fine_tune.ipynb", as_version=4)
    # what a reader would type in the cell with the settings
    (settings,) = (cell for cell in notebook.cells if cell.source.startswith("MODEL ="))
    settings.source = settings.source.replace("Qwen/Qwen3-0.6B", "model").replace("STEPS = 200", "STEPS = 3")
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = "".join(output.data.get("text/html", "") for output in outputs if "data" in output)
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    assert '<progress value="3" max="3"' in shown
    assert "peer-0" in shown
    assert "\x1b" not in shown, "colours of a terminal"
    assert "held-out loss" in said
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()
