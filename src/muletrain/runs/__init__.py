"""Builds a run from a config, as processes of peers.

``fleet`` starts and ends the processes of one command; each runs a ``worker`` with a ``spec``. There a ``host`` holds
what the peer has on its machine, ``join`` makes it a founder or a newcomer, and ``training`` runs its peer of
``runtime`` to the end. ``assemble`` derives from the config what every peer must agree on; ``checkpoint`` and
``parts`` are what a run begins with; ``chaos`` injects faults; ``result`` measures what came out.
"""
