"""This room ends a step: replicas agree on a mean gradient, stages agree on a record, and every peer applies the
record.

``runner`` takes the run from one step to the next. Everything else is made anew for each step, from what all steps
share (``state.Lasting``): ``state`` is a peer's knowledge, ``exchange`` takes in notices and asks for lost notices.
``company`` selects the replicas that count, and ``agreement`` seals and finds a round. ``reruns`` fills gaps, ``audit``
leaves out gradients that stand out. ``reduction`` reduces the mean gradient, or takes a replica's. ``tied`` takes the
shared part of another stage's gradient. ``record`` collects attestations of all stages. ``gradient_log`` keeps past
gradients.

Rooms above hold ``StepRunner``, pass arriving messages to its ``exchange`` and chunks to ``state.averager``, and only
read the rest of its ``state``. Objects of a step may be used until ``advance`` or ``rejoin``, and must not be kept.
"""
