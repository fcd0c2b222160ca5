"""Machines without the model that an adapter belongs to take its weights from others; machines with it do not."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.runs.folder import latest_checkpoint

from .chats import chats, write_rows
from .connected import wait_for
from .fleet_run import checkpoint_weights
from .reference import train_plainly
from .test_adapters import EXACT, Peft, base_of, facts_of, own
from .test_equivalence import relative_difference
from .test_factory_fleet import Machines

if TYPE_CHECKING:
    from pathlib import Path

    from .test_survival import Command

pytestmark = [
    pytest.mark.timeout(600),
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User")),
]
COME = "come from other peers"
RUN = [
    "fleet.peers=2",
    "fleet.adopt_after=3",
    "checkpoint.every=2",
    "train.steps=100000",
    "optimizer.lr=1e-4",
    "optimizer.schedule=constant",
]


def notes(peer: Command) -> str:
    return " ".join(e["message"] for e in peer.said if e["kind"] == "note")


def test_newcomers_take_what_they_lack_and_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(tmp_path / "base", "qwen2", torch.bfloat16)
    data = write_rows(tmp_path / "chat.jsonl", chats(60, silent=True))
    settings = [*EXACT, *RUN, f"model.from={base}", f"data.path={data}"]
    machines = Machines(tmp_path)

    def machine(name: str) -> None:
        """The next command runs on a machine with this cache."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{name}"))

    try:
        machine("founder")
        founder, ticket = machines.found(settings=settings)
        machine("first")
        first = machines.join(ticket, "--stage", "1")
        founder.wait_for("step_done", step=2)
        assert COME in notes(first), "the founder sent the base of stage 1"
        assert (
            len(list((tmp_path / "cache-first").rglob("*.base")))
            == len(list((tmp_path / "cache-first").rglob("*.manifest")))
            > 0
        )

        machine("late")
        late = machines.join(ticket, "--stage", "1")
        machine("with the model")
        owner = machines.join(ticket, "--stage", "0", "--model", str(base))
        for newcomer in (late, owner):
            newcomer.wait_for("step_applied")
        assert COME in notes(late)
        assert COME not in notes(owner), "it has a folder with the same weights"
        machine("late")
        again = machines.join(ticket, "--stage", "1")
        again.wait_for("step_applied")
        assert COME not in notes(again), "they are in its cache"

        for peer in (first, late, again):  # stage 1 is lost: the owner goes there
            peer.process.kill()
        back = founder.wait_for("stepped_back")
        founder.wait_for("step_done", step=back["step"] + 3)
        founder.process.send_signal(signal.SIGINT)
        founder.end(code=130)
    finally:
        machines.kill()
    (run,) = (tmp_path / "0" / "runs").iterdir()
    steps = int(latest_checkpoint(run).name.removeprefix("step-"))
    facts, cache = facts_of(tmp_path, "qwen2", *RUN, f"train.steps={steps}")
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache), Peft(facts, base))
    assert relative_difference(own(checkpoint_weights(run)), own(expected)) <= 1e-4


def test_servers_and_clients_of_a_hub_take_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(tmp_path / "base", "qwen2", torch.bfloat16)
    data = write_rows(tmp_path / "chat.jsonl", chats(60, silent=True))
    settings = [*EXACT, "train.steps=100000", "train.microbatch=4", f"model.from={base}", f"data.path={data}"]
    machines = Machines(tmp_path)
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-founder"))
        founder, ticket = machines.found("--strategy", "hub", settings=settings)
        started = {}
        for name, kind in (("server", ["--reliable"]), ("client", [])):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{name}"))
            started[name] = machines.join(ticket, *kind)
        everyone = [founder, *started.values()]

        def counted() -> bool:
            work = [e for peer in everyone for e in list(peer.said) if e["kind"] == "pool_worked"]
            return any("machine-2" in json.dumps(e) for e in work)

        wait_for(counted)  # the client's work counts
        assert all(COME in notes(peer) for peer in started.values())
        founder.process.send_signal(signal.SIGINT)
        founder.end(code=130)
    finally:
        machines.kill()
