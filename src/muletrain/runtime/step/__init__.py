"""This room ends a step: replicas agree on a mean gradient, stages agree on a record, and every peer applies it.

``runner`` takes the run from one step to the next. Everything else belongs to one step and is made anew for each:
``state`` is what a peer knows, ``exchange`` takes in notices and asks for lost ones. ``company`` says which replicas
count, and ``agreement`` seals and finds a round. ``reruns`` fills gaps, ``audit`` leaves out gradients that stand out.
``reduction`` reduces the mean gradient, or takes it from a replica. ``tied`` takes another stage's part of it.
``record_builder`` collects attestations of all stages for the ``record``. ``gradient_log`` keeps past gradients.

Rooms above hold ``StepRunner``, give arriving messages to its ``exchange`` and chunks to ``state.averager``, and only
read the rest of its ``state``. Objects of a step may be used until ``advance`` or ``rejoin``; never keep them.
"""
