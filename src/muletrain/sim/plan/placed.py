"""Layouts of strategy ``pipeline``: machines by stage and pipeline, to be estimated and played."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from muletrain.planning.cost import averages_at
from muletrain.planning.splits import Member, Station, averaging_s, pipeline_shares, roughly_s
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
    from muletrain.sim.setting import Setting
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
        return pipeline_s + ending_s(self.scene.setting, self.serving)


def ending_s(setting: Setting, serving: Sequence[Sequence[int]]) -> float:
    """Seconds at the end of a step in the slowest stage. ``serving``: by stage and kind."""
    kinds, links, ends_s = setting.kinds, setting.links, list[float]()
    for s, (stage, counts) in enumerate(zip(setting.cost.stages, serving, strict=True)):
        here = Counter({k: n for k, n in enumerate(counts) if n})
        paths = [links[a][b] for a in here for b in here if a != b or here[a] > 1]
        takes_s = 0.0
        if paths:
            members = [Member(kinds[k].up_bytes_per_s, kinds[k].down_bytes_per_s) for k in here.elements()]
            narrowest = min(path.bandwidth_bytes_per_s for path in paths)
            up, down = min(m.up_bytes_per_s for m in members), min(m.down_bytes_per_s for m in members)
            nbytes = stage.averaged_bytes / averages_at(len(members), up, down)
            takes_s = averaging_s(
                nbytes,
                members,
                narrowest,
                max(path.delay_s for path in paths),
            )
        ends_s.append(takes_s + setting.ending_s(s, here))
    return ended_s(setting, ends_s, serving)
