"""A stage without peers for long: trainers and replicas wait for the peer that takes its state, however long that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from muletrain.runtime.checkpoint.checkpointing import Parts
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import readable

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(600)


def test_trainers_wait_for_a_stage_as_long_as_the_run_does() -> None:
    """They gave up after 60 tries, nine minutes, where the run promises to wait for a machine for fifteen."""
    faults = (Fault(1.5, "kill", ("peer-1a",)), Fault(800.0, "join", ("peer-1j",)))
    outcome = play(Scenario(104, (1, 1), 1, 3, 6, 0.01, faults, checkpoint_every=1, adopt_after_s=5.0))
    assert outcome.ends == dict.fromkeys(("peer-0a", "peer-1j"), "finished"), "\n".join(readable(outcome))


@pytest.mark.parametrize("comes_on", [True, False])
def test_a_peer_whose_state_comes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch, comes_on: bool) -> None:
    """3.6 GB at 20 Mb/s take 24 minutes."""
    base: Callable[..., Any] = Parts.base

    async def slowly(self: Parts, *args: Any) -> Any:
        for _ in range(150 if self._ctx.roster.own.stage == 1 else 0):
            await self._ctx.clock.sleep(10.0)
            self._ctx.net._moved += 10_000 if comes_on else 0  # type: ignore[attr-defined]
        return await base(self, *args)

    monkeypatch.setattr(Parts, "base", slowly)
    lost = Fault(2.6, "kill", ("peer-1a",))
    scenario = Scenario(102, (2, 1), 2, 4, 6, 0.01, (lost,), apart=True, checkpoint_every=1, adopt_after_s=5.0)
    outcome = play(scenario)
    ended = [peer for peer, end in outcome.ends.items() if end == "finished"]
    assert (len(ended) == 2) == comes_on, "\n".join(readable(outcome))
