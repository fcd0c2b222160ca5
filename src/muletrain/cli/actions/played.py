"""A simulated fleet as a run on the page: the events of its peers, with the introductions that a real run has."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import TYPE_CHECKING

from muletrain import events as ev
from muletrain.cli.actions.scenario import scenario
from muletrain.config.costs import Costs
from muletrain.config.fleet_file import Fleet, load_located_fleet
from muletrain.config.load import located
from muletrain.dashboard.page import RunPage
from muletrain.errors import MuletrainError
from muletrain.sim.fleet.simulation import simulate_fleet, weather

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Play:
    """One play of a fleet file, every message of the production code on a virtual clock."""

    def __init__(self, path: Path, hours: float, overrides: Sequence[str]) -> None:
        """Raises MuletrainError for a fleet that cannot be played."""
        fleet, origins = load_located_fleet(path)
        with located(origins, Fleet):
            self._churn = weather(fleet.churn, path.parent)
            self._asked = scenario(fleet, self._churn, None, overrides, Costs(), plan=None, choice=None)
            self._scene, self._run = self._asked.scene()
        self._hours = hours
        self._known: set[str] = set()
        self._now, self._steps = 0.0, 0
        self.over = threading.Event()
        """Ends the play."""
        self.page = RunPage(f"{fleet.name} (simulated)", clock=lambda: self._now, config={"fleet": str(path)})

    def run(self) -> None:
        """Play to the end."""
        self._begin()
        try:
            simulate_fleet(
                self._scene,
                self._run,
                self._churn,
                hours=self._hours,
                fidelity="protocol",
                watch=self._see,
                planned=self._asked.planned,
                serving=self._asked.serving(self._scene),
                goes_on=lambda now_s, steps: not self.over.is_set(),
            )
            reason = "the simulated time is over"
        except MuletrainError as e:
            reason = str(e)
        self.page(ev.RunFinished(steps=self._steps, seconds=self._now, reason=reason, t=self._now, peer="play"))

    def _begin(self) -> None:
        cost, run = self._scene.cost, self._run
        self.page(
            ev.RunStarted(
                run_id="play",
                config_digest="",
                versions={},
                steps=run.train.steps,
                stages=len(self._scene.cut),
                peers=sum(kind.count for kind in self._scene.kinds),
                microbatches=run.microbatches,
                tokens_per_step=round(cost.tokens * run.microbatches),
            )
        )

    def _see(self, event: ev.Event) -> None:
        self._now = max(self._now, event.t)
        if isinstance(event, ev.MicrobatchTaken) and event.peer not in self._known:
            self._known.add(event.peer)
            self.page(self._joined(event.peer, event.stage, event.t))
        if isinstance(event, ev.StepDone):  # counts microbatches, and learns nothing
            self._steps = event.step
            event = dataclasses.replace(event, loss=math.nan, tokens=round(event.tokens * self._scene.cost.tokens))
        if not isinstance(event, ev.SlotWorked):
            self.page(event)

    def _joined(self, name: str, stage: int, t: float) -> ev.PeerJoined:
        kind = next((k for k in self._scene.kinds if name.rpartition("-")[0] == k.name), None)
        device = "" if kind is None else f"{kind.device}, {kind.region}"
        about = {"precision": "", "trainer": False, "params": 0, "threads": 0}
        return ev.PeerJoined(peer_id=name, name=name, stage=stage, device=device, t=t, peer=name, **about)  # type: ignore[arg-type]
