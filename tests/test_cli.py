"""The commands as a user types them: real processes, real runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import transformers

from muletrain.events import CheckpointWritten, read_events

SMALL = [
    "--set",
    "model.width=64",
    "--set",
    "model.heads=2",
    "--set",
    "model.layers=2",
    "--set",
    "model.context=32",
    "--set",
    "model.vocab=512",
]

TWO = ["--set", "fleet.peers=2"]
"""One peer for each stage: half the processes to start, where replicas make no difference."""


def start(*arguments: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "muletrain", *arguments]
    out = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, stdout=out, stderr=out, text=True, env={**os.environ, **env})


def muletrain(*arguments: str, cwd: Path, code: int = 0) -> str:
    """Standard output; standard error where the exit code should not be 0."""
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, out + err
    return out if code == 0 else err


def peers_left(folder: Path) -> list[str]:
    """Command lines of processes that still work in ``folder`` after 10 s, or are daemons of such (the kernel knows their
    directory)."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "cwd").resolve() == folder.resolve():
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which one small run was made, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    return folder, muletrain("run", *SMALL, "--set", "train.steps=6", "--trace", "out.json", cwd=folder)


def test_run_ends_with_a_report_and_leaves_nothing_running(trained: tuple[Path, str]) -> None:
    folder, out = trained
    (run,) = (folder / "runs").iterdir()
    report = (run / "report.txt").read_text()
    for expected in ("6 of 6 steps", "unigram", "The model writes"):
        assert expected in out
        assert expected in report
    for expected in ("interpolated bigram", "Sent over the network", "idle"):
        assert expected in report
        assert expected not in out, "--verbose prints it"
    first = [line.split()[0] for line in out[out.index("\nresult ") :].splitlines()[1:6]]
    assert first == ["result", "speed", "trouble", "files", "next"]
    manifest = json.loads((run / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    joined = [json.loads(line) for line in (run / "peer-0.jsonl").open() if '"peer_joined"' in line]
    assert [manifest["precision"]] == [e["precision"] for e in joined], "for --resume"
    assert list((run / "tensorboard").glob("events.*"))
    assert not (run / "ticket").exists(), "the secret stays behind"
    assert {p.stem for p in run.glob("peer-*.jsonl")} == {f"peer-{k}" for k in range(4)}
    assert peers_left(folder) == []


def test_a_trace_shows_the_slots_of_each_peer(trained: tuple[Path, str]) -> None:
    folder, out = trained
    assert "timeline of every peer: out.json" in out
    rows = json.loads((folder / "out.json").read_text())["traceEvents"]
    peers = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    worked = {(peers[row["pid"]], row["cat"]) for row in rows if row["ph"] == "X" and row["dur"] > 0}
    slots = ("receive", "compute", "send", "average")
    assert worked >= {(f"peer-{k}", slot) for k in range(4) for slot in slots}
    applied = [row for row in rows if row["ph"] == "X" and row["name"] == "apply"]
    assert len(applied) == 6 * 4


def test_exported_model_has_the_same_logits(trained: tuple[Path, str], tmp_path: Path) -> None:
    from muletrain.runs.checkpoint import Checkpoint

    folder, _ = trained
    (run,) = (folder / "runs").iterdir()
    muletrain("export", str(run), "--hf", str(tmp_path / "hf"), cwd=folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ours = Checkpoint.open(run).model()
    tokens = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer("def hello").input_ids) == "def hello"


def test_model_from_continues_at_the_same_loss(trained: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = trained
    (run,) = (folder / "runs").iterdir()
    before = json.loads(muletrain("eval", str(run), "--json", cwd=folder))
    muletrain("export", str(run), "--hf", str(tmp_path / "hf"), cwd=folder)
    still = [*TWO, "--set", "train.steps=1", "--set", "optimizer.lr=1e-30", "--set", "optimizer.weight_decay=0"]
    out = muletrain("run", "--json", "--set", f"model.from={tmp_path / 'hf'}", *still, cwd=tmp_path)
    events = [json.loads(line) for line in out.splitlines()]
    (evaluated,) = [e for e in events if e["kind"] == "evaluated"]
    kinds = [e["kind"] for e in events]
    assert kinds.count("run_prepared") == 1
    assert kinds.index("run_prepared") < kinds.index("step_done")
    assert evaluated["loss"] == pytest.approx(before["loss"], abs=1e-5)
    assert {k: evaluated[k] for k in ("unigram", "bigram")} == {k: before[k] for k in ("unigram", "bigram")}
    assert 0 < evaluated["bigram"] < evaluated["unigram"]


def test_generate_continues_the_prompt(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    (run,) = (folder / "runs").iterdir()
    text = muletrain("generate", str(run), "If the", "--tokens", "5", "--seed", "1", cwd=folder)
    assert text.startswith("If the")
    told = json.loads(muletrain("generate", str(run), "If the", "--tokens", "5", "--seed", "1", "--json", cwd=folder))
    assert told == {"step": 6, "prompt": "If the", "text": text.removesuffix("\n")}, "a seed gives the same text again"


def test_a_terminal_that_knows_only_ascii_gets_text_all_the_same(trained: tuple[Path, str]) -> None:
    """``LANG=C`` in a container, or a pipe with an old encoding: a character that it lacks ends no command."""
    folder, _ = trained
    (run,) = (folder / "runs").iterdir()
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    process = start("generate", str(run), "Déjà vu →", "--tokens", "2", cwd=folder, **ascii_only)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert out.startswith("D?j? vu ?")


def test_a_damaged_checkpoint_is_refused(trained: tuple[Path, str], tmp_path: Path) -> None:
    import shutil

    folder, _ = trained
    (run,) = (folder / "runs").iterdir()
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    part = tmp_path / "checkpoints" / "step-00000006" / "stage-1.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\x55")
    assert "damaged" in muletrain("eval", str(tmp_path), cwd=folder, code=2)


def test_ctrl_c_ends_the_run_in_order(tmp_path: Path) -> None:
    process = start("run", *SMALL, *TWO, "--set", "train.steps=5000", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while (
        not list(tmp_path.glob("runs/*/peer-0.jsonl"))
        or "step_done" not in next(tmp_path.glob("runs/*/peer-0.jsonl")).read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 130, out + err
    assert "stopping after this step; checkpoint and report follow" in out
    (log,) = tmp_path.glob("runs/*/peer-0.jsonl")
    (written,) = [e for e in read_events(log) if isinstance(e, CheckpointWritten)]
    assert 0 < written.step < 5000
    assert peers_left(tmp_path) == []


@pytest.mark.parametrize("moment", [0.5, 4.0])
def test_ctrl_c_before_training_leaves_nothing(tmp_path: Path, moment: float) -> None:
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as scratch:
        process = start("run", *SMALL, cwd=tmp_path, TMPDIR=scratch)
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=180)
        assert peers_left(tmp_path) == []
        assert list(Path(scratch).iterdir()) == [], "sockets and keys are removed"


@pytest.mark.parametrize("moment", [pytest.param(1.0, marks=pytest.mark.slow), 6.0])
def test_a_killed_command_leaves_no_process_and_no_temporary_file(tmp_path: Path, moment: float) -> None:
    """SIGKILL: its peers find out, tidy up, and go."""
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as scratch:
        process = start("run", *SMALL, cwd=tmp_path, TMPDIR=scratch)
        deadline = time.monotonic() + 60
        while not list(Path(scratch).iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(moment)
        process.kill()
        process.communicate(timeout=180)
        while peers_left(tmp_path):
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)
        assert list(Path(scratch).iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_ends_the_checkpoint_not_the_training(tmp_path: Path) -> None:
    """The checkpoint folder is a file: writing fails as on a full disk, and the run goes on to its end."""
    process = start("run", *SMALL, "--set", "train.steps=30", "--set", "checkpoint.every=10", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (found := list(tmp_path.glob("runs/*"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (found[0] / "checkpoints").write_text("in the way")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2, out + err
    assert "30 of 30 steps" in out
    assert "step 10" in out
    assert "final checkpoint" in err


def test_errors_name_the_field_and_leave_no_folder(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[model]\nhedas = 3\n")
    message = muletrain("run", "my.toml", cwd=tmp_path, code=2)
    assert "my.toml:2" in message
    assert "heads" in message
    assert "Traceback" not in message
    assert "data.path" in muletrain("run", "--set", "data.path=nothing/*.txt", cwd=tmp_path, code=2)
    assert peers_left(tmp_path) == []


def test_a_model_that_fits_no_peer_here_is_refused_at_once_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a short text. " * 100, encoding="utf-8")
    begin = time.monotonic()
    message = muletrain("run", "--set", "model.preset=gpt3-175b", "--set", "data.path=text.txt", cwd=tmp_path, code=2)
    assert time.monotonic() - begin < 20 * max(1.0, os.getloadavg()[0] / 2)
    assert re.search(r"stage 0 of 2 needs [\d.]+ TiB.* [\d.]+ [MG]iB \(4 peers share", message)
    assert "fleet.stages" in message
    assert not list((tmp_path / "cache").rglob("*.npy")), "before tokens are made"
    assert list(tmp_path.glob("runs/*/*.jsonl")) == [], "no peer was given work"
    assert peers_left(tmp_path) == []


@pytest.mark.parametrize(("peers", "code"), [(3, 0), (2, 2)])
def test_a_peer_that_dies_before_the_start_ends_only_a_run_that_needs_it(tmp_path: Path, peers: int, code: int) -> None:
    """Nobody else can come: the others must not wait for it for ever."""
    process = start("run", *SMALL, "--set", f"fleet.peers={peers}", "--set", "train.steps=2", cwd=tmp_path)
    deadline = time.monotonic() + 60 * max(1.0, os.getloadavg()[0] / 2)
    while len(children := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()) < peers:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(int(children[-1]), signal.SIGKILL)
    out, err = process.communicate(timeout=180 * max(1.0, os.getloadavg()[0] / 4))
    assert process.returncode == code, out + err
    if code:
        assert f"peer-{peers - 1} was killed" in err
    else:
        assert "peer-2 cannot take part: the run begins with 2 peers" in out
        table = out[out.index("Peers that gave up or ended early") :]
        assert "was killed by signal 9" in table.splitlines()[2]
    assert peers_left(tmp_path) == []


def test_help_and_config_answer_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    assert "join" in muletrain("--help", cwd=tmp_path)
    assert "[optimizer]" in muletrain("config", cwd=tmp_path)
    assert time.monotonic() - begin < 10 * max(1.0, os.getloadavg()[0] / 2)
