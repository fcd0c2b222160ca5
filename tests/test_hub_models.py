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
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from tests.traced_models import write_folder, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "fedcba9876543210fedcba9876543210fedcba98"
COMMITS = {"main": COMMIT, COMMIT: COMMIT, "v1": OLDER, "refs/pr/1": OLDER, OLDER: OLDER}
"""Revisions of each model. The older one has one layer less."""
CODE = """
import json, os, sys, time, urllib.request
from muletrain.cli.actions.hypothetical import load_run
from muletrain.config.load import load_config
from muletrain.data.encoder import Encoder
from muletrain.data.tokenizer import load_tokenizer
from muletrain.errors import MuletrainError
from pathlib import Path
from muletrain.runs.assemble import resolve_start
from muletrain.runs.pretrained import trained_in
from muletrain.runs.result import write
for name in sys.argv[1:]:
    if name == "stop":
        urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/stop").read()
        time.sleep = lambda seconds: None  # the library's, 23 s between five tries
        continue
    try:
        if name.startswith("plan:"):
            print(load_run(None, [f"model.from={name[5:]}", "model.context=32"])[1].layers)
            continue
        if name.startswith("text:"):
            print(Encoder(load_tokenizer(name[5:], 512)).end_token)
            continue
        if name.startswith("use:"):
            model = trained_in(Path(name[4:]))
            print(json.dumps([type(model).__name__, str(model.folder), write(model, model.writer(), "Mule 3", max_tokens=2)]))
            continue
        config = resolve_start(load_config(None, [f"model.from={name}", "model.context=32"]))
        print(json.dumps({"from": config.model.from_, "layers": config.model.layers, "tokenizer": config.data.tokenizer}))
    except MuletrainError as e:
        print(e)
    finally:
        print("----")
"""


class Hub(ThreadingHTTPServer):
    """Serves the folders of ``root`` as models 'me/FOLDER', and FOLDER@COMMIT as its older state; 'me/gated' is gated."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.root, self.sent, self.asked = root, list[str](), list[str]()

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
        path = self.path.partition("?")[0].strip("/")
        self.server.asked.append(path)
        if path == "stop":  # this is a thread of its own
            self.server.shutdown()
            self.server.server_close()
            return self._refuse(200, "")
        is_api = path.startswith("api/models/")
        owner, name, *rest = path.removeprefix("api/models/").split("/")
        kind, revision, *_ = map(unquote, [*rest, "main", "main"][:2] if rest else ("revision", "main"))
        folder = self.server.root / name
        if owner != "me" or not (folder.is_dir() or name == "gated"):
            return self._refuse(404, "RepoNotFound")
        if (commit := COMMITS.get(revision)) is None:
            return self._refuse(404, "RevisionNotFound")
        if commit == OLDER:
            folder = folder.with_name(f"{name}@{OLDER}")
        if is_api:
            files = (
                sorted(p.name for p in folder.iterdir()) if folder.is_dir() else ["config.json", "model.safetensors"]
            )
            listed = [{"type": "file", "path": f, "oid": "0" * 40, "size": 1} for f in files]
            named = {"id": f"me/{name}", "sha": commit, "siblings": [{"rfilename": f} for f in files]}
            return self._send(json.dumps(listed if kind == "tree" else named).encode(), body=True)
        if name == "gated":
            return self._refuse(403, "GatedRepo")
        file = folder / rest[-1]
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        if body:
            self.server.sent.append(f"{folder.name}/{rest[-1]}")
        self._send(file.read_bytes(), body=body, commit=commit)

    def _send(self, content: bytes, *, body: bool, commit: str = COMMIT) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
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


def called(hub: str, tmp_path: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command with the cache in ``tmp_path``."""
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        command, env=environment | env, capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def begin(hub: str, tmp_path: Path, *names: str, **env: str) -> list[str]:
    """What one process makes of each of ``names``, and its standard error."""
    done = called(hub, tmp_path, sys.executable, "-c", CODE, *names, **env)
    return [*done.stdout.split("----\n")[:-1], done.stderr]


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
    (hub.root / "index" / "model.safetensors").unlink()
    (hub.root / "index" / "model.safetensors.index.json").write_text("{}")
    names = ("me/mule", "me/mule", "me/gated", "me/none", "me/bare", "me/code", "me/few", "me/index", "plan:me/bare")
    found = begin(hub.url, tmp_path, *names, "stop", "me/other")
    first, again, gated, none, bare, code, few, index, planned, other, _ = found
    model = json.loads(first)
    assert model["layers"] == 3
    assert model["tokenizer"] == model["from"]
    assert hub.sent.count("mule/model.safetensors") == 1
    assert json.loads(again) == model
    assert len(hub.sent) == len(set(hub.sent)), "nothing is fetched twice"
    mine = {path.rpartition("/")[2] for path in hub.asked if "/mule/" in path}
    assert mine - {"main", "mule"} <= {file.name for file in (hub.root / "mule").iterdir()}, (
        "only what is there is asked for"
    )
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
    assert "cannot be reached (" in other
    assert "give a folder, or try again" in other


def test_what_hf_download_fetched_is_taken_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    text = write_text(tmp_path / "mine.txt")
    write_folder(hub.root / "mule", text, "llama")
    write_folder(hub.root / f"mule@{OLDER}", text, "llama", num_hidden_layers=2)
    hf = str(Path(sys.executable).with_name("hf"))
    called(hub.url, tmp_path, hf, "download", "me/mule")
    called(hub.url, tmp_path, hf, "download", "me/mule", "--revision", "v1")
    shutil.copytree(hub.root / f"mule@{OLDER}", hub.root / "lean")
    called(hub.url, tmp_path, hf, "download", "me/lean", "config.json")
    asked = len(hub.asked)
    names = (
        "me/mule",
        "me/mule@v1",
        f"me/mule@{OLDER}",
        "plan:me/lean",
        "me/mule@main",
        "use:me/mule@v1",
        "me/lean",
        "me/other",
    )
    *found, lean, other, _ = begin(hub.url, tmp_path, *names, HF_HUB_OFFLINE="1")
    assert len(hub.asked) == asked
    newest, tagged, named, planned, main, used = (json.loads(text) for text in found)
    cache = tmp_path / "cache" / "hub" / "models--me--mule" / "snapshots"
    assert (newest["layers"], newest["from"]) == (3, str(cache / COMMIT))
    assert newest["tokenizer"] == newest["from"]
    assert (tagged["layers"], tagged["from"]) == (2, str(cache / OLDER))
    assert (named, planned, main) == (tagged, 2, newest)
    assert used[:2] == ["Pretrained", str(cache / OLDER)]
    assert used[2].startswith("Mule 3"), "generate takes the Hub's name"
    assert "HF_HUB_OFFLINE=1 keeps it from being fetched; call 'hf download me/other'" in other
    assert "has no weights as safetensors" in lean
    assert "'hf download me/lean' fetches all of it" in lean
    assert f"the cache {tmp_path / 'cache' / 'hub'} does not have it" in other
    pull, none, stopped, now, said = begin(
        hub.url, tmp_path, "me/mule@refs/pr/1", "me/mule@v2", "stop", "me/mule", "me/mule@v1"
    )
    assert json.loads(pull) == tagged
    assert "me/mule at http" in none
    assert "has no branch, tag or commit 'v2'" in none
    assert (json.loads(stopped), json.loads(now)) == (newest, tagged)
    assert "cannot be reached" in said
    assert f"me/mule is taken from the cache, commit {COMMIT}" in said


def test_a_tokenizer_of_the_hub_is_that_of_its_revision(hub: Hub, tmp_path: Path) -> None:
    """Without the model's weights, and also where only the model's configuration declares the end."""
    text = write_text(tmp_path / "mine.txt")
    write_folder(hub.root / "mule", text, "llama")
    older = hub.root / f"mule@{OLDER}"
    shutil.copytree(hub.root / "mule", older)
    for name, change in (("tokenizer_config.json", {"eos_token": None}), ("config.json", {"eos_token_id": 1})):
        (older / name).write_text(json.dumps(json.loads((older / name).read_text()) | change))
    (hub.root / "text").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(hub.root / "mule" / name, hub.root / "text")
    names = ("text:me/mule", "text:me/mule@v1", f"text:me/mule@{OLDER}", "text:me/text", "text:me/text@main")
    found = begin(hub.url, tmp_path, *names)[:-1]
    assert found == [f"{end}\n" for end in ("</s>", "<s>", "<s>", "</s>", "</s>")]
    assert not any(file.endswith("safetensors") for file in hub.sent)
    *again, none, _ = begin(hub.url, tmp_path, *names, "text:me/mule@v2", HF_HUB_OFFLINE="1")
    assert again == found
    assert none.startswith("data.tokenizer: ")
