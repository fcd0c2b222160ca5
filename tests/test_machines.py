"""Several machines: network namespaces joined by one veth pair, with nothing but TCP between them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muletrain.runs.join.patience import PATIENCE_S
from muletrain.runs.join.ticket import Ticket
from tests.chats import SMOLLM_3, chat_tokenizer
from tests.connected import connected, firewall, namespaces, output, ticket_in, trained, wait_for
from tests.fleet_run import checkpoint_weights
from tests.reference import train_plainly
from tests.test_equivalence import EXACT, facts_of, relative_difference
from tests.whole_model import hugging_face_folder

machines = pytest.fixture(connected)

TINY = ["--set", "model.width=64", "--set", "model.heads=2", "--set", "model.context=32"]


@namespaces
def test_two_machines_train_and_a_stranger_is_refused(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    founder = machines("a", "start", *TINY, "--set", "train.steps=100000", "--verbose")
    ticket = ticket_in(tmp_path / "a")
    before = output(machines("c", "status", ticket))
    assert "has not started" in before
    assert "stage 1 has no peer" in before
    # the end of the ticket protects it against typing errors; another run's ticket is whole, but of another secret
    assert "damaged" in output(machines("c", "join", ticket[:-6] + "AAAAAA"), code=2)
    assert "other" in (told := output(machines("c", "join", _with_other_secret(ticket)), code=2)) or "another" in told
    slow = ["--bandwidth", "2"]  # steps wait for the link: without it, training takes all cores from the commands
    joiner = machines("b", "join", ticket, "--data", "pydoc", "--memory", "2", "--name", "helping-hand", *slow)
    wait_for(lambda: trained(tmp_path / "b", "helping-hand") > 2)
    status: dict[str, Any] = {"step": 0}
    while not status["step"]:  # peers announce their step now and then
        time.sleep(3)
        told = output(machines("c", "status", ticket, "--json"))
        status = json.loads(told[told.index("{") :])  # after what standard error says
    assert [p["stage"] for p in status["peers"]] == [0, 1]
    assert 0 < status["step"] < status["steps"] == 100000
    assert 0 < status["loss"] < 10
    assert status["tokens_per_s"] > 0
    assert status["missing"] == []
    passed_on = ticket_in(tmp_path / "b")  # any member takes newcomers in
    late = machines("c", "join", passed_on, "--data", "pydoc", "--name", "late")
    wait_for(lambda: trained(tmp_path / "c", "late"))
    assert '"late"' in output(machines("c", "status", ticket, "--json"))
    output(machines("b", "stop"))  # of the run that this machine is in
    out, joined, came_later = output(founder, code=3), output(joiner), output(late)
    assert "serves stage" in came_later
    assert "stage 1 has no peer" in out, "it says what is missing while it waits"
    assert "validation loss" in out
    assert "prepares stage 1 (stages are 0 to 1)" in joined
    assert "serves stage 1" in joined
    assert re.search(r"step \d+/100000  loss \d", joined), "progress is shown there, too"
    assert "nobody" not in joined
    table = out[out.index("Sent over the network") :]
    assert "helping-hand" in table, "what other machines counted is in the report of 'start', too"
    parts = {p.name for p in (tmp_path / "a").glob("runs/*/checkpoints/step-*/*.safetensors")}
    assert parts == {"stage-0.safetensors", "stage-1.safetensors"}, "parts are collected where 'start' ran"


@namespaces
def test_a_stage_that_fits_nowhere_is_refused_with_the_numbers(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    machines("a", "start", *TINY)
    refused = output(machines("b", "join", ticket_in(tmp_path / "a"), "--memory", "0.0002"), code=2)
    assert re.search(r"needs [\d.]+ [MK]iB .* may use 2\d\d KiB", refused)
    assert "more memory" in refused


@pytest.mark.slow
@namespaces
def test_who_leaves_before_the_start_is_not_counted_on_and_any_member_lets_others_in(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """From a Hugging Face folder, too, which only the founder has, and only until it hands out the first weights."""
    first = hugging_face_folder(tmp_path / "llama")
    chat_tokenizer(tmp_path / "llama", SMOLLM_3, 400)
    settings = [
        "--set",
        "fleet.peers=3",
        "--set",
        "train.steps=6",
        "--set",
        "compute.precision=bf16",
        "--set",
        f"model.from={tmp_path / 'llama'}",
        "--set",
        "optimizer.lr=1e-30",
        "--set",
        "optimizer.weight_decay=0",
    ]
    founder = machines("a", "start", *TINY, *settings, "--json")
    ticket = ticket_in(tmp_path / "a")
    shutil.rmtree(tmp_path / "llama")
    leaver = machines("b", "join", ticket, "--stage", "1")
    ticket_in(tmp_path / "b")
    leaver.send_signal(signal.SIGINT)
    assert "left before the run began" in output(leaver, code=130)
    assert not list(tmp_path.glob("b/runs/*/ticket")), "the secret goes with the peer"
    second = machines("b", "join", ticket)
    wait_for(lambda: list(tmp_path.glob("b/runs/*/ticket")))
    passed_on = output(machines("b", "ticket")).strip()
    wait_for(lambda: any('"kind": "waiting"' in p.read_text() for p in tmp_path.glob("b/runs/*/*.jsonl")))
    third = machines("c", "join", passed_on)
    said = [json.loads(line) for line in output(founder).splitlines() if line.startswith("{")]
    assert re.search(r"waiting: .*2 of 3 peers ready", told := output(second)), "who waits is told for what"
    assert "serves stage" in told
    assert "serves stage" in output(third)
    by_kind = {kind: [e for e in said if e["kind"] == kind] for kind in {e["kind"] for e in said}}
    assert [e["ticket"] for e in by_kind["ticket"]] == [ticket]
    assert by_kind["run_started"][0]["peers"] == 3
    assert [e["step"] for e in by_kind["step_done"]] == [1, 2, 3, 4, 5, 6]
    assert by_kind["evaluated"][0]["step"] == 6
    parts = {p.name for p in (tmp_path / "a").glob("runs/*/checkpoints/*/*.safetensors")}
    assert parts == {"stage-0.safetensors", "stage-1.safetensors"}
    last = checkpoint_weights(next((tmp_path / "a").glob("runs/*")))
    assert all(torch.equal(last[name], first[name]) for name in first), "who joined served the folder's weights"
    logs = [json.loads(line) for m in "bc" for p in tmp_path.glob(f"{m}/runs/*/*.jsonl") for line in p.open()]
    assert [e["precision"] for e in logs if e["kind"] == "peer_joined"] == ["bf16", "bf16"], "as the run says"


@namespaces
@pytest.mark.slow
@pytest.mark.timeout(800)
def test_machines_behind_firewalls_train_by_way_of_another(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Two that nobody can connect to (one says so, the other does not know) serve adjacent stages."""
    settings = [*EXACT, "fleet.stages=3", "fleet.trainers=1"]
    firewall("b")
    firewall("c")
    founder = machines("a", "start", *(word for s in settings for word in ("--set", s)), "--verbose")
    ticket = ticket_in(tmp_path / "a")
    joiners = [
        machines("b", "join", ticket, "--stage", "1", "--name", "b", "--private"),
        machines("c", "join", ticket, "--stage", "2", "--name", "c"),
    ]
    facts, cache = facts_of(tmp_path, "fleet.stages=3")
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache))
    out, _ = founder.communicate(timeout=600)
    assert founder.returncode == 0, out
    for joiner in joiners:
        output(joiner)
    assert relative_difference(checkpoint_weights(next((tmp_path / "a").glob("runs/*"))), expected) <= 1e-5
    said = [e["message"] for e in _events(tmp_path) if e["kind"] == "note"]
    assert [m for m in said if "cannot be reached directly, only through " in m], said
    assert "relayed" in out[out.index("Sent over the network") :]


@namespaces
@pytest.mark.slow
def test_who_cannot_reach_the_founder_is_told_which_port_to_open(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    firewall("a")
    founder = machines("a", "start", *TINY, "--port", "4711")
    ticket = ticket_in(tmp_path / "a")
    begin = time.monotonic()
    told = output(machines("b", "join", ticket, "--private"), code=2)
    assert time.monotonic() - begin < PATIENCE_S + 60  # most of that imports
    assert "no member of the run could be reached" in told
    assert "TCP port 4711 of 10.99.0.1" in told
    founder.send_signal(signal.SIGINT)
    assert "TCP port 4711 of 10.99.0.1" in output(founder, code=130), "it says so itself"


def _events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for p in folder.glob("*/runs/*/*.jsonl") for line in p.open()]


def _with_other_secret(ticket: str) -> str:
    whole = Ticket.parse(ticket)
    return str(dataclasses.replace(whole, secret=bytes(32)))
