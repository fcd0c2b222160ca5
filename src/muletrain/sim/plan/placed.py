"""Layouts of strategy ``pipeline``: machines by stage and pipeline, to be estimated and played."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from muletrain.planning.splits import Station, pipeline_shares, roughly_s
from muletrain.sim.fleet.rates import TRAINERS
from muletrain.sim.setting import seat
from muletrain.sim.steps.endings import ended_s
from muletrain.sim.steps.steps import Cast
from muletrain.strategies.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.fleet_file import Link
    from muletrain.planning.placement import Assignment
    from muletrain.sim.plan.question import Scene
    from muletrain.strategies.pipeline import Schedule


@dataclass(frozen=True)
class Placed:
    """A layout; ``kinds``: the kind of each machine (``Setting.kinds``)."""

    scene: Scene
    kinds: tuple[int, ...]
    names: tuple[str, ...]
    assignment: Assignment
    """A machine may serve several pipelines of its stage."""
    spares: tuple[tuple[int, str], ...]
    """(kind, name) of machines that hold some stage and have no place."""
    complete: bool = True
    """False: the time limit ended the search."""

    @classmethod
    def of(cls, scene: Scene, every: Sequence[tuple[int, str]], assignment: Assignment) -> Placed:
        """The layout of ``every`` machine, given as (kind, name); machines without a place are spares."""
        used = {d for row in assignment for d in row}
        spares = tuple(machine for d, machine in enumerate(every) if d not in used)
        return cls(scene, tuple(k for k, _ in every), tuple(name for _, name in every), assignment, spares)

    @cached_property
    def everyone(self) -> tuple[tuple[int, int], ...]:
        """(stage, kind) of all averaging machines: in the order of stages and pipelines, then spares, seated as in a
        live run."""
        peers = [(s, self.kinds[d]) for s, devices in enumerate(self.assignment) for d in dict.fromkeys(devices)]
        serving = [[0] * len(self.scene.setting.kinds) for _ in self.assignment]
        for s, k in peers:
            serving[s][k] += 1
        spares = [k for k, _ in self.spares]
        return (*peers, *zip(seat(self.scene.setting, spares, serving), spares, strict=True))

    @cached_property
    def serving(self) -> list[list[int]]:
        """By stage and kind."""
        found = [[0] * len(self.scene.setting.kinds) for _ in self.assignment]
        for s, k in self.everyone:
            found[s][k] += 1
        return found

    def cast(self, schedule: Schedule) -> Cast:
        """The cast of a played step. Machines that stay train, if there are any, in the founder's order."""
        seats = tuple(tuple(self.names[d] for d in devices) for devices in self.assignment)
        names = (*(name for row in seats for name in dict.fromkeys(row)), *(name for _, name in self.spares))
        stays = [self.scene.setting.kinds[k].reliable for _, k in self.everyone]
        ranked = sorted(range(len(names)), key=lambda n: not stays[n])
        return Cast(
            self.everyone,
            tuple(ranked[: self.scene.run.fleet.trainers or TRAINERS]),
            Pipeline(seats, self.shares, schedule),
            names,
        )

    def kind(self, stage: int, pipeline: int) -> int:
        return self.kinds[self.assignment[stage][pipeline]]

    def link(self, a: int, b: int) -> Link:
        """The link between two machines."""
        return self.scene.setting.links[self.kinds[a]][self.kinds[b]]

    def on(self, scene: Scene) -> Placed | None:
        """The same layout with another microbatch size, or state on another device; None: a machine lacks room."""
        index = {kind.name: k for k, kind in enumerate(scene.setting.kinds)}
        own = [index.get(kind.name) for kind in self.scene.setting.kinds]
        kinds = [own[k] for k in self.kinds]
        for s, stage in enumerate(self.assignment):
            if any((k := kinds[d]) is None or s not in scene.setting.kinds[k].fits for d in stage):
                return None
        spares = tuple((new, name) for k, name in self.spares if (new := own[k]) is not None)
        return replace(self, scene=scene, kinds=tuple(k or 0 for k in kinds), spares=spares)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Microbatches, by pipeline."""
        return pipeline_shares(self.pipelines, self.scene.setting.cost.microbatches, self.assignment)

    @cached_property
    def given(self) -> list[tuple[tuple[Station, ...], int]]:
        """Stations and share of each pipeline that gets microbatches. The work of its other pipelines makes a shared
        machine appear slower."""
        served = [Counter[int]() for _ in self.assignment]  # microbatches, by stage and machine
        for devices, every in zip(self.assignment, served, strict=True):
            for d, share in zip(devices, self.shares, strict=True):
                every[d] += share
        found = []
        for p, (stations, share) in enumerate(zip(self.pipelines, self.shares, strict=True)):
            if share:
                own = [every[devices[p]] / share for devices, every in zip(self.assignment, served, strict=True)]
                found.append((tuple(s.slowed(by) for s, by in zip(stations, own, strict=True)), share))
        return found

    @property
    def busiest_s(self) -> float:
        """Seconds that the busiest machine computes."""
        load_s = defaultdict[int, float](float)
        for p, (stations, share) in enumerate(zip(self.pipelines, self.shares, strict=True)):
            for station, devices in zip(stations, self.assignment, strict=True):
                load_s[devices[p]] += share * (station.forward_s + station.backward_s)
        return max(load_s.values())

    @cached_property
    def pipelines(self) -> list[tuple[Station, ...]]:
        stages, pipelines = range(len(self.assignment)), range(len(self.assignment[0]))
        return [tuple(self._station(s, p) for s in stages) for p in pipelines]

    def _station(self, s: int, p: int) -> Station:
        cost, kind = self.scene.setting.cost, self.scene.setting.kinds[self.kind(s, p)]
        own, found = self.assignment[s][p], Station(kind.forward_s[s], kind.backward_s[s])
        if s + 1 < len(self.assignment):
            link, nbytes = self.link(own, self.assignment[s + 1][p]), cost.forward_bytes[s + 1]
            found = replace(
                found,
                on_s=nbytes / link.bandwidth_bytes_per_s,
                on_delay_s=link.delay_s,
                on_up_s=nbytes / kind.up_bytes_per_s,
            )
        if s:
            link, nbytes = self.link(own, self.assignment[s - 1][p]), cost.backward_bytes[s]
            found = replace(
                found,
                back_s=nbytes / link.bandwidth_bytes_per_s,
                back_delay_s=link.delay_s,
                back_up_s=nbytes / kind.up_bytes_per_s,
            )
        return found

    def roughly_s(self, schedule: Schedule) -> float:
        """Estimate a step [s] from the slowest pipeline and the end of the step, without a play."""
        pipeline_s = max(roughly_s(schedule, *given) for given in self.given)
        return pipeline_s + ended_s(self.scene.setting, self.serving)
