"""muletrain: train large transformer models on whatever machines you can get, over ordinary internet.

The package reads top-down; imports run downwards only (enforced by ``tests/test_imports.py``):

=============================  =====================================================================
``cli``                        the commands a person types
``runs``                       builds a run from a config: processes, tickets, progress, reports
``sim``                        the virtual world, fleets played, plans
``runtime``                    the step protocol: microbatches, agreement, checkpoints, recovery
``network`` ``compute`` ``wire``  the seams and their implementations; frames and tensor codecs
``model`` ``data`` ``optim``   decoder and stages; corpora and microbatches; AdamW and LAMB
``planning``                   decisions before a run: placement, partition (no torch, no sockets)
``strategies``                 differences between the systems: swarm, pipeline, swap, hub (likewise)
``policy``                     decisions of a running peer: wiring, claims, cover (likewise)
``config`` ``events`` ``clock`` ``units`` ``errors``  the common base
=============================  =====================================================================
"""

__version__ = "0.1.0"
