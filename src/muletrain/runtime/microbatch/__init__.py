"""Follows a microbatch from its trainer through all stages and back.

- ``trainer``: builds the claimed microbatches, and sees them through.
- ``dispatcher``: chooses the next peer (``Dispatcher._choose``), sends, and watches the peers that owe answers.
- ``stage_server``: admits a request, computes, sends the result on, and answers.
- ``inflight``: one step in flight, with the ledger of this peer's accumulator.
- ``validator``: sends held-out microbatches, and reports their loss.
- ``cross_check``: asks another peer for a gradient that stands out.
- ``position``: the peer's place in the run, and a survey of what all peers have. ``microbatches``: all of the above for one peer.

Rooms above hold ``Microbatches`` and ``Position``. Only ``StageServer`` fills a ledger; only room ``step`` seals and
reopens it, also by ``Position.enter``. Only room ``step`` changes a ``Position``; other rooms may interrupt the step.
"""
