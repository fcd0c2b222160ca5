"""Which stage a newcomer gets: pure, for the lobby before the run and for any member later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.errors import AdmissionError, CapacityError
from muletrain.policy.seating import most_needed

if TYPE_CHECKING:
    from muletrain.compute.estimate import StageMemory
    from muletrain.policy.seats import Seats
    from muletrain.runs.join.lobby import Join


def planned(join: Join, seats: Seats | None) -> Join:
    """With the stage at which the plan has a seat for a machine of that name, unless it asks for one itself."""
    stage = None if seats is None else seats.stage_of(join.name)
    return join if stage is None or join.stage is not None else join.model_copy(update={"stage": stage})


def choose_stage(join: Join, needs: list[StageMemory], costs: list[float], kinds: list[list[str]]) -> int:
    """The most loaded stage that the newcomer can serve, or the one it wants. ``needs``, ``costs``: memory and compute cost of each
    stage; ``kinds``: the device kinds of those who serve it. Raises AdmissionError or CapacityError."""
    if join.stage is not None and join.stage >= len(needs):
        raise AdmissionError(f"stage {join.stage} was asked for, but the run has stages 0..{len(needs) - 1}")
    wanted, offer = range(len(needs)) if join.stage is None else [join.stage], join.offer
    fitting = [s for s in wanted if needs[s].fits(offer)]
    if not fitting:
        least = min((needs[s] for s in wanted), key=lambda n: n.total)
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
