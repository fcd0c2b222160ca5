"""Holds what every room stands on. No actor lives here, and nothing here knows which peers are there.

- ``messages``: the base class of all frames and calls, with bounds on their ``sizes``.
- ``waiting``: waits with deadlines, and ``News``, which wakes them.
- ``tasks``: the background work of one peer. ``disk``: calls to a disk that may hang.
- ``plan``: the facts of a run. ``lifecycle``: what a peer is doing. ``meter``: what a peer measures of itself.
- ``branches``: how lineages of different branches are told apart.

Every room may use all of this. Only ``peer`` changes a ``Lifecycle``; who writes what of a ``Meter`` stands there.
"""
