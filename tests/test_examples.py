"""The scripts of ``examples/`` run, with tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .chats import SMOLLM_3, chat_tokenizer, chats, write_rows
from .traced_models import new_model

ROOT = Path(__file__).parents[1]


def script(folder: Path, name: str, *arguments: str) -> str:
    """What an example prints."""
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_adapter_learns_from_conversations(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "model", SMOLLM_3, 400)
    new_model("qwen3", vocab_size=400, bos_token_id=0, eos_token_id=1, pad_token_id=0).save_pretrained(
        tmp_path / "model"
    )
    out = script(tmp_path, "chat_lora.py", "model", write_rows(tmp_path / "chat.jsonl", chats(60)), "3")
    assert "held-out loss: " in out
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()


def test_a_callback_stops_a_run(tmp_path: Path) -> None:
    out = script(tmp_path, "early_stop.py", "3")
    assert "step     0" in out
    assert "step     3" in out
