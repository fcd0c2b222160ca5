"""The files of ``deploy/``: the commands in them run as processes of this machine, as the launcher would start them. No
container engine, Slurm or Kubernetes is here: their own words are checked as far as a schema or a shell can."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from muletrain.config.load import load_config
from muletrain.runs.folder import latest_checkpoint

from .test_docs import check, parsed
from .test_survival import events_in, of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SMALL = (
    "model.width=32",
    "model.heads=2",
    "model.context=32",
    "train.microbatch=2",
    "train.batch=8",
    "data.share=true",
)
LONG = ("train.steps=100000", "checkpoint.every=5")
pytestmark = pytest.mark.timeout(600)


class Started:
    """Commands that run at once, each in its folder, with ``muletrain`` on the path. All are ended in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._started = folder, list[subprocess.Popen[str]]()
        program = folder / "bin" / "muletrain"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m muletrain "$@"\n', encoding="utf-8")
        for script in ("join-when-ready", "found-or-return"):
            shutil.copy(DEPLOY / script, program.parent)
        for file in program.parent.iterdir():
            file.chmod(0o755)
        self._path = os.pathsep.join([str(program.parent), os.environ["PATH"]])

    def start(self, words: list[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
        cwd.mkdir(exist_ok=True)
        known = {**os.environ, "PATH": self._path, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        with (self.folder / f"{len(self._started)}.log").open("w") as log:
            process = subprocess.Popen(words, cwd=cwd, env=known, stdout=log, stderr=log, text=True, process_group=0)
        self._started.append(process)
        return process

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in self._started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                process.wait()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    commands = Started(tmp_path)
    yield commands
    commands.end()


def run_of(folder: Path, kind: str, started: Started, steps: int = 1) -> Path:
    """The founder's run folder, once its events reach that many ``step_done`` or other events of the ``kind``."""
    until = time.monotonic() + 240.0
    while time.monotonic() < until:
        for run in folder.glob("runs/*-start*"):
            if len(of_kind(events_in(run), kind)) >= steps:
                return run
        time.sleep(0.5)
    raise AssertionError(f"no {kind} in {folder}:\n{started.logs()}")


def settings(*fields: str) -> str:
    return " ".join(f"--set {field}" for field in fields)


def test_three_services_of_the_compose_file_train_and_survive_the_loss_of_one(started: Started, tmp_path: Path) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    shared = tmp_path / "shared"

    def service(name: str) -> subprocess.Popen[str]:
        about = compose["services"][name]
        words = [*about["entrypoint"], *about["command"]]
        words = [word.replace("$$", "$").replace("/shared", str(shared)).replace("--port 4000", "") for word in words]
        options = settings(*SMALL, *LONG) + " --listen 127.0.0.1"
        cwd = shared if about.get("working_dir") == "/shared" else tmp_path / name
        return started.start(words, cwd, RUN_OPTIONS=options)

    lost, kept = service("peer-b"), service("peer-a")  # they wait for the ticket
    founder = service("founder")
    run = run_of(shared, "step_done", started, 3)
    os.killpg(lost.pid, signal.SIGKILL)
    done = len(of_kind(events_in(run), "step_done"))
    run_of(shared, "step_done", started, done + 5)
    assert {e["peer"] for e in of_kind(events_in(run), "run_started")} >= {"founder"}
    founder.send_signal(signal.SIGTERM)  # 'docker compose stop'
    assert founder.wait(120) in (0, 143), started.logs()
    assert latest_checkpoint(run) is not None
    assert kept.wait(120) == 0, started.logs()


def test_jobs_of_a_slurm_array_train_and_come_back_after_a_preemption(started: Started, tmp_path: Path) -> None:
    script = tmp_path / "spool" / "slurm_script"  # Slurm runs a copy
    script.parent.mkdir()
    shutil.copy(DEPLOY / "slurm.sh", script)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "deploy").symlink_to(DEPLOY)

    def job(index: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
        return started.start(
            ["bash", str(script), *arguments],
            tmp_path / "work",
            SLURM_SUBMIT_DIR=str(tmp_path / "work"),
            SLURM_ARRAY_TASK_ID=str(index),
            SLURM_CPUS_PER_TASK="1",
            SLURM_RESTART_COUNT=str(restarts),
        )

    founder = job(0, *shlex.split(settings(*SMALL, *LONG, "fleet.peers=3")), "--listen", "127.0.0.1")
    job(1)
    preempted = job(2)
    run = run_of(tmp_path / "work", "step_done", started, 3)
    preempted.send_signal(signal.SIGTERM)
    preempted.wait(120)
    assert "job-2" in {e["name"] for e in of_kind(events_in(run), "peer_left")}, started.logs()
    job(2, restarts=1)
    done = len(of_kind(events_in(run), "step_done"))
    until = time.monotonic() + 240.0
    while sum(e["name"] == "job-2" for e in of_kind(events_in(run), "peer_joined")) < 2:
        assert time.monotonic() < until, started.logs()
        time.sleep(0.5)
    run_of(tmp_path / "work", "step_done", started, done + 3)

    os.killpg(founder.pid, signal.SIGKILL)  # its node is lost: the others go on, and it comes back
    (first,) = (tmp_path / "work" / "runs").glob("*-start*")
    joined = len(list((tmp_path / "work" / "runs").glob("*-join*")))
    back = job(0, restarts=1)
    until = time.monotonic() + 240.0
    while not any("step_applied" in path.read_text() for path in folders(tmp_path / "work", joined)):
        assert time.monotonic() < until, started.logs()
        time.sleep(0.5)
    assert [*(tmp_path / "work" / "runs").glob("*-start*")] == [first], "no second run began"
    back.send_signal(signal.SIGTERM)
    assert back.wait(120) in (0, 143), started.logs()


def folders(work: Path, known: int) -> list[Path]:
    """The events of machines that joined after as many others."""
    return [path for run in sorted(work.glob("runs/*-join*"))[known:] for path in run.glob("*.jsonl")]


def test_a_machine_that_waits_for_a_ticket_gives_up(tmp_path: Path) -> None:
    waiting = subprocess.run(
        [DEPLOY / "join-when-ready", tmp_path],
        env={**os.environ, "MULETRAIN_WAIT_S": "1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert waiting.returncode == 2
    assert "is 'muletrain start' running there?" in waiting.stderr


def commands_in(text: str) -> list[str]:
    """Commands of ours that a launcher's file runs, or tells people to type, up to the first word of the shell."""
    found = re.findall(r"muletrain (?:start|join|ticket|status)\b[^;\n`|)>\"$'\]]*", text)
    return [line.strip().removesuffix("--set").rstrip(" ,:") for line in found]


@pytest.mark.parametrize("file", sorted(path.name for path in DEPLOY.iterdir() if path.suffix != ".json"))
def test_every_command_of_a_launcher_parses(file: str) -> None:
    for line in commands_in((DEPLOY / file).read_text()):
        lacks_ticket = line in ("muletrain join", "muletrain join --private")  # a variable of the shell
        check(parsed(f"{line} TICKET" if lacks_ticket else line))


def test_the_manifest_for_kubernetes_is_one(tmp_path: Path) -> None:
    """Each object names volumes that it has, the configuration loads, and no container runs as root."""
    objects: list[Any] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    by_name = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    (tmp_path / "my.toml").write_text(by_name["ConfigMap", "muletrain"]["data"]["my.toml"])
    assert load_config(tmp_path / "my.toml").fleet.peers == by_name["Job", "muletrain-peers"]["spec"]["completions"] + 1
    for job in (o for o in objects if o["kind"] == "Job"):
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    founder, peer = (
        by_name["Job", f"muletrain-{name}"]["spec"]["template"]["spec"]["containers"][0]
        for name in ("founder", "peers")
    )
    script, both = founder["command"]
    assert (DEPLOY / script).exists()
    for line in (f"start {founder['args'][0]} {both}", f"start --resume {both}", f"join TICKET {both}"):
        check(parsed(f"muletrain {line}"))
    check(parsed(f"muletrain {' '.join(peer['args'])}".replace("/ticket/ticket", "TICKET")))


@pytest.mark.parametrize("name", ["slurm.sh", "join-when-ready", "found-or-return"])
def test_scripts_are_read_by_their_shells(name: str) -> None:
    shell = (DEPLOY / name).read_text().splitlines()[0].removeprefix("#!")
    subprocess.run([shell, "-n", DEPLOY / name], check=True)


def test_the_image_gets_what_the_package_needs() -> None:
    """The build's context has every file that the Dockerfile copies, and the extras exist."""
    text, ignored = (DEPLOY / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M) for word in line.split()[:-1]]
    for path in (word for word in copied if not word.startswith("--")):
        assert (ROOT / path).exists()
        assert f"!{path}" in ignored.splitlines()
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)
    assert {*extras.split(",")} <= {*project["optional-dependencies"]}
