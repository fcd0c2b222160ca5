"""Real processes train a user's own module while peers join late, a stage is lost, and the run is resumed."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest

from muletrain.runs.folder import latest_checkpoint
from tests.fleet_run import checkpoint_weights
from tests.test_equivalence import relative_difference
from tests.test_factory import EXACT, loop_model, of
from tests.test_survival import Command
from tests.traced_models import train_by_loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ADDED = ["train.steps=100000", "checkpoint.every=2", "optimizer.lr=1e-4", "fleet.peers=2", "fleet.adopt_after=3"]
LOCAL = ["--listen", "127.0.0.1"]


class Machines:
    """Each command has a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[Command]()

    def found(self, *arguments: str, settings: list[str]) -> tuple[Command, str]:
        """The founder, and its ticket."""
        self._started.append(founder := Command(self._next(), "start", *LOCAL, *arguments, settings=settings))
        return founder, founder.wait_for("ticket")["ticket"]

    def join(self, ticket: str, *arguments: str) -> Command:
        options = [*LOCAL, "--threads", "1", "--name", f"machine-{len(self._started)}", *arguments]
        self._started.append(peer := Command(self._next(), "join", ticket, *options))
        return peer

    def _next(self) -> Path:
        return self._folder / str(len(self._started))

    def kill(self) -> None:
        for each in self._started:
            each.process.kill()
            each.process.wait()


def test_newcomers_a_lost_stage_and_a_resumed_run_change_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]))
    own = ["model.factory=tests.own_models:regression", "data.factory=tests.own_models:images_with_numbers"]
    trusts = ["--factory", "tests.own_models:regression"]
    machines = Machines(tmp_path)
    try:
        founder, ticket = machines.found(settings=[*EXACT, *own, "model.vocab=3", *ADDED])
        first = machines.join(ticket, "--stage", "1", *trusts)
        founder.wait_for("step_done", step=3)
        stranger = machines.join(ticket)
        assert stranger.process.wait(300) == 2
        assert "add --factory tests.own_models:regression" in stranger.errors()

        other = machines.join(ticket, "--stage", "0", *trusts)
        late = machines.join(ticket, "--stage", "1", *trusts)
        for newcomer in (other, late):
            newcomer.wait_for("step_applied")
        first.process.kill()  # its stage has another peer
        late.process.kill()  # and now none: a peer of stage 0 goes there, and the run goes back
        back = founder.wait_for("stepped_back")
        assert back["lost"] == [1]
        founder.wait_for("step_done", step=back["step"] + 3)

        founder.process.kill()
        other.process.kill()
        (run,) = (tmp_path / "0" / "runs").iterdir()
        before = latest_checkpoint(run).name
        founder, ticket = machines.found("--resume", str(run), settings=[])
        machines.join(ticket, *trusts)
        founder.wait_for("step_done", step=int(before.removeprefix("step-")) + 3)
        founder.process.send_signal(signal.SIGINT)
        founder.end(code=130)
    finally:
        machines.kill()
    steps = int(latest_checkpoint(run).name.removeprefix("step-"))
    facts = of("regression", *ADDED)
    model = loop_model(facts)
    loop = train_by_loop(model, facts, facts.source(facts.data()), lambda m, inputs, targets: m(inputs, targets))
    losses = list(itertools.islice(loop, steps))
    assert steps > back["to"]
    assert losses[-1] < losses[0]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert relative_difference(checkpoint_weights(run), weights) <= 1e-4
