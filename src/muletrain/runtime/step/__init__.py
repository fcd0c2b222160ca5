"""How a step ends: what a peer knows of it (``knowledge``), replicas agree on a round (``sealing``, suspicious gradients in ``trials``),
reduce it (``rounds``, ``averaging``, ``attendance``), and the ``record`` of all stages is applied (``stepper``). Finished gradients
are served from ``holding``, those of past steps from ``trail``; ``donor`` gives and takes states between two steps.

``Stepper`` is what rooms above hold.
"""
