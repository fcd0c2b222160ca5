"""Which stage a newcomer gets, at any step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.errors import AdmissionError, CapacityError
from muletrain.policy.assignment import NOWHERE, Load, View

if TYPE_CHECKING:
    from muletrain.compute.estimate import StageMemory
    from muletrain.runs.join.messages import JoinRequest
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class Seating:
    """The run's stages: the memory that each needs, its compute cost, and the strategy that assigns peers to them."""

    needs: list[StageMemory]
    costs: list[float]
    strategy: Strategy

    @property
    def stages(self) -> int:
        return len(self.needs)

    def choose(self, newcomer: JoinRequest, kinds: list[list[str]]) -> int:
        """The stage that ``newcomer`` asks for, or the one that the strategy assigns. ``kinds``: device kinds of each
        stage's peers. Raises AdmissionError for a stage that does not exist, CapacityError for too little memory."""
        stage, offer = newcomer.stage, newcomer.offer
        if stage is not None and stage >= self.stages:
            raise AdmissionError(f"stage {stage} was asked for, but the run has stages 0..{self.stages - 1}")
        if stage is None:
            stage = next((move.target for move in self.strategy.assign(self._view(newcomer, kinds))), None)
        if stage is not None and self.needs[stage].fits(offer):
            return stage
        least = min(self.needs if stage is None else [self.needs[stage]], key=lambda n: n.total)
        raise CapacityError(
            f"the smallest stage on offer needs {least.need(offer)} ({least}), this machine may use {offer}: give it "
            f"more memory (--memory or compute.memory says how much it may use), or begin the run with more stages"
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
