"""Recovers a run that has lost a stage, or that has two histories.

- ``rollback``: a stage lost all its peers. The run goes back to the newest complete checkpoint, on a new branch, and
  peers of other stages adopt the lost stage. Also waits for a trainer when none is left.
- ``forks``: a healed partition brings two histories together. One stays (``policy.fork_choice``), and the peers of the
  other take its state.
- ``messages``: the calls of both.

``Rollback.ordered`` tells ``peer`` to begin anew; ``Forks`` interrupts the step with ``Behind``. Neither touches
weights, ledgers or rounds.
"""
