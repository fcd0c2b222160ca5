"""A microbatch's way: a ``trainer`` builds it, a ``dispatcher`` chooses the next peer and sees to the answer, the
``stage_server`` takes it in, computes and sends on. The ``ledger`` counts it once, in what is in flight of its step
(``inflight``); ``survey`` asks all peers who has it before it is tried again; gradients that stand out are asked for
again (``cross_check``). ``position`` says where the peer is in the run.

Rooms above hold ``Microbatches`` and ``Position``; they begin and seal a step through its ``InFlightStep``.
"""
