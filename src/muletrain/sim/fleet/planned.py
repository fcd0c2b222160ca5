"""Membership that a strategy plans before the run begins."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from muletrain.errors import CapacityError
from muletrain.policy.rebalance import stage_to_help
from muletrain.sim.setting import seated

if TYPE_CHECKING:
    from muletrain.sim.setting import Setting
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class Planned:
    """Planned membership: kind and stage of each machine by name, spares included; and the stage of each client of a
    hub."""

    strategy: Strategy
    kinds: dict[str, int]
    stages: dict[str, int]
    clients: dict[str, int] = field(default_factory=dict)


def as_hub(setting: Setting, strategy: Strategy) -> Planned:
    """Returns the hub that a fleet founds without a plan: reliable machines are servers, and each unreliable machine is
    a client of the stage that gains most (``runs.join.seating``). Raises CapacityError."""
    kinds, stages, clients = dict[str, int](), dict[str, int](), dict[str, int]()

    def named(kind: int) -> str:
        name = f"{setting.kinds[kind].name}-{len(kinds)}"
        kinds[name] = kind
        return name

    able = [replace(kind, count=kind.count if kind.reliable else 0) for kind in setting.kinds]
    if not any(kind.count for kind in able):
        raise CapacityError(
            "machines[0].reliable: a hub needs reliable machines as servers, and there are none; add one, or use strategy swarm"
        )
    machines = list[float]()
    for stage, counts in enumerate(seated(replace(setting, kinds=tuple(able)))):
        stages.update({named(k): stage for k, n in enumerate(counts) for _ in range(n)})
        machines.append(sum(counts))
    for k, kind in enumerate(setting.kinds):
        for _ in range(0 if kind.reliable else kind.count):
            chosen = stage_to_help([s.forward_flops for s in setting.cost.stages], machines, kind.fits)
            assert chosen is not None  # a setting has no kinds that hold no stage
            machines[chosen] += 1
            clients[named(k)] = chosen
    return Planned(strategy, kinds, stages, clients)
