"""How a step ends. ``runner`` takes the run from one lineage to the next; all that belongs to one step is made anew for
each:

``state`` (what a peer knows of it), ``exchange`` (what arrives, is asked for and answered), ``company`` (whom a replica
counts on), ``agreement`` (replicas seal, and agree on a round), ``reruns`` (of microbatches in no accumulator) and
``audit`` (of gradients that stand out), ``reduction`` (the stage's mean gradient is reduced, by ``averaging`` in
``rounds``, or taken from a replica). The ``record`` of all stages is applied; past gradients are served from
``gradient_log``.

``StepRunner`` is what rooms above hold; they hand what arrives to its ``exchange``.
"""
