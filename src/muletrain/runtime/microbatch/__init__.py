"""Follows a microbatch from its trainer through all stages and back.

- ``trainer``: builds the microbatches that it claims, and sees them through.
- ``dispatcher``: chooses the next peer (``Dispatcher._choose``), sends, and waits for the answer.
- ``stage_server``: admits a request, computes it, sends it on, and answers.
- ``inflight``: one step under way, with its ledger: which microbatches are in this peer's accumulator.
- ``validator``: sends held-out microbatches, and reports their loss.
- ``survey``: asks all peers who has a microbatch, before it is tried again.
- ``cross_check``: asks another peer for a gradient that stands out.
- ``position``: where the peer is in the run. ``microbatches``: all of the above of one peer.

Rooms above hold ``Microbatches`` and ``Position``. Only ``StageServer`` fills a ledger; only room ``step``
seals and reopens it, also by ``Position.enter``. Only room ``step`` changes a ``Position``; others may interrupt its
step.
"""
