"""A microbatch's way: the ``trainer`` builds it, the ``dispatcher`` chooses the next peer and sees to the answer, the ``stage_server``
takes it in, computes and sends on; the ``ledger`` counts it once, in what is in flight of its step (``inflight``); answers that stand
out are asked for again (``cross_check``).

From above, a step is begun and sealed through ``InFlightStep`` and ``Ledger`` alone.
"""
