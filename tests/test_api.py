"""muletrain from Python: scripts, event loops, callbacks, and what is left behind."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import pytest
import torch

import muletrain
from muletrain import api
from muletrain.errors import ConfigError, MuletrainError
from muletrain.events import RunFinished, RunStarted, StepDone

from .chats import SMOLLM_3, chat_tokenizer, chats
from .processes import wait_for_none_in, working_in
from .test_docs import parsed
from .traced_models import new_model

if TYPE_CHECKING:
    from collections.abc import Callable

TINY: dict[str, Any] = {
    "model": {"width": 16, "heads": 2, "layers": 2, "context": 16, "vocab": 300},
    "train": {"steps": 6, "batch": 4, "microbatch": 2},
    "fleet": {"peers": 2},
    "compute": {"threads": 1, "precision": "fp32"},
    "data": [f"Mule {k} carries {k * k} bags over pass {k % 7}, and rests at hut {k % 5}.\n" * 8 for k in range(60)],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_trains_and_takes_the_model_home(capfd: pytest.CaptureFixture[str]) -> None:
    run = muletrain.train(**TINY)
    assert "step 6/6" in capfd.readouterr().out
    assert not run.running
    assert run.step == 6
    assert run.loss is not None
    assert run.loss < 7
    status, last = run.status(), [e.loss for e in run.events() if isinstance(e, StepDone)][-1]
    assert (status["loss"], status["heldout_loss"]) == (last, run.loss)
    assert run.model()(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 300)
    assert run.tokenizer.decode(run.tokenizer.encode("a mule", add_special_tokens=False).ids) == "a mule"
    assert (run.export("out") / "model.safetensors").exists()
    assert run.folder is not None
    assert muletrain.load(run.folder).step == 6
    assert muletrain.generate(run.folder, "A mule", tokens=3).startswith("A mule")
    assert [e.step for e in run.events() if isinstance(e, StepDone)] == list(range(1, 7)), "also afterwards"


def test_rows_and_a_model_of_the_script_become_an_adapter(here: Path) -> None:
    """What lives in the script: a model and a tokenizer of transformers, and rows."""
    tokenizer = chat_tokenizer(here / "tokenizer", SMOLLM_3, 400)
    model = new_model("qwen2", vocab_size=400, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    run = muletrain.train(
        model=model,
        tokenizer=tokenizer,
        data=datasets.Dataset.from_list(chats(40)),
        adapter={"rank": 4, "targets": ["q_proj", "v_proj"]},
        train={"epochs": 1, "batch": 4, "microbatch": 2},
        fleet={"peers": 1, "stages": 1},
        compute={"threads": 1, "precision": "fp32"},
        show=False,
    )
    assert {f.name for f in run.export("adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert (run.export("whole", merge=True) / "model.safetensors").exists()


class Classes:
    """Numbers [4], and a class."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def __len__(self) -> int:
        return 60

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return torch.nn.functional.one_hot(torch.tensor(k % 4), 4).float(), k % self.classes


class Net(torch.nn.Module):
    """Numbers [B, 4] -> one of five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.cross_entropy(self.head(x), classes)


def test_a_module_and_a_dataset_of_the_script_train_and_come_back(here: Path) -> None:
    """From its weights of now, in two processes."""
    net = Net()
    with torch.no_grad():
        net.head.bias.copy_(torch.tensor([9.0, 0, 0, 0, 0]))
    settings: dict[str, Any] = {
        "train": {"steps": 2, "batch": 4, "microbatch": 2},
        "fleet": {"stages": 2, "peers": 2},
        "compute": {"threads": 1, "precision": "fp32"},
        "optimizer": {"lr": 1e-3, "warmup": 0},
    }
    run = muletrain.train(model=net, data=Classes(5), show=False, **settings)
    trained = run.model()
    assert isinstance(trained, Net)
    assert 8.9 < trained.head.bias[0] < 9
    assert isinstance(muletrain.load(run.folder or "").model(), Net), "as the run gives it"
    assert re.fullmatch(r"<Checkpoint .*step-00000002: step 2, 85 parameters>", repr(run.checkpoint))
    names = [f.name.rpartition("_")[0] for f in (here / "runs").rglob("*.pt")]
    assert sorted(names) == ["Classes", "Net"], "the run's lines name the classes"
    assert not torch.equal(trained.head.bias, net.head.bias)
    assert run.loss is not None
    assert (run.export("weights") / "model.safetensors").exists()
    assert run.folder is not None
    assert {f.parent for f in (here / "runs").rglob("*.pt")} == {run.folder / "script"}


def test_lists_of_token_ids_train_and_continue() -> None:
    ids = [[k % 7, (k + 1) % 7, (k + 2) % 7, (k + 3) % 7] * 6 for k in range(60)]
    run = muletrain.train(**(TINY | {"data": ids}), show=False)
    assert run.folder is not None
    assert all(word.isdecimal() for word in muletrain.generate(run.folder, "3 4", tokens=3).split())


def test_a_callback_gets_the_model_of_every_few_steps() -> None:
    run = muletrain.train(**TINY, checkpoint={"every": 2, "keep": 3}, wait=False, show=False)
    shapes: dict[int, tuple[int, ...]] = {}

    @run.on(muletrain.events.CheckpointWritten)
    def measure(event: muletrain.events.CheckpointWritten) -> None:
        model = muletrain.load(event.path).model()
        shapes[event.step] = tuple(model(torch.zeros(1, 4, dtype=torch.int64)).shape)

    run.wait(240)
    assert shapes == dict.fromkeys((2, 4, 6), (1, 4, 300))


def test_other_programs_threads_and_loops_may_train() -> None:
    """Two runs at once: one from a thread, one inside of a running event loop."""

    async def main() -> list[int]:
        beside = asyncio.create_task(asyncio.to_thread(lambda: muletrain.train(**TINY, show=False).step))
        run = muletrain.train(**TINY, show=False, wait=False)
        steps = [event.step async for event in run.events() if isinstance(event, StepDone)]
        return [await beside, max(steps)]

    assert asyncio.run(main()) == [6, 6]


def test_events_come_while_it_trains_and_a_callback_stops_it() -> None:
    run = muletrain.train(**(TINY | {"train": {"steps": 500, "batch": 4, "microbatch": 2}}), wait=False, show=False)

    @run.on(muletrain.events.StepDone)
    def stop_early(event: StepDone) -> None:
        if event.step == 5:
            run.stop()

    async def watched() -> list[str]:
        return [event.kind async for event in run.events()]

    kinds = asyncio.run(watched())
    run.wait(240)
    assert {RunStarted.kind, StepDone.kind, RunFinished.kind} <= {*kinds}
    assert 5 <= run.step < 500
    assert run.checkpoint.step == run.step
    assert run.status()["running"] is False


def test_what_a_callback_raises_ends_the_run() -> None:
    run = muletrain.train(**(TINY | {"train": {"steps": 500, "batch": 4, "microbatch": 2}}), wait=False, show=False)

    @run.on(muletrain.events.StepDone)
    def fails(event: StepDone) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        run.wait(240)
    assert run.step < 500


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: muletrain.train(model={"width": 15, "heads": 2}), r"model.heads: 2 heads do not divide"),
        (lambda: muletrain.train(modle={"width": 16}), r"modle"),
        (lambda: muletrain.train(train=3), r"train=3: give the fields of the section"),  # type: ignore[arg-type]
        (lambda: muletrain.train(model=7), r"model: int; give a name, a folder"),
        (lambda: muletrain.train(data=[3]), r"data: row 0 is int; give texts, dictionaries"),
        (
            lambda: muletrain.train(data=[[3, 2000]]),
            r"has 2002 tokens, model.vocab = 1024; set model.vocab to at least 2002",
        ),
        (
            lambda: muletrain.train(model=Net(), data=Classes(7)),
            r"compares 5 classes, and model.vocab = 7, .*: make it 7 in the module, or set model.vocab = 5 if no integer",
        ),
        (lambda: muletrain.train(data=Classes(5)), r"data.factory: its samples are for a module of yours"),
        (lambda: muletrain.train(model="x", tokenizer=object()), r"tokenizer: it belongs to a transformers model"),
        (lambda: muletrain.train(data="nowhere.txt"), r"no such file: .*nowhere.txt"),
        (lambda: muletrain.join("no ticket"), r"ticket"),
        (lambda: muletrain.load("nowhere"), r"nowhere"),
        (lambda: muletrain.train(data=chats(3)), r"declares no chat template"),
    ],
)
def test_errors_are_those_of_the_command(call: Callable[[], Any], why: str) -> None:
    with pytest.raises((MuletrainError, ConfigError), match=why):
        call().wait(240)
    assert not Path("runs").exists(), "what the script gave is gone, too"


SCRIPT = """
import muletrain, sys
run = muletrain.train(model={"width": 16, "heads": 2, "layers": 2, "context": 16, "vocab": 300}, train={"steps": 5000},
    fleet={"peers": 2}, compute={"threads": 1, "precision": "fp32"}, wait=False, show=False)
for event in run.events():
    if event.kind == "step_done":
        print("trains", flush=True)
        break
sys.stdin.read()
"""


OWN = """
import muletrain, torch
from torch import nn
from torch.utils.data import TensorDataset

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return ((x - y) ** 2).mean()

def go():
    data = TensorDataset(torch.randn(60, 4), torch.randn(60, 4))
    run = muletrain.train(model=Mine(), data=data, train={"steps": 2, "batch": 4, "microbatch": 2}, fleet={"stages": 2, "peers": 2},
        compute={"threads": 1, "precision": "fp32"})
    print("trained a", type(run.model()).__name__)

"""


@pytest.mark.parametrize("end", ["go()", 'if __name__ == "__main__":\n    go()'])
def test_a_script_needs_no_guard_and_may_have_one(end: str, here: Path) -> None:
    """For classes that are the script's own, too."""
    (here / "mine.py").write_text(OWN + end)
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines()[-1:] == ["trained a Mine"], done.stderr
    assert done.stdout.count("step 2/2") == 1, "the script ran once"


ENDS_S = 60.0
"""Most seconds to the end of the last process: a checkpoint is written first, and other tests run beside this one."""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_a_script_that_ends_leaves_no_process(how: signal.Signals | None, here: Path) -> None:
    """Killed, asked to end, by Ctrl-C, or at its end without ``wait``; without a __main__ guard."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert script.stdin is not None
        assert script.stdout.readline() == "trains\n"
        assert len(working_in(here)) >= 4, "script, command, two peers"
        if how is not None:
            script.send_signal(how)
        script.stdin.close()
        wait_for_none_in(here, ENDS_S)


def test_two_machines_meet_by_a_ticket() -> None:
    settings = {name: value for name, value in TINY.items() if name != "fleet"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    announced = [f"/ip4/127.0.0.1/tcp/{port}"]
    run = muletrain.start(**settings, fleet={"stages": 2}, port=port, announce=announced, name="first", show=False)
    assert run.ticket is not None
    other = muletrain.join(run.ticket, name="second", show=False)
    run.wait(240)
    other.wait(240)
    assert run.step == 6


def test_predictions_are_commands_that_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[str, ...]]()

    def note(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        said.append(words)
        return "{}"

    monkeypatch.setattr(api, "_command", note)
    fleet = tmp_path / "fleet.toml"
    fleet.touch()
    muletrain.plan(fleet, model="llama-7b", batch=8, train={"microbatch": 2})
    muletrain.simulate(fleet, model="llama-7b", batch=8, hours=1, train={"microbatch": 2})
    muletrain.doctor()
    for words in said:
        given = parsed(shlex.join(["muletrain", *words]))
        assert given


# Metrics, and the Hub -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "more"), [(muletrain.train, {"wait": False}), (muletrain.start, {"fleet": {"stages": 1}})]
)
def test_a_script_serves_metrics(begin: Callable[..., muletrain.Run], more: dict[str, Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found: list[str] = []
    run = begin(**{**TINY, **more}, metrics=port, show=False)

    @run.on(StepDone)
    def look(event: StepDone) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            found.append(answer.read().decode())

    run.wait()
    assert "muletrain_" in found[0]


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub's HTTP interface as an upload of small files needs."""

    made: ClassVar[list[dict[str, Any]]] = []
    files: ClassVar[dict[str, bytes]] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.endswith("/repos/create"):
            self.made.append(json.loads(body))
            self._say({"url": "https://huggingface.co/me/mule"})
        elif "/preupload/" in self.path:
            named = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in named]
            self._say({"files": modes})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._say(
                {
                    "success": True,
                    "commitOid": "0" * 40,
                    "commitUrl": "https://huggingface.co/me/mule/commit/0",
                    "hookOutput": "",
                }
            )

    def do_GET(self) -> None:
        self._say({"id": "me/mule", "sha": "0" * 40, "siblings": [], "private": True})

    do_HEAD = do_GET

    def _say(self, about: dict[str, Any]) -> None:
        said = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said)

    def log_message(self, *about: object) -> None:
        pass


def test_a_trained_model_goes_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this machine stands for the Hub; what it gets is what ``export`` writes."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    try:
        run = muletrain.train(**TINY, show=False)
        assert "me/mule" in run.push("me/mule")
    finally:
        server.shutdown()
        server.server_close()
    assert [(repo["name"], repo["organization"], repo.get("visibility", repo.get("private"))) for repo in Hub.made] in (
        [("mule", "me", "private")],
        [("mule", "me", True)],
    )
    exported = run.export("out")
    assert {name: content for name, content in Hub.files.items() if name != ".gitattributes"} == {
        str(path.relative_to(exported)): path.read_bytes() for path in exported.rglob("*") if path.is_file()
    }
