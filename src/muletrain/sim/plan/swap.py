"""Plan strategy ``swap`` on a fleet (ATOM): every machine with enough room computes the whole model, whose blocks pass
through the machine's device. The single stage runs as a stage of ``swarm`` does, and is predicted likewise; the
swapping follows the executor's own rules (``compute.swap.fit``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.config.plan_file import Prediction
from muletrain.sim.machine import swapping_of
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.strategies import find

if TYPE_CHECKING:
    from muletrain.sim.plan.question import Question


def asked_of(question: Question) -> Question:
    """The same question about a run whose machines have the whole model."""
    return replace(question.asking(find("swap")), stages=1)


def predict(question: Question, least: float = 0.0) -> Prediction:
    """Predict swap with the best microbatch, or why no machine can run it. ``least``: see ``swarm``."""
    blank = Prediction(strategy="swap", runnable=find("swap").runs)
    if question.paced:
        paced = next(p.name for p in question.firsts if p.forward_s)
        why = f"'{paced}' is paced (forward_ms): what it takes for a whole model is not known; give device or tflops instead"
        return blank.model_copy(update={"problem": why})
    if question.spec.quantised:
        why = (
            "a swapped model takes its blocks from the model's files, not codes of them; use adapter.quantise = 'none'"
        )
        return blank.model_copy(update={"problem": why})
    asked = asked_of(question)
    found = plan_swarm.predict(asked, least=least)
    if found.problem:
        return blank.model_copy(update={"problem": found.problem})
    scene = asked.scene_of(found)
    (need,), used = asked.needs(scene), {row.machine for row in found.memory}
    swapped = [
        swapping_of(n, peer, scene.run, asked.spec, scene.setting.cut, 0, need)
        for n, (peer, machine) in enumerate(zip(asked.firsts, asked.fleet.machines, strict=True))
        if machine.name in used and not need.resident(asked.offer(machine.name))
    ]
    most = max(swapped, key=lambda s: len(s.runs), default=None)
    late = ("with optimizer.delayed=false, which this strategy needs",) if question.run.optimizer.delayed else ()
    return found.model_copy(
        update={
            "strategy": "swap",
            "notes": (*late, *found.notes),
            "swapped": () if most is None else most.runs,
            "accumulate": 1 if most is None else most.minibatches,
        }
    )
