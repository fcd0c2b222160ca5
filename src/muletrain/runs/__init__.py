"""Builds a run from a config, as processes of peers.

``fleet`` starts and ends the processes of one command; each runs a ``worker`` with a ``spec``. In the process, ``host``
holds the machine's resources, ``join`` founds or joins the run, and ``training`` runs the peer of ``runtime`` to the
end. ``assemble`` derives the plan that all peers share; ``checkpoint`` and ``parts`` provide the first state; ``chaos``
injects faults; ``result`` measures the trained model.
"""
