"""Knows the members of the run, and the peers that this peer can count on.

- ``roster``: the members, their stages, and the live peers. ``membership``: introductions.
- ``detector``: marks peers as suspected, overdue, down or back.
- ``watchdog``: an operation of this peer's own device that hangs.
- ``context``: shared by all actors of one peer: network, clock, compute, roster, plan, detector.
- ``rebalancing``: moving to another stage, and what a stage needs here. ``leaving``: leaving in order.

Every room may read the roster. Other rooms mark peers down or back only through ``FailureDetector``; ``Membership``
admits members, and ``peer`` notes moves, departures and expulsions.
"""
