"""``muletrain plan``: predict every strategy on a fleet, and recommend the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.config.plan_file import Plan, Prediction
from muletrain.errors import CapacityError
from muletrain.planning.splits import clientless, recommend
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.loop import seldom_collected
from muletrain.sim.plan import fewer
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan import swap as plan_swap
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.plan.limits import improvements, limited, without_work
from muletrain.sim.plan.question import with_haste
from muletrain.strategies import STRATEGIES, find

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from muletrain.sim.plan.question import Question


def confirmed(question: Question, plan: Plan) -> Plan:
    """Play the recommended layout with every message of the production code, and add its step time to the plan. Swarm
    begins with seated machines, pipeline as planned. A note reports if hardly any step ends."""
    if plan.recommended is None:
        return plan
    chosen = plan.strategies[plan.recommended]
    question = question.without(chosen.left_out)
    scene = question.scene_of(chosen)
    planned = None
    if find(chosen.strategy).pooled:
        planned = plan_hub.membership(question, scene, chosen)
    elif chosen.schedule:
        scene = plan_pipeline.scheduled(question, scene, chosen.schedule, len(chosen.microbatches))
        planned = plan_pipeline.membership(question, scene, chosen)
    try:
        played_s = plan_swarm.played_step_s(scene, chosen.step_s, planned=planned)
    except plan_swarm.NoSteps as e:
        played = chosen.model_copy(update={"notes": (*chosen.notes, str(e))})
    else:
        played = chosen.model_copy(update={"played_step_s": played_s})
    strategies = tuple(played if p is chosen else p for p in plan.strategies)
    return plan.model_copy(update={"strategies": strategies})


def predict(
    question: Question,
    *,
    seed: int = 0,
    time_limit_s: float = 30.0,
    watch: Callable[[str, float], None] = fewer.unwatched,
) -> fewer.Predictions:
    """Predict every strategy on all machines in question. Arguments: see ``plan``."""
    pipelines, cuts = plan_pipeline.searched(question, seed, time_limit_s / 2, lambda share: watch("pipeline", share))
    hub = plan_hub.predict(question, seed, time_limit_s / 2, lambda share: watch("hub", share))
    cuts = [*dict.fromkeys([*cuts, *plan_pipeline.uneven(question, [hub])])]
    swarm = plan_swarm.predict(question, lambda share: watch("swarm", share), cuts)
    return {
        "swarm": [swarm],
        "pipeline": plan_pipeline.tried_on(question, swarm, pipelines),
        "swap": [plan_swap.predict(question)],
        "hub": [hub],
    }


@seldom_collected()  # otherwise the collector scans lasting objects for a third of the time
def plan(
    question: Question,
    *,
    seed: int = 0,
    time_limit_s: float = 30.0,
    watch: Callable[[str, float], None] = fewer.unwatched,
) -> Plan:
    """Predict every strategy, on fewer machines where that is faster, and recommend the best. ``time_limit_s``: of the
    searches for placements and allocations; ``watch`` receives the running search and its share done.

    Raises ConfigError, and CapacityError if no strategy is possible."""
    predicted = predict(question, seed=seed, time_limit_s=time_limit_s, watch=watch)
    whole = in_order(predicted)
    few = fewer.improved(question, predicted, seed=seed, time_limit_s=time_limit_s, watch=watch)
    several = in_order(few.predictions)
    if all(p.problem for p in several):
        whys = {p.strategy: p.problem for p in several}
        raise CapacityError(f"{whys['swarm']}. Strategy swap, which needs less of the device: {whys['swap']}")
    found = [limited(question, with_haste(p, hurried=not few.complete and p.runnable)) for p in several]
    all_stay = all(peer.reliable for peer in question.fleet.peers())
    best, why = recommend(found, all_stay=all_stay)
    chosen = None if best is None else found[best]
    without = list[Prediction]()
    if chosen is not None and fewer.swappers(question.without(chosen.left_out), chosen):
        without = [p for p in fewer.unswapped(question, predicted["pipeline"]) if not p.problem]
        if question.weather == Weather():  # else they are not rated as the others are
            found = [limited(question, fewer.faster_planned(p, without)) for p in found]
            best, why = recommend(found, all_stay=all_stay)
            chosen = None if best is None else found[best]
    others, told = [], ""
    if chosen is not None and chosen.left_out:
        able = [p for p in whole if p.runnable and not p.problem and not clientless(p)]
        told = "" if able else fewer.ONLY_FEWER
        if larger := [p for p in able if len(fewer.machines(p)) > len(fewer.machines(chosen))]:
            others = [limited(question, max(larger, key=lambda p: p.expected_per_s))]
            told = fewer.compared(question, chosen, others[0])
    run, spec = question.run, question.spec
    return Plan(
        fleet=question.fleet.name,
        model=run.model.preset or "model",
        params=spec.params,
        batch=run.train.batch,
        context=spec.context,
        strategies=tuple(found),
        recommended=best,
        why=why,
        fewer=told,
        swapping="" if chosen is None else fewer.worth(question, chosen, without),
        improvements=() if chosen is None else improvements(question, chosen, [*others, *without]),
        without_work=() if chosen is None else without_work(question, chosen),
        assumed=question.assumed(),
    )


def laid_out(question: Question, strategies: Sequence[str], *, time_limit_s: float = 30.0) -> Prediction:
    """Lay out the fastest of ``strategies`` ('swarm', 'swap') under churn, as ``plan`` does, but without planned
    pipelines. Raises ConfigError, and CapacityError if no strategy is possible."""
    cuts = plan_pipeline.cuts(question, time_limit_s / 2) if "swarm" in strategies else []
    predicted: fewer.Predictions = {
        name: [plan_swarm.predict(question, cuts=cuts) if name == "swarm" else plan_swap.predict(question)]
        for name in strategies
    }
    few = fewer.improved(question, predicted, time_limit_s=time_limit_s).predictions
    found = [p for own in few.values() for p in own]
    able = [p for p in found if not p.problem]
    if not able:
        raise CapacityError(found[0].problem)
    return max(able, key=lambda p: p.expected_per_s)


def in_order(predicted: Mapping[str, Sequence[Prediction]]) -> list[Prediction]:
    """Returns the predictions, given by strategy, in the order of ``STRATEGIES``. A strategy without a predictor gets a
    prediction with that problem."""
    found = list[Prediction]()
    for s in STRATEGIES:
        missing = (
            f"nothing predicts strategy {s.name} yet: write sim/plan/{s.name}.py, and name it in sim/plan/planner.py"
        )
        found += predicted.get(s.name) or [Prediction(strategy=s.name, runnable=s.runs, problem=missing)]
    return found
