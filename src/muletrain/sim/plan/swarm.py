"""Plan strategy ``swarm`` on a fleet: the number of stages and the microbatch with the most tokens/s.

Rates (``flow``, ``rates``) settle the machines for every number of stages and every microbatch, on even cuts and on
cuts that suit pipelines. The best layouts by rates are played (``steps``); the played times are the prediction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from muletrain.config.plan_file import Prediction, Split, Stage
from muletrain.errors import CapacityError, MuletrainError
from muletrain.planning.splits import parted
from muletrain.sim.fleet.flow import Flow, Rules, Weather
from muletrain.sim.fleet.pace import Pace
from muletrain.sim.fleet.rates import TRAINERS, rates_of
from muletrain.sim.fleet.simulation import simulate_fleet
from muletrain.sim.plan import churn
from muletrain.sim.plan.question import Bytes, fullest, mixing, traffic
from muletrain.sim.steps.wires import without_links
from muletrain.strategies import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from muletrain.config.plan_file import Memory, Traffic
    from muletrain.planning.partition import Cut
    from muletrain.sim.fleet.planned import Planned
    from muletrain.sim.fleet.rates import Counts
    from muletrain.sim.plan.question import Question, Scene
    from muletrain.sim.setting import Setting
    from muletrain.sim.steps.steps import Took

SETTLING_PERIODS = 240
"""Periods of rebalancing after which no peer moves any more (four hours at the default period)."""
PLAYED, ENOUGH = 10, 4
"""Steps to play, and step ends that suffice for a mean."""
MOVING_PERIODS = (3, 9)
"""Periods of rebalancing to play before the measured steps: after the first number hardly any peer moves; the second is
for fleets where a peer still moves."""
SHORTLIST, NEARLY, LEADING = 8, 0.8, 0.6
"""Most layouts to play; least part of the best layout's rate; and the same for the best layout of each cut, lower
because rates err most between cuts."""
FASTER = 1.1
"""A play is at most so many times as fast as its rate; with few microbatches a step, the factor may be larger."""
ALIKE = 0.01
"""Relative difference below which the layout with fewer stages wins, and then the layout with larger microbatches."""


class NoSteps(MuletrainError):
    """Raised when hardly any step ends, or peers fail."""


@dataclass(frozen=True)
class Settled:
    """A fleet after rebalancing without churn. ``serving``: by stage and kind."""

    scene: Scene
    serving: Sequence[Counts]
    roughly_s: float
    """Seconds of a step by rates."""
    kept: float = 1.0
    """The part of the layout's tokens/s that remains under churn."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        cost = self.scene.setting.cost
        return cost.microbatches * cost.tokens

    @property
    def roughly_per_s(self) -> float:
        """Tokens/s by rates, under churn."""
        return self.kept * self.tokens / self.roughly_s

    def may_reach(self, tokens_per_s: float) -> bool:
        """Is a play worthwhile, if another layout reaches ``tokens_per_s`` under churn?"""
        return FASTER * self.roughly_per_s >= tokens_per_s

    @cached_property
    def took(self) -> Took:
        """A step, played."""
        return step(self.scene.setting, self)

    @property
    def step_s(self) -> float:
        return self.took.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def expected_per_s(self) -> float:
        """Tokens/s under churn."""
        return self.kept * self.tokens_per_s


def predict(
    question: Question,
    watch: Callable[[float], None] = lambda share: None,
    cuts: Iterable[Cut] = (),
    least: float = 0.0,
) -> Prediction:
    """Find the best layout under churn, or the reason why there is none. ``cuts``: to try beside the most even cut of
    each number of stages; ``least``: tokens/s of interest; no layout is played if none may reach ``least``."""
    return best_of(question, *rated(question, watch, cuts, least), least)


def best_of(question: Question, found: Sequence[Settled], problem: str, least: float = 0.0) -> Prediction:
    """Predict the best of the rated layouts, or say why there is none."""
    if not found:
        either = "; no other number of stages fits either: add machines or memory, or take a smaller model"
        return Prediction(
            strategy="swarm",
            runnable=find("swarm").runs,
            problem=problem + (either if question.stages is None else ""),
        )
    worth = [s for s in promising(found) if s.may_reach(least)]
    if not worth:
        return Prediction(strategy="swarm", runnable=find("swarm").runs, problem="others are faster by rates")
    return told(question, chosen(worth))


def rated(
    question: Question,
    watch: Callable[[float], None] = lambda share: None,
    cuts: Iterable[Cut] = (),
    least: float = 0.0,
) -> tuple[list[Settled], str]:
    """Rate every layout, with churn's losses found once for each cut, or return the reason why there is none. Churn is
    not played for cuts that cannot reach ``least`` tokens/s."""
    found, problems = list[Settled](), []
    ways = [(stages, None) for stages in question.stage_counts()] + [(len(cut), cut) for cut in cuts]
    for n, (stages, cut) in enumerate(ways):
        own = list[Settled]()
        for microbatch in question.microbatches():
            try:
                own.append(settled_on(question, stages, microbatch, cut))
            except CapacityError as e:
                problems.append(str(e))
                break  # larger microbatches do not fit either
        if own and (best := min(own, key=lambda s: s.roughly_s / s.tokens)).may_reach(least):
            left = churn.kept(question, best.scene, best.serving)
            own = [replace(s, kept=left) for s in own]
        found += own
        watch((n + 1) / len(ways))
    return found, "" if found else problems[-1]


def promising(found: Sequence[Settled]) -> list[Settled]:
    """Select the layouts that may be the fastest."""
    tokens = [s.roughly_per_s for s in found]
    order = sorted(range(len(found)), key=lambda n: -tokens[n])
    leaders = {found[n].scene.setting.cut: n for n in reversed(order)}.values()
    leading = [n for n in leaders if tokens[n] >= LEADING * max(tokens)]
    near = [n for n in order if n not in leaders and tokens[n] >= NEARLY * max(tokens)]
    return [found[n] for n in sorted([*sorted(leading, key=lambda n: -tokens[n]), *near][:SHORTLIST])]


def chosen(found: Sequence[Settled]) -> Settled:
    """Choose the fastest layout, or a layout with fewer stages at the same speed."""
    played, best = list[Settled](), 0.0
    for s in sorted(found, key=lambda s: -s.roughly_per_s):
        if s.may_reach((1 - ALIKE) * best):
            played.append(s)
            best = max(best, s.expected_per_s)
    near = [s for s in played if s.expected_per_s >= (1 - ALIKE) * best]
    return min(near, key=lambda s: (len(s.serving), -s.scene.setting.cost.sequences))


def settled_on(question: Question, stages: int, microbatch: int, cut: Cut | None = None) -> Settled:
    """Settle a fleet; if stages mix devices, the CPU updates the weights. Raises CapacityError."""
    found = settled(question.scene(stages, microbatch, cut))
    if (other := question.once_mixed(found.scene.setting, found.serving)) is question:
        return found
    return settled(other.scene(stages, microbatch, cut))


def settled(scene: Scene) -> Settled:
    """Settle a fleet by rates. Raises CapacityError if a stage gets no machine."""
    fleet = scene.run.fleet
    rates = rates_of(scene.setting, scene.run)
    rules = Rules(fleet.rebalance, fleet.rebalance_period, fleet.adopt_after, 0)
    flow = Flow(rates, Weather(), rules, SETTLING_PERIODS * fleet.rebalance_period, seed=0)
    flow.play()
    return Settled(scene, flow.serving, scene.setting.cost.microbatches / rates.of(flow.serving).throughput)


def played_step_s(scene: Scene, expected_s: float, steps: int = PLAYED, planned: Planned | None = None) -> float:
    """Seconds of a step with every message of the production code: the mean over the second half of ``steps`` and a few
    periods of rebalancing, in which peers measure each other. If a peer moves late, the play is extended. ``planned``
    membership needs no such periods. Raises NoSteps."""
    horizon_s, ends_s = 0.0, list[float]()
    for periods in MOVING_PERIODS if planned is None else (0,):
        horizon_s = steps * expected_s + periods * scene.run.fleet.rebalance_period
        outcome = simulate_fleet(
            scene.setting, scene.run, Weather(), hours=horizon_s / 3600, fidelity="protocol", planned=planned
        )
        if outcome.failure:
            raise NoSteps(f"played with every message, {outcome.failure}. Plan more stages or a larger batch")
        curve = outcome.curve
        moved = max((n + 1 for n, point in enumerate(curve) if "moved" in point.events), default=0)
        ends_s = [point.time_s for point in curve[max(moved, len(curve) // 2) :]]
        if len(ends_s) >= ENOUGH:
            break
    if len(ends_s) > 1:
        return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
    raise NoSteps(
        f"played with every message for {horizon_s:.0f} s, hardly any step came to its end, of which one is to take {expected_s:.1f} s: "
        "machines or links are busy for longer than peers wait for each other. Plan more stages or a larger batch"
    )


def step(setting: Setting, found: Settled, *, delayed: bool | None = None) -> Took:
    """Play a step of ``found`` in ``setting``."""
    run = found.scene.run
    late = run.optimizer.delayed if delayed is None else delayed
    return _step(setting, tuple(map(tuple, found.serving)), run.fleet.trainers or TRAINERS, late)


@lru_cache(maxsize=1024)
def _step(setting: Setting, serving: tuple[Counts, ...], trainers: int, delayed: bool) -> Took:
    """Cached, because the same layout recurs if swapping is off, and in other strategies."""
    return Pace(setting, trainers=trainers, delayed=delayed).step(serving)


def split(found: Settled) -> Split:
    """Split a step into its parts (``planning.splits``)."""
    setting = found.scene.setting
    at_once = step(setting, found, delayed=False) if found.scene.run.optimizer.delayed else found.took
    free = step(without_links(setting), found, delayed=False)
    rates = rates_of(setting, found.scene.run)
    return parted(
        setting.cost.microbatches / rates.of(found.serving).slowest, free.computing_s, at_once.computing_s, found.step_s
    )


def told(question: Question, found: Settled) -> Prediction:
    scene, setting = found.scene, found.scene.setting
    stages = _stages(question, found)
    used = [name for stage in stages for name in stage.machines]
    return Prediction(
        strategy="swarm",
        runnable=find("swarm").runs,
        microbatch=setting.cost.sequences,
        microbatches=(setting.cost.microbatches,),
        stages=stages,
        spares=question.unused(used),
        state_device=scene.run.optimizer.state_device,
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        churned_tokens_per_s=question.churning(found.expected_per_s),
        split=split(found),
        memory=_memory(question, scene, found.serving),
        traffic=sent(found),
        price_per_billion_tokens=question.price(used, found.step_s),
        notes=mixing(scene, found.serving),
    )


def _stages(question: Question, found: Settled) -> tuple[Stage, ...]:
    setting, taken = found.scene.setting, Counter[str]()
    stages = []
    for layers, counts in zip(setting.cut, found.serving, strict=True):
        machines: list[str] = []
        for kind, n in zip(setting.kinds, counts, strict=True):
            machines += question.names[kind.name][taken[kind.name] : taken[kind.name] + n]
            taken[kind.name] += n
        stages.append(Stage(layers=layers, machines=tuple(machines)))
    return tuple(stages)


def _memory(question: Question, scene: Scene, serving: Sequence[Counts]) -> tuple[Memory, ...]:
    needs, kinds = question.needs(scene), scene.setting.kinds
    return fullest(
        question.memory(kind.name, s, needs[s])
        for s, counts in enumerate(serving)
        for kind, n in zip(kinds, counts, strict=True)
        if n
    )


def sent(found: Settled) -> tuple[Traffic, ...]:
    """Bytes of a step between regions."""
    setting, serving, bytes_by = found.scene.setting, found.serving, Bytes()
    rates, cost = rates_of(setting, found.scene.run), setting.cost
    for stage in range(1, len(serving)):
        shares = rates.shares(stage, serving[stage - 1], serving[stage])
        for (a, *_), row in zip(rates.places, shares, strict=True):
            for (b, *_), share in zip(rates.places, row, strict=True):
                bytes_by[a, b, "activations"] += cost.microbatches * share * cost.forward_bytes[stage]
                bytes_by[b, a, "gradients"] += cost.microbatches * share * cost.backward_bytes[stage]
    bytes_by.ending(cost, serving)
    return traffic([k.region for k in setting.kinds], setting.links, bytes_by)
