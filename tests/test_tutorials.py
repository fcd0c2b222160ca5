"""The tutorials as a newcomer goes through them: every file is written, and every command typed, in the order of the page.

A tutorial's commands are typed as they stand, with these differences: a tiny model in place of one from the Hub, few steps of a
small model (``SMALL``), a free port, an hour for a day. Machines are folders on this computer, and a machine that is switched off is
killed. Left out are ``pip`` and ``hf``, and commands that need a bucket, files of the reader or several homes (``LEFT_OUT``): of
these ``test_docs.py`` parses the options and loads the configuration. So are commands about a run on machines that was left out.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from muletrain.runs.join.ticket import PREFIX
from tests.chats import QWEN_3, chat_tokenizer, chats, write_rows
from tests.processes import wait_for_none_in, working_in
from tests.traced_models import new_model

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs" / "tutorials").glob("*.md")}
SMALL = ("model.width=32", "model.heads=2", "model.layers=2", "model.context=32", "model.vocab=300", "train.batch=8")
TINY = ("fleet.peers=1", "fleet.stages=1", "model.context=48", "train.batch=4")
"""Of a run with a model of the Hub."""
LEFT_OUT = re.compile(
    r"^(pip|hf|until) |s3://|my\.toml|mine\.txt|join TICKET( --reliable)?$|--plan plan\.json|--name ben"
)
LONGEST_S = 480.0


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    body: str


def blocks(text: str) -> list[Block]:
    found = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found]


def lines(block: Block) -> list[str]:
    return [line.strip() for line in block.body.splitlines() if line and not line.startswith("#")]


class Reader:
    """Types the blocks of a page, one folder for each machine."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home, self.model = home, model
        self.ticket = ""
        self.machines: dict[str, subprocess.Popen[str]] = {}
        self.typed = list[str]()

    def go_through(self, page: str) -> None:
        for block in blocks(page):
            if block.title:
                (self.home / block.title).write_text(block.body, encoding="utf-8")
            elif block.language == "python":
                code = block.body.replace("Qwen/Qwen3-0.6B", str(self.model))
                self.run([sys.executable, "-c", code], self.home)
            elif block.language == "sh":
                for line in lines(block):
                    self.type(line)
        for name, machine in self.machines.items():
            said, _ = machine.communicate(timeout=LONGEST_S)
            assert machine.returncode in (0, 3, -signal.SIGKILL), f"{name}: {said}"

    def type(self, line: str) -> None:
        line, _, remark = (part.strip() for part in line.partition(" #"))
        alone = re.match(r"muletrain (status|stop|ticket)\b", line) and not self.machines
        if LEFT_OUT.search(line) or alone:
            return
        self.typed.append(line)
        if line.startswith("pkill"):
            return self.switch_off(line.split()[-1].strip('"'))
        words = shlex.split(self.adapted(line).replace("python", sys.executable, 1))
        if words[0] == "muletrain":
            words = [sys.executable, "-m", *words]
        if "Ctrl-C" in remark:
            self.interrupt(words)
        elif "start" in words[:4] and "--resume" not in words:
            self.machines["one"] = self.begin(words, self.home)
            self.ticket = self.ticket_of(self.machines["one"])
        elif "join" in words[:4]:
            name = words[words.index("--name") + 1]
            (self.home / name).mkdir()
            self.machines[name] = self.begin([*words, "--threads", "1", "--memory", "2"], self.home / name)
            self.wait_until_all_train(3)
        elif "start" in words[:4]:  # the end of a tutorial: it waits for others
            if (one := self.machines.get("one")) is not None:
                one.wait(LONGEST_S)  # as a reader waits for its report
            self.machines["again"] = self.begin(words, self.home)
            self.ticket_of(self.machines["again"])
            self.machines.pop("again").kill()
        else:
            self.run(words, self.home)

    def adapted(self, line: str) -> str:
        """The line for a slow computer without a network."""
        if line.startswith("muletrain plan"):
            line = line.partition(">")[0] + " --time-limit 1"
        settings: tuple[str, ...] = ()
        if re.match(r"muletrain (run|start|data)\b", line) and "--resume" not in line:
            settings = TINY if "model.from" in line else ("compute.threads=1",) if ".toml" in line else SMALL
            settings = () if "compute.memory" in line or "fleet.profile" in line else settings
            settings += ("train.steps=6",) if re.search(r"compute.memory|fleet.profile|train.steps=30$", line) else ()
        line = re.sub(r"Qwen/Qwen3-\S+B", str(self.model), line).replace("--port 4000", "--port 0")
        line = line.replace("model.context=1024", "model.context=48").replace("--hours 24", "--hours 1")
        line = line.replace("TICKET", self.ticket)
        if "runs/FOLDER" in line:
            newest = max((self.home / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
            line = line.replace("runs/FOLDER", str(newest))
        return " ".join([line, *(f"--set {setting}" for setting in settings)])

    def run(self, words: list[str], folder: Path) -> str:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def interrupt(self, words: list[str]) -> None:
        """Ctrl-C after some steps."""
        process = self.begin(words, self.home)
        for _ in self.waiting(process):
            if re.search(r"step \d+/", self.said(self.home)):
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(LONGEST_S) == 130, self.said(self.home)

    def begin(self, words: list[str], folder: Path) -> subprocess.Popen[str]:
        out = (folder / "said.txt").open("w")
        return subprocess.Popen(words, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True)

    def said(self, folder: Path) -> str:
        return (folder / "said.txt").read_text(encoding="utf-8")

    def ticket_of(self, machine: subprocess.Popen[str]) -> str:
        for _ in self.waiting(machine):
            if found := re.search(rf"{PREFIX}\S+", self.said(self.home)):
                return found[0]
        raise AssertionError(self.said(self.home))

    def wait_until_all_train(self, peers: int) -> None:
        """Once the last of the machines has joined, until some steps are done."""
        if len(self.machines) == peers:
            for _ in self.waiting(self.machines["one"]):
                if re.search(r"step \d+/", self.said(self.home)):
                    return
            raise AssertionError(self.said(self.home))

    def waiting(self, machine: subprocess.Popen[str]) -> Iterator[None]:
        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until and machine.poll() is None:
            yield
            time.sleep(0.2)

    def switch_off(self, name: str) -> None:
        """All processes of that machine, at once."""
        for process in working_in(self.home / name):
            os.kill(process, signal.SIGKILL)
        self.machines[name].wait()
        time.sleep(3.0)

    def tidy(self) -> None:
        for machine in self.machines.values():
            if machine.poll() is None:
                machine.kill()
                machine.wait()
        for folder in (self.home, *(self.home / name for name in self.machines if (self.home / name).is_dir())):
            for process in working_in(folder):
                os.kill(process, signal.SIGKILL)
            wait_for_none_in(folder, 30)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    model = tmp_path / "hub" / "model"
    chat_tokenizer(model, QWEN_3, 400)
    new_model("qwen3", vocab_size=400, bos_token_id=0, eos_token_id=1, pad_token_id=0).save_pretrained(model)
    (tmp_path / "home").mkdir()
    reader = Reader(tmp_path / "home", model)
    yield reader
    reader.tidy()


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"index"}))
def test_a_reader_gets_to_the_end(reader: Reader, name: str) -> None:
    reader.go_through(PAGES[name])
    assert reader.typed


PRELUDE = """
import muletrain
_train = muletrain.train
def train(**given):
    small = {"fleet": {"peers": 1, "stages": 1}, "compute": {"threads": 1, "precision": "fp32"}}
    given |= small | {"train": {"steps": 4}, "checkpoint": {"every": 2, "keep": 5}}
    if not isinstance(given.get("model"), str):
        given["model"] = {"width": 16, "heads": 2, "layers": 2, "context": 16, "vocab": 300}
    return _train(**given)
muletrain.train = train
my_measure = lambda model: sum(p.numel() for p in model.parameters())
"""
"""Makes the runs of a page small, and has what a page leaves to the reader."""


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/howto/notebooks.md"])
def test_the_python_of_other_pages_runs(reader: Reader, page: str) -> None:
    write_rows(reader.home / "chat.jsonl", chats(60))
    (reader.home / "corpus").mkdir()
    for k in range(20):
        (reader.home / "corpus" / f"{k}.txt").write_text(f"Mule {k} carries {k * k} bags over pass {k % 7}.\n" * 20)
    codes = [block.body for block in blocks((ROOT / page).read_text("utf-8")) if block.language == "python"]
    assert codes
    code = "\n".join([PRELUDE, *codes, "print(run.wait().step)"]).replace("Qwen/Qwen3-0.6B", str(reader.model))
    assert reader.run([sys.executable, "-c", code], reader.home).split()[-1] == "4"


def test_the_index_names_each_tutorial() -> None:
    named = set(re.findall(r"\]\((\S+)\.md\)", PAGES["index"]))
    assert named == PAGES.keys() - {"index"}


def test_most_commands_are_typed() -> None:
    """What is left out is little, and is known."""
    all_of_them = [
        line
        for page in PAGES.values()
        for block in blocks(page)
        if block.language == "sh" and not block.title
        for line in lines(block)
    ]
    left_out = [line for line in all_of_them if LEFT_OUT.search(line.partition(" #")[0].strip())]
    assert len(left_out) <= 12, left_out
    assert len(all_of_them) - len(left_out) >= 25
