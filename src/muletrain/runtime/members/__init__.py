"""Knows who is in the run, and which peers this one can count on.

- ``roster``: the members, their stages, and who is alive. ``membership``: introductions, the questions behind it.
- ``detector``: the failure detector, who is suspected, down or back. ``silence`` tells it whom to ask.
- ``watchdog``: an operation of this peer's own device that hangs.
- ``context``: what all actors of one peer share: network, clock, compute, roster, plan, detector.
- ``rebalancing``: moving to another stage. ``leaving``: leaving in order.

Every room may read the roster. Other rooms mark peers down or back only through ``FailureDetector``; ``Membership``
admits members, and ``peer`` notes who moved, left or was expelled.
"""
