"""Which stage a newcomer gets: pure, for the lobby before the run and for any member later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from muletrain.errors import AdmissionError, CapacityError
from muletrain.policy.seating import most_needed

if TYPE_CHECKING:
    from muletrain.compute.estimate import Offer, StageMemory
    from muletrain.policy.seats import Seats


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


def wanted(join: Newcomer, seats: Seats | None) -> int | None:
    """The stage that it asks for, or at which the plan has a seat for a machine of that name; None: any."""
    return join.stage if join.stage is not None or seats is None else seats.stage_of(join.name)


def choose_stage(
    join: Newcomer, seats: Seats | None, needs: list[StageMemory], costs: list[float], kinds: list[list[str]]
) -> int:
    """The stage that is ``wanted``, or the most loaded one that the newcomer can serve.
    ``needs``, ``costs``: memory and compute cost of each stage; ``kinds``: the device kinds of those who serve it. Raises AdmissionError or
    CapacityError."""
    stage = wanted(join, seats)
    if stage is not None and stage >= len(needs):
        raise AdmissionError(f"stage {stage} was asked for, but the run has stages 0..{len(needs) - 1}")
    stages, offer = range(len(needs)) if stage is None else [stage], join.offer
    fitting = [s for s in stages if needs[s].fits(offer)]
    if not fitting:
        least = min((needs[s] for s in stages), key=lambda n: n.total)
        raise CapacityError(
            f"the smallest stage on offer needs {least.need(offer)} ({least}), this machine may use {offer}: give it more memory "
            f"(--memory or compute.memory says how much it may use), or begin the run with more stages"
        )
    unmixed = [s for s in fitting if set(kinds[s]) <= {join.device}]
    quarters = [4 * need.of_device(offer) // max(1, offer.device) for need in needs]
    return most_needed(unmixed or fitting, [len(k) for k in kinds], costs, quarters)


def mixing(stage: int, kinds: set[str], device: str) -> str:
    """What is to be said where ``stage`` is on other ``kinds`` than the newcomer's ``device``."""
    return (
        f"stage {stage} is on {', '.join(sorted(kinds))}, and now on {device}: where their arithmetic differs in the last bit, one of "
        f"them leaves, unless optimizer.state_device = 'cpu'"
    )
