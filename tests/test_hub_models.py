"""``model.from`` names a model on the Hugging Face Hub: against a server here that speaks the Hub's interface."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.traced_models import write_folder, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = """
import json, os, sys, time, urllib.request
from muletrain.cli.actions.hypothetical import load_run
from muletrain.config.load import load_config
from muletrain.errors import MuletrainError
from muletrain.runs.assemble import resolve_start
for name in sys.argv[1:]:
    if name == "stop":
        urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/stop").read()
        time.sleep = lambda seconds: None  # the library's, 23 s between five tries
        continue
    try:
        if name.startswith("plan:"):
            print(load_run(None, [f"model.from={name[5:]}", "model.context=32"])[1].layers)
            continue
        config = resolve_start(load_config(None, [f"model.from={name}", "model.context=32"]))
        print(json.dumps({"from": config.model.from_, "layers": config.model.layers, "tokenizer": config.data.tokenizer}))
    except MuletrainError as e:
        print(e)
    finally:
        print("----")
"""


class Hub(ThreadingHTTPServer):
    """Serves the folders of ``root`` as models 'me/FOLDER'; 'me/gated' is gated."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.root, self.sent = root, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        if self.path == "/stop":  # this is a thread of its own
            self.server.shutdown()
            self.server.server_close()
            return self._refuse(200, "")
        owner, name, *rest = self.path.strip("/").split("/")
        folder = self.server.root / name
        if name == "gated":
            return self._refuse(403, "GatedRepo")
        if owner != "me" or not folder.is_dir():
            return self._refuse(404, "RepoNotFound")
        file = folder / rest[-1]
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.server.sent.append(f"{name}/{rest[-1]}")
            self.wfile.write(content)

    def _refuse(self, code: int, why: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    served = Hub(tmp_path / "hub")
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    thread.join(10)


def begin(hub: str, tmp_path: Path, *names: str) -> list[str]:
    """What one process makes of each of ``names``."""
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", CODE, *names]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("----\n")[:-1]


def test_a_model_of_the_hub_is_fetched_once_and_what_cannot_be_used_before_its_weights(
    hub: Hub, tmp_path: Path
) -> None:
    text = write_text(tmp_path / "mine.txt")
    write_folder(hub.root / "mule", text, "qwen2")
    for name in ("bare", "code"):
        (hub.root / name).mkdir()
        config = json.loads((hub.root / "mule" / "config.json").read_text())
        (hub.root / name / "config.json").write_text(
            json.dumps(config | ({"auto_map": {"AutoModel": "x.Y"}} if name == "code" else {}))
        )
    shutil.copy(hub.root / "mule" / "model.safetensors", hub.root / "code")
    for name in ("few", "index"):
        shutil.copytree(hub.root / "mule", hub.root / name)
    (hub.root / "few" / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    (hub.root / "index" / "model.safetensors.index.json").write_text("{}")
    names = ("me/mule", "me/mule", "me/gated", "me/none", "me/bare", "me/code", "me/few", "me/index", "plan:me/bare")
    found = begin(hub.url, tmp_path, *names, "stop", "me/other")
    first, again, gated, none, bare, code, few, index, planned, other = found
    model = json.loads(first)
    assert model["layers"] == 3
    assert model["tokenizer"] == f"{model['from']}/tokenizer.json"
    assert hub.sent.count("mule/model.safetensors") == 1
    assert json.loads(again) == model
    assert len(hub.sent) == len(set(hub.sent)), "nothing is fetched twice"
    assert "is gated: accept its terms at http://127.0.0.1" in gated
    assert "neither a folder me/none here nor a model of that name" in none
    assert "me/bare at http" in bare
    assert "has no weights as safetensors" in bare
    assert "remote code" in code
    assert "code/model.safetensors" not in hub.sent, "it was refused before its weights came"
    assert "tokens, and its model 200; give data.tokenizer=FILE" in few
    assert "few/model.safetensors" not in hub.sent
    assert "index.json has no table weight_map" in index
    assert planned == "3\n", "plan and simulate need no weights"
    assert "cannot be reached; give a folder" in other
