"""Which stage a newcomer gets: for the lobby before the run and for any member later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from muletrain.errors import AdmissionError, CapacityError
from muletrain.policy.assignment import NOWHERE, Load, View

if TYPE_CHECKING:
    from muletrain.compute.estimate import Offer, StageMemory
    from muletrain.strategies.base import Strategy


class Newcomer(Protocol):
    """``stage``: the one it wants; None: any."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> int | None: ...
    @property
    def device(self) -> str: ...
    @property
    def offer(self) -> Offer: ...


def choose_stage(
    join: Newcomer, strategy: Strategy, needs: list[StageMemory], costs: list[float], kinds: list[list[str]]
) -> int:
    """The stage that the newcomer asks for, or that ``strategy`` assigns to it. ``needs``, ``costs``: memory and
    compute cost of each stage; ``kinds``: the device kinds of those who serve it. Raises AdmissionError or
    CapacityError."""
    stage, offer = join.stage, join.offer
    if stage is not None and stage >= len(needs):
        raise AdmissionError(f"stage {stage} was asked for, but the run has stages 0..{len(needs) - 1}")
    if stage is None:
        stage = next((move.target for move in strategy.assign(_view(join, needs, costs, kinds))), None)
    if stage is not None and needs[stage].fits(offer):
        return stage
    least = min(needs if stage is None else [needs[stage]], key=lambda n: n.total)
    raise CapacityError(
        f"the smallest stage on offer needs {least.need(offer)} ({least}), this machine may use {offer}: give it more memory "
        f"(--memory or compute.memory says how much it may use), or begin the run with more stages"
    )


def _view(join: Newcomer, needs: list[StageMemory], costs: list[float], kinds: list[list[str]]) -> View:
    offer = join.offer
    own = Load(
        NOWHERE,
        targets=frozenset(s for s, need in enumerate(needs) if need.fits(offer)),
        name=join.name,
        device=join.device,
        quarters=[4 * need.of_device(offer) // max(1, offer.device) for need in needs],
    )
    others = {f"{s}/{n}": Load(s, device=device) for s, here in enumerate(kinds) for n, device in enumerate(here)}
    return View({**others, "newcomer": own}, costs)


def mixing(stage: int, kinds: set[str], device: str) -> str:
    """What is to be said where ``stage`` is on other ``kinds`` than the newcomer's ``device``."""
    return (
        f"stage {stage} is on {', '.join(sorted(kinds))}, and now on {device}: where their arithmetic differs in the last bit, one of "
        f"them leaves, unless optimizer.state_device = 'cpu'"
    )
