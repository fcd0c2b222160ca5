"""The question of ``muletrain plan``, and tools for its answers: settings by stages and microbatch, memory, traffic,
price."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from muletrain.config.costs import Costs
from muletrain.config.fleet_file import Fleet
from muletrain.config.plan_file import Memory, Traffic
from muletrain.model.chain import Compression
from muletrain.sim.fleet.advice import QUALITY, applied
from muletrain.sim.fleet.calibration import calibrated
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.machine import AMPLE, flops_of, offer_of
from muletrain.sim.setting import first_of_each, mixed, once_mixed, setting, stage_needs, stages_for
from muletrain.sim.steps.endings import ending_bytes
from muletrain.strategies import find

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from muletrain.compute.estimate import Offer, StageMemory, SwapMemory
    from muletrain.config.fleet_file import FleetPeer, Link
    from muletrain.config.plan_file import Prediction
    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model
    from muletrain.planning.cost import RunCost
    from muletrain.planning.partition import Cut
    from muletrain.sim.fleet.advice import Change
    from muletrain.sim.setting import Setting
    from muletrain.strategies import Listed

UNLIMITED_GBPS = 1e6
"""Gbit/s that stand for a link without a limit."""
MICROBATCHES = (1, 2, 4, 8, 16)
"""Microbatches to try [sequences]."""
HASTE = "the time limit ended its search: the next call may find another layout, and one with more time (--time-limit 2m) a better one"


@dataclass(frozen=True)
class Scene:
    """The fleet and the model, with a fixed number of stages and a fixed size of microbatches."""

    run: RunConfig
    setting: Setting


@dataclass(frozen=True, eq=False)
class Question:
    """A fleet, a run and its model. ``stages``, ``microbatch``: fixed if given. ``whole``: the full fleet if ``fleet``
    is a subset (``subsets``). ``weather``: of the whole fleet. ``quality``: see ``advice.QUALITY``."""

    fleet: Fleet
    run: RunConfig
    spec: Model
    stages: int | None = None
    microbatch: int | None = None
    costs: Costs = field(default_factory=Costs)
    whole: Fleet | None = None
    weather: Weather = field(default_factory=Weather)
    quality: Mapping[str, float] = field(default_factory=lambda: QUALITY)
    _cuts: dict[int, Cut] = field(default_factory=dict)
    churned: dict[object, float] = field(default_factory=dict)
    """Remaining speed of played layouts under churn (``churn``)."""

    @property
    def paced(self) -> bool:
        """True: the file declares stage times for any number of layers."""
        return any(peer.forward_s for peer in self.firsts)

    @cached_property
    def firsts(self) -> list[FleetPeer]:
        """The first machine of each entry."""
        return first_of_each(self.fleet)

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """Names of the machines of each entry."""
        counts, whole = {m.name: m.count for m in self.fleet.machines}, self.whole or self.fleet
        peers = iter(whole.peers())
        every = {m.name: [next(peers).name for _ in range(m.count)] for m in whole.machines}
        return {entry: names[: counts[entry]] for entry, names in every.items() if entry in counts}

    def churning(self, tokens_per_s: float) -> float | None:
        """Tokens/s under churn, for a prediction; None: the fleet file has none."""
        return None if self.weather == Weather() else tokens_per_s

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """Machines of the whole fleet that are not in question."""
        asked = {name for names in self.names.values() for name in names}
        return tuple(p.name for p in (self.whole or self.fleet).peers() if p.name not in asked)

    def of_first(self, counts: Mapping[str, int]) -> Question:
        """The same question about the first machines of each entry; ``counts``: machines by entry."""
        machines = [m.model_copy(update={"count": n}) for m in self.fleet.machines if (n := counts.get(m.name, 0))]
        part = Fleet.model_construct(**{**dict(self.fleet), "machines": tuple(machines)})  # links may name absent ones
        return replace(self, fleet=part, whole=self.whole or self.fleet)

    def without(self, left_out: Iterable[str]) -> Question:
        """The same question without the machines ``left_out``."""
        gone = set(left_out)
        return (
            self.of_first({m: sum(n not in gone for n in names) for m, names in self.names.items()}) if gone else self
        )

    def changed(self, change: Change) -> Question:
        """The same question about a changed run. Raises MuletrainError if the configuration rejects the change."""
        run = applied(self.run, change)
        spec = self.spec.compressed(Compression.from_config(run.model))
        if spec.compression is not None:
            spec.compression.check(spec.width, spec.layers)
        return replace(self, run=run, spec=spec)

    def stage_counts(self) -> list[int]:
        """Numbers of stages worth a look: the fewest for each size of the largest stage. With paced machines there
        is no choice."""
        if self.stages is not None:
            return [self.stages]
        if self.paced:
            return [stages_for(self.fleet, self.run, self.spec)]
        layers = self.spec.layers
        counts = {math.ceil(layers / most) for most in range(1, layers + 1)}
        return sorted(c for c in counts if c <= min(self.spec.most_stages, len(self.fleet.peers())))

    def microbatches(self) -> list[int]:
        """Sizes worth a look [sequences]."""
        batch, own = self.run.train.batch, self.run.train.microbatch
        if self.microbatch is not None or self.paced:
            return [self.microbatch or own]
        return [m for m in MICROBATCHES if batch % m == 0] or [own]

    def scene(self, stages: int, microbatch: int, cut: Cut | None = None) -> Scene:
        """Build the setting. ``cut``: default: the most even cut. Raises ConfigError and CapacityError."""
        run = self.with_microbatch(microbatch)
        if cut is None and stages not in self._cuts:
            self._cuts[stages] = self.spec.cut(stages)
        fleet = run.fleet.model_copy(update={"stages": stages})
        of = run.model_copy(update={"fleet": fleet})
        return Scene(
            of, calibrated(setting(self.fleet, of, self.spec, cut or self._cuts[stages], self.whole), self.costs)
        )

    def scene_of(self, p: Prediction) -> Scene:
        """The scene that ``p`` was predicted on."""
        return (
            self.asking(find(p.strategy))
            .updated_on(p.state_device)
            .scene(len(p.stages), p.microbatch, tuple(stage.layers for stage in p.stages))
        )

    def asking(self, strategy: Listed) -> Question:
        """The same question about a run with ``strategy``, whose clients, if any, are the unreliable machines. A swapped
        model has no second copy of its weights, so such a run does without delayed updates."""
        if strategy.ask is None:
            return self
        run = strategy.ask(self.run, sum(not peer.reliable for peer in self.fleet.peers()))
        if run.swap.whole:
            run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"delayed": False})})
        return replace(self, run=run)

    def once_mixed(self, setting: Setting, serving: Sequence[Sequence[int]]) -> Question:
        """See ``setting.once_mixed``."""
        run = once_mixed(setting, self.run, serving)
        return self if run is self.run else replace(self, run=run)

    def updated_on(self, state_device: Literal["device", "cpu"]) -> Question:
        optimizer = self.run.optimizer.model_copy(update={"state_device": state_device})
        return replace(self, run=self.run.model_copy(update={"optimizer": optimizer}))

    def with_microbatch(self, microbatch: int) -> RunConfig:
        return self.run.model_copy(update={"train": self.run.train.model_copy(update={"microbatch": microbatch})})

    def needs(self, scene: Scene) -> list[StageMemory]:
        return stage_needs(scene.run, self.spec, scene.setting.cut, alone=self.fleet.alone)

    def peer(self, entry: str) -> FleetPeer:
        return next(p for p, m in zip(self.firsts, self.fleet.machines, strict=True) if m.name == entry)

    def offer(self, entry: str) -> Offer:
        return offer_of(self.peer(entry))

    def memory(self, entry: str, stage: int, need: StageMemory, *, inputs: float = 0.0) -> Memory:
        """Memory of a machine at a stage. ``inputs``: bytes of inputs kept until backward, beyond the estimate."""
        offer, kept = self.offer(entry), int(inputs)
        if not need.resident(offer) and need.swapped is not None:
            return _swapped(entry, stage, need, need.swapped.at(offer), offer)
        need = need.on(offer)
        device_needs, host_needs = need.of_device(offer) + kept, 0 if offer.host is None else need.on_host
        activations = kept + (need.activations if offer.host is None else need.activations_on_device)
        return Memory(
            machine=entry,
            stage=stage,
            weights=need.weights,
            optimizer=need.moments,
            gradients=device_needs + host_needs - need.weights - need.moments - need.copies - activations,
            activations=activations,
            buffers=need.copies,
            device_needs=device_needs,
            device_has=stated(offer.device),
            host_needs=host_needs,
            host_has=None if offer.host is None else stated(offer.host),
        )

    def price(self, used: Iterable[str], step_s: float) -> float | None:
        """Price of a billion tokens on the machines ``used``; None: a price is unknown."""
        prices = {name: self.peer(m).price_per_hour for m, names in self.names.items() for name in names}
        each = [prices[name] for name in used]
        known = [p for p in each if p is not None]
        tokens = self.run.train.batch * self.spec.context
        return sum(known) / 3600 * step_s / tokens * 1e9 if len(known) == len(each) else None

    def assumed(self) -> tuple[str, ...]:
        """Names the used estimates."""
        unpaced = [(n, peer) for n, peer in enumerate(self.firsts) if not peer.forward_s]
        return tuple(sorted({assumed for _, assumed in (flops_of(n, peer) for n, peer in unpaced) if assumed}))

    def unused(self, used: Iterable[str]) -> tuple[str, ...]:
        busy = set(used)
        return tuple(name for names in self.names.values() for name in names if name not in busy)


def fullest(rows: Iterable[Memory]) -> tuple[Memory, ...]:
    """Keep each entry's fullest row."""
    found: dict[str, Memory] = {}
    for row in rows:
        if row.machine not in found or row.device_needs > found[row.machine].device_needs:
            found[row.machine] = row
    return tuple(found.values())


def with_haste(found: Prediction, *, hurried: bool) -> Prediction:
    """Note that the time limit ended the search, so that the result depends on this machine's load."""
    return found.model_copy(update={"notes": (*found.notes, HASTE)}) if hurried else found


def matrices(links: Sequence[Sequence[Link]], kinds: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Delay [ms] and bandwidth [Gbit/s] between every two machines, (N, N). ``kinds``: kind of each machine; ``links``:
    by kinds."""
    delay_ms = np.array([[1000 * link.delay_s for link in row] for row in links])
    gbps = np.array([[min(UNLIMITED_GBPS, 8e-9 * link.bandwidth_bytes_per_s) for link in row] for row in links])
    pairs = np.ix_(kinds, kinds)
    return delay_ms[pairs], gbps[pairs]


class Bytes(defaultdict[tuple[int, int, str], float]):
    """Bytes of a step by sender's kind, receiver's kind and class ('activations', 'gradients', 'averaging')."""

    def __init__(self) -> None:
        super().__init__(float)

    def ending(self, cost: RunCost, serving: Sequence[Sequence[int]]) -> None:
        """Add the traffic at the end of a step (``sim.setting.ending_bytes``). ``serving``: by stage and kind."""
        for (a, b), nbytes in ending_bytes(cost, serving):
            self[a, b, "averaging"] += nbytes


def mixing(scene: Scene, serving: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Notes about stages that mix devices."""
    if not (devices := mixed(scene.setting, serving)):
        return ()
    told = f"stages mix devices ({', '.join(devices)}), whose arithmetic may differ in the last bit: "
    if scene.run.optimizer.state_device == "cpu":
        return (f"{told}the CPU updates the weights (optimizer.state_device = 'cpu', which 'run --plan' sets)",)
    return (f"{told}where it does, one of them leaves the run, unless optimizer.state_device = 'cpu'",)


def traffic(regions: Sequence[str], links: Sequence[Sequence[Link]], sent: Bytes) -> tuple[Traffic, ...]:
    """Sum up by region. ``regions``, ``links``: of each kind in ``sent``."""
    classes: dict[tuple[str, str], defaultdict[str, float]] = {}  # by (from, to) region
    ways: dict[tuple[str, str], list[Link]] = {}
    for (a, b, what), nbytes in sent.items():
        if nbytes:
            pair = regions[a], regions[b]
            classes.setdefault(pair, defaultdict(float))[what] += nbytes
            ways.setdefault(pair, []).append(links[a][b])
    rows = []
    for (sender, receiver), counted in classes.items():
        between = ways[sender, receiver]
        narrowest = min(way.bandwidth_bytes_per_s for way in between)
        rows.append(
            Traffic(
                sender=sender,
                receiver=receiver,
                activations=counted["activations"],
                gradients=counted["gradients"],
                averaging=counted["averaging"],
                bandwidth_bytes_per_s=None if math.isinf(narrowest) else narrowest,
                delay_s=max(way.delay_s for way in between),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.total, row.sender, row.receiver)))


def _swapped(entry: str, stage: int, need: StageMemory, swapped: SwapMemory, offer: Offer) -> Memory:
    """Memory of a machine that swaps its stage. State on a disk is not counted."""
    disk = swapped.on_disk(offer)
    weights, optimizer, gradients, activations = (
        (0, 0, 0, 0) if disk else (swapped.state - need.moments, need.moments, swapped.gradients, swapped.between)
    )
    host_needs = 0 if disk else swapped.of_host(offer)
    return Memory(
        machine=entry,
        stage=stage,
        weights=weights,
        optimizer=optimizer,
        gradients=gradients,
        activations=activations,
        buffers=swapped.least + host_needs - weights - optimizer - gradients - activations,
        device_needs=swapped.least,
        device_has=stated(offer.device),
        host_needs=host_needs,
        host_has=None if disk or offer.host is None else stated(offer.host),
    )


def stated(nbytes: int) -> int | None:
    return None if nbytes == AMPLE else nbytes
