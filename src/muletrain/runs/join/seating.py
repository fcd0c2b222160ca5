"""Chooses a newcomer's stage, at any step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import AdmissionError, CapacityError
from muletrain.policy.assignment import NOWHERE, Load, View
from muletrain.policy.rebalance import stage_to_help

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.compute.estimate import StageMemory
    from muletrain.runs.join.messages import JoinRequest
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class Seating:
    """The run's stages: memory needed by each, compute cost of each, the strategy that assigns peers, memory needed of
    a client by each, and stages of planned clients by name."""

    needs: list[StageMemory]
    costs: list[float]
    strategy: Strategy
    client_needs: list[StageMemory] = field(default_factory=list)
    helpers: dict[str, int] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.needs)

    def choose(self, newcomer: JoinRequest, kinds: list[list[str]]) -> int:
        """The stage that ``newcomer`` asks for, or the stage that the strategy assigns. ``kinds``: device kinds of each
        stage's peers. Raises AdmissionError for a stage that does not exist, CapacityError for too little memory."""
        stage = newcomer.stage
        if stage is None:
            stage = next((move.target for move in self.strategy.assign(self._view(newcomer, kinds))), None)
        return self._checked(newcomer, stage, self.needs)

    def is_client(self, newcomer: JoinRequest) -> bool:
        """Is ``newcomer`` a client? A plan decides for the machines that it names, and the owner for other machines."""
        if newcomer.name in self.helpers:
            return True
        return newcomer.client and self.strategy.pooled and not self.strategy.has_place(newcomer.name)

    def choose_for_client(self, client: JoinRequest, speeds: Sequence[float]) -> int:
        """The stage that ``client`` asks for, the planned stage, or the stage with the largest gain. ``speeds``: the
        total speed of each stage's machines, in any unit. Raises as ``choose``."""
        stage = self.helpers.get(client.name) if client.stage is None else client.stage
        if stage is None:
            fits = [s for s, need in enumerate(self.client_needs) if need.fits(client.offer)]
            stage = stage_to_help(self.costs, speeds, fits)
        return self._checked(client, stage, self.client_needs)

    def _checked(self, newcomer: JoinRequest, stage: int | None, needs: list[StageMemory]) -> int:
        """``stage``, if that exists and fits. Raises AdmissionError or CapacityError."""
        offer = newcomer.offer
        if stage is not None and stage >= self.stages:
            raise AdmissionError(f"stage {stage} was asked for, but the run has stages 0..{self.stages - 1}")
        if stage is not None and needs[stage].fits(offer):
            return stage
        least = min(needs if stage is None else [needs[stage]], key=lambda n: n.total)
        raise CapacityError(
            f"the smallest stage on offer needs {least.need(offer)} ({least}), this machine may use {offer}{least.swapping(offer)}: "
            f"give it more memory (--memory or compute.memory says how much it may use), or begin the run with more stages"
        )

    def _view(self, newcomer: JoinRequest, kinds: list[list[str]]) -> View:
        offer = newcomer.offer
        own = Load(
            NOWHERE,
            targets=frozenset(s for s, need in enumerate(self.needs) if need.fits(offer)),
            name=newcomer.name,
            device=newcomer.device,
            quarters=[4 * need.of_device(offer) // max(1, offer.device) for need in self.needs],
        )
        others = {f"{s}/{n}": Load(s, device=device) for s, here in enumerate(kinds) for n, device in enumerate(here)}
        return View({**others, "newcomer": own}, self.costs)
