"""Holds the common base of every room. No actor lives here, and nothing here knows the present peers.

- ``messages``: the base class of all frames and calls, with bounds on their ``sizes``.
- ``blocks``: the one transport of large data. Rooms register readers of what they give, under the data's digest.
- ``waiting``: waits with deadlines, and ``News``, which wakes waits. ``times``: fixed times that several rooms share.
- ``tasks``: the background work of one peer. ``disk``: calls to a disk that may hang.
- ``plan``: the facts of a run. ``lifecycle``: a peer's state. ``meter``: a peer's measurements of itself.
- ``branches``: labels that distinguish the lineages of different branches.

Every room may use all of this. Only ``peer`` changes a ``Lifecycle``; the docstrings of ``Meter`` name the writers.
"""
