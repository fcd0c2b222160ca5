"""muletrain: train large transformer models on whatever machines you can get, over ordinary internet.

The package reads top-down; imports run downwards only (``tests/test_imports.py`` holds them to it):

=============================  =====================================================================
``cli``                        the commands a person types
``runs``                       builds a run from a config: processes, tickets, progress, reports
``sim`` ``papers``             the virtual world, fleets played, plans; the papers' tables
``runtime``                    the step protocol: microbatches, agreement, checkpoints, recovery
``network`` ``compute`` ``wire``  the seams and their implementations; frames and tensor codecs
``model`` ``data`` ``optim``   decoder and stages; corpora and microbatches; AdamW and LAMB
``planning``                   what is decided before a run: placement, partition (no torch, no sockets)
``strategies``                 what tells the systems apart: swarm, pipeline, swap, hub (likewise)
``policy``                     what a running peer decides: wiring, claims, cover (likewise)
``config`` ``events`` ``clock`` ``units`` ``errors``  what everything stands on
=============================  =====================================================================
"""

__version__ = "0.1.0"
