"""Fit the constants of ``config.costs.Costs`` to the events of real runs: costs that a fleet file does not declare.

Each constant is the median of direct measurements (for calls, which add up, the mean) and enters the model at its own
place. No constant is tuned to reproduce a run's throughput, so the throughput of the measured runs is a first check
(``Sample.predicted``).

- ``call``: time of a forward or a backward beyond the declared time (paced fleets).
- ``devices``: operations of a peer's microbatches, divided by the peer's busy time.
- ``hop``: time from the end of a forward until the next stage has decoded the activations, minus delay and transfer
  time of the link. Both clocks must agree, so hops come from traces of peers that wrote into one folder.
- ``ending``: time from the last gradient of a step to the first forward of the next step, minus the modelled part:
  sequential messages and averaged bytes. Without traces: time of averaging and applying, minus the same part.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from muletrain import events as ev
from muletrain.config.costs import Costs, DeviceSpeed
from muletrain.config.fleet_file import Fleet, Link, load_fleet
from muletrain.config.fleet_sections import Machine
from muletrain.config.load import load_located
from muletrain.errors import MuletrainError
from muletrain.model.make import make_model
from muletrain.planning.cost import service_s
from muletrain.planning.devices import find_device
from muletrain.sim.fleet.rates import rates_of
from muletrain.sim.setting import run_cost, setting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from muletrain.config.schema import RunConfig
    from muletrain.planning.cost import RunCost
    from muletrain.sim.fleet.rates import Counts, Rates
    from muletrain.sim.setting import Setting

LEAST = 3
"""Fewest steps of a sample: the first step has no measurements yet, and the rest give a median."""
COMPUTED = ("forward", "backward", "forward and backward")
AMPLE_GIB = 1e6
"""Assumed memory of machines of unknown size [GiB]: the run did fit."""


@dataclass(frozen=True)
class Sample:
    """Measurements of one run, over the longest stretch of steps with constant membership."""

    folder: Path
    config: RunConfig
    setting: Setting
    serving: list[Counts]
    steps: tuple[int, int]
    """First and last step."""
    throughput: float
    """Microbatches/s."""
    params: int
    """Bytes of the largest stage's gradient."""
    calls_s: list[float]
    hops_s: list[float]
    pauses_s: list[float]
    """Seconds between steps, if there are traces."""
    averaging_s: list[float]
    """Seconds of averaging and applying."""
    flops: dict[str, list[float]]
    """Operations/s by device that no fleet file paces."""

    def rates(self, costs: Costs) -> Rates:
        return rates_of(calibrated(self.setting, costs), self.config)

    def predicted(self, costs: Costs) -> float:
        """Microbatches/s."""
        return self.rates(costs).of(self.serving).throughput


@dataclass(frozen=True)
class Fit:
    """Fitted constants; ``counts``: measurements behind each."""

    costs: Costs
    counts: dict[str, int]


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit the constants; every run has the same weight."""
    calls, hops = ([getattr(s, name) for s in samples] for name in ("calls_s", "hops_s"))
    messages = Costs(hop_ms=_ms(hops))
    endings = []
    for sample in samples:
        known_s = sample.rates(messages).pause_s(sample.serving)
        endings.append([took - known_s for took in sample.pauses_s or sample.averaging_s])
    speeds: dict[str, list[list[float]]] = defaultdict(list)
    for sample in samples:
        for device, flops in sample.flops.items():
            speeds[device].append(flops)
    costs = Costs(
        runs=tuple(str(s.folder) for s in samples),
        call_ms=_ms([[fmean(c)] for c in calls if c]),
        hop_ms=messages.hop_ms,
        ending_ms=_ms(endings),
        stage_params=max(s.params for s in samples),
        devices=tuple(DeviceSpeed(device=d, tflops=_typical(found) / 1e12) for d, found in sorted(speeds.items())),
    )
    counts = {"call_ms": calls, "hop_ms": hops, "ending_ms": endings, **speeds}
    return Fit(costs, {name: sum(map(len, found)) for name, found in counts.items()})


def _typical(runs: Iterable[Sequence[float]]) -> float:
    """Mean of the runs' medians; 0 if there are none."""
    medians = [median(values) for values in runs if values]
    return fmean(medians) if medians else 0.0


def _ms(runs: Iterable[Sequence[float]]) -> float:
    """Negative values are the model's own inaccuracy, and become 0."""
    return round(1000 * max(0.0, _typical(runs)), 3)


# Into the model -------------------------------------------------------------------------------------------------------


def calibrated(setting: Setting, costs: Costs) -> Setting:
    """Add measured constants to a setting: calls to the kinds' times, messages to the links' delays, the end of a
    step to every stage."""
    call_s, hop_s, ending_s = costs.call_ms / 1000, costs.hop_ms / 1000, costs.ending_ms / 1000
    halves = [call_s] * (len(setting.cut) - 1) + [call_s / 2]  # the last stage runs forward and backward in one call
    kinds = tuple(
        replace(
            kind,
            forward_s=tuple(s + more for s, more in zip(kind.forward_s, halves, strict=True)),
            backward_s=tuple(s + more for s, more in zip(kind.backward_s, halves, strict=True)),
        )
        if kind.declared
        else kind
        for kind in setting.kinds
    )
    links = tuple(
        tuple(Link(link.delay_s + hop_s, link.bandwidth_bytes_per_s) for link in row) for row in setting.links
    )
    stages = tuple(replace(stage, ending_s=stage.ending_s + ending_s) for stage in setting.cost.stages)
    return replace(setting, kinds=kinds, links=links, cost=replace(setting.cost, stages=stages))


def with_speeds(fleet: Fleet, costs: Costs) -> Fleet:
    """Set the measured speed of devices whose speed the fleet file does not declare."""
    known = {_device(d.device): d.tflops for d in costs.devices}
    if not known:
        return fleet

    def measured(m: Machine) -> Machine:
        tflops = known.get(_device(m.device)) if m.device is not None and m.tflops is None else None
        return m if tflops is None else m.model_copy(update={"tflops": tflops})

    return _of_machines(fleet, map(measured, fleet.machines))


def _device(name: str) -> str:
    device = find_device(name)
    return name.lower() if device is None else device.name


def same_device(a: str, b: str) -> bool:
    """Do two names mean one device?"""
    return _device(a) == _device(b)


def _of_machines(fleet: Fleet, machines: Iterable[Machine]) -> Fleet:
    return Fleet(**{**dict(fleet), "machines": tuple(machines)})


# From events ----------------------------------------------------------------------------------------------------------


def observe(folder: Path) -> Sample:
    """Read a run's events. Raises MuletrainError if ``folder`` is no run's or has too little to learn from."""
    if not (folder / "config.toml").is_file():
        raise MuletrainError(f"{folder}: not a run folder (it has no config.toml); give one from runs/")
    config, _ = load_located(folder / "config.toml", kept=True)
    if config.model.given is not None:
        raise MuletrainError(f"{folder}: it began with {config.model.given}; give a run that states its model's sizes")
    events = ev.EventTail(folder).poll()
    first, last, seconds = _steady(folder, events)
    applied = [e for e in events if isinstance(e, ev.StepApplied) and first <= e.step <= last]
    joined = [e for e in events if isinstance(e, ev.PeerJoined)]
    spec = make_model(config.model)
    cost = run_cost(config, spec, spec.cut(config.fleet.stages, config.fleet.layers))
    fleet, kind_of = _fleet(config, {e.name: e.chip or e.device.partition(":")[0] for e in joined})
    speeds = _speeds(applied, config, cost, kind_of, fleet)
    able = [_able(machine, speeds.get(k)) for k, machine in enumerate(fleet.machines)]
    scene = setting(_of_machines(fleet, able), config, spec)
    traced = [e for e in events if isinstance(e, ev.SlotWorked) and first <= e.step + 1 <= last]
    return Sample(
        folder=folder,
        config=config,
        setting=scene,
        serving=_serving(applied, kind_of, scene),
        steps=(first, last),
        throughput=cost.microbatches * (last - first + 1) / seconds,
        params=max(e.params for e in joined),
        calls_s=_calls(applied, kind_of, scene),
        hops_s=_hops(traced, applied, kind_of, scene),
        pauses_s=[] if config.optimizer.delayed else _pauses(traced),
        averaging_s=[] if config.optimizer.delayed else [e.averaging_s + e.apply_s for e in applied],
        flops={fleet.machines[k].device or fleet.machines[k].name: flops for k, flops in speeds.items()},
    )


def _steady(folder: Path, events: Sequence[ev.Event]) -> tuple[int, int, float]:
    """Returns first step, last step and duration [s] of the longest stretch with constant membership. The run's first
    step does not count."""
    took_s = {e.step: e.duration_s for e in events if isinstance(e, ev.StepDone)}
    who: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for e in events:
        if isinstance(e, ev.StepApplied):
            who[e.step].add((e.peer, e.stage))
    longest: list[int] = []
    stretch: list[int] = []
    for step in sorted(took_s)[1:]:
        alike = stretch and stretch[-1] == step - 1 and who[step - 1] == who[step]
        stretch = [*stretch, step] if alike else [step]
        longest = max(longest, stretch, key=len)
    if len(longest) < LEAST - 1:
        raise MuletrainError(
            f"{folder}: {len(took_s)} steps in its events, and fewer than {LEAST} one after the other by the same peers: let it go on "
            f"(muletrain run --resume {folder} --set train.steps=N), or give another run"
        )
    return longest[0], longest[-1], sum(took_s[s] for s in longest)


def _fleet(config: RunConfig, chips: Mapping[str, str]) -> tuple[Fleet, dict[str, int]]:
    """Returns the fleet (the emulated profile, or an entry for each device), and each peer's entry."""
    if config.fleet.profile is not None:
        fleet = load_fleet(config.fleet.profile)
        machine_of = [k for k, machine in enumerate(fleet.machines) for _ in range(machine.count)]
        return fleet, {name: machine_of[int(name.rpartition("-")[2]) % len(machine_of)] for name in chips}
    kinds = sorted(set(chips.values()))
    counts = [list(chips.values()).count(kind) for kind in kinds]
    machines = tuple(Machine(name=k, device=k, count=n, region="one") for k, n in zip(kinds, counts, strict=True))
    return Fleet(machines=machines), {name: kinds.index(chip) for name, chip in chips.items()}


def _able(machine: Machine, flops: Sequence[float] | None) -> Machine:
    """Returns the machine with ample memory and measured speed. An unused machine's speed is arbitrary."""
    return machine.model_copy(
        update={
            "memory_gib": AMPLE_GIB,
            "tflops": median(flops) / 1e12 / machine.speed if flops else machine.tflops or 1.0,
        }
    )


def _speeds(
    applied: Iterable[ev.StepApplied], config: RunConfig, cost: RunCost, kind_of: Mapping[str, int], fleet: Fleet
) -> dict[int, list[float]]:
    """Operations/s of each peer and step, by kinds of undeclared speed."""
    found: dict[int, list[float]] = defaultdict(list)
    for e in applied:
        paced = fleet.pacing.forward_ms or fleet.machines[kind_of[e.peer]].forward_ms
        if paced or e.recomputed or not e.microbatches:
            continue
        how = config.compute.checkpointing
        times = service_s(cost.stages[e.stage], 1.0, recompute=how == "always", by_block=how == "block")
        flops = e.microbatches * sum(times)
        found[kind_of[e.peer]].append(flops / (e.forward_s + e.backward_s))
    return dict(found)


def _serving(applied: Iterable[ev.StepApplied], kind_of: Mapping[str, int], scene: Setting) -> list[Counts]:
    serving = [[0] * len(scene.kinds) for _ in scene.cut]
    for peer, stage in {(e.peer, e.stage) for e in applied}:
        serving[stage][kind_of[peer]] += 1
    return [tuple(counts) for counts in serving]


def _calls(applied: Iterable[ev.StepApplied], kind_of: Mapping[str, int], scene: Setting) -> list[float]:
    """Seconds of a call beyond the declared time, for each peer and step without repeated work."""
    found = []
    for e in applied:
        kind = scene.kinds[kind_of[e.peer]]
        if kind.declared and e.microbatches and not e.recomputed:
            beyond_s = e.forward_s + e.backward_s - e.microbatches * kind.service_s(e.stage)
            found.append(beyond_s / e.microbatches / (1 if e.stage == len(scene.cut) - 1 else 2))
    return found


def _hops(
    traced: Iterable[ev.SlotWorked], applied: Iterable[ev.StepApplied], kind_of: Mapping[str, int], scene: Setting
) -> list[float]:
    """Seconds of each unrepeated hop between two stages, beyond the link's time."""
    stage_of = {(e.peer, e.step - 1): e.stage for e in applied}
    computed: dict[tuple[int, int, int], list[ev.SlotWorked]] = defaultdict(list)
    decoded: dict[tuple[int, int, int], list[ev.SlotWorked]] = defaultdict(list)
    for e in traced:
        if (stage := stage_of.get((e.peer, e.step))) is None:
            continue
        if e.what == "forward" and e.slot == "compute":
            computed[e.step, e.index, stage + 1].append(e)
        elif e.slot == "receive":
            decoded[e.step, e.index, stage].append(e)
    found = []
    for (step, index, stage), sent in computed.items():
        taken = decoded[step, index, stage]
        if len(sent) == len(taken) == 1:
            link = scene.links[kind_of[sent[0].peer]][kind_of[taken[0].peer]]
            known_s = link.delay_s + scene.cost.forward_bytes[stage] / link.bandwidth_bytes_per_s
            found.append(taken[0].t - sent[0].t - known_s)
    return found


def _pauses(traced: Iterable[ev.SlotWorked]) -> list[float]:
    """Seconds from the last computation of a step to the first of the next."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for e in traced:
        if e.slot == "compute" and e.what in COMPUTED:
            begins[e.step] = min(begins.get(e.step, e.t), e.t - e.seconds)
            ends[e.step] = max(ends.get(e.step, e.t), e.t)
    return [begins[step + 1] - end for step, end in ends.items() if step + 1 in begins]
