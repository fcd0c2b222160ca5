"""A peer's lifecycle is its state at one stage, from arrival until the peer leaves or the run ends."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """The state of a peer."""

    JOINING = "joining"
    """The peer has just come, without a state of its stage and without a branch."""
    ROLLED_BACK = "rolled_back"
    """The run rolled back: the peer loads its stage from the checkpoint, on the new branch."""
    RECOVERING = "recovering"
    """The peer fell behind, and takes the state of a replica."""
    TRAINING = "training"
    LEAVING = "leaving"
    """The peer has applied its last step, and waits for the other replicas of its stage to do the same."""
    FINISHED = "finished"
    """The run has ended."""


AFTER = {
    State.JOINING: {State.TRAINING, State.FINISHED},
    State.ROLLED_BACK: {State.TRAINING, State.FINISHED},
    State.RECOVERING: {State.TRAINING, State.FINISHED},
    State.TRAINING: {State.RECOVERING, State.LEAVING, State.FINISHED},
    State.LEAVING: {State.TRAINING},
    State.FINISHED: set[State](),
}
"""The allowed transitions. A peer that rolls back begins again, with another lifecycle."""


class Lifecycle:
    """The state of one peer, changed only by room ``peer``."""

    def __init__(self, state: State = State.TRAINING) -> None:
        self.state = state

    def to(self, state: State) -> None:
        """Change to ``state``. Raises RuntimeError for a transition that is not allowed."""
        if state is not self.state:
            if state not in AFTER[self.state]:
                raise RuntimeError(f"a peer that is {self.state} cannot be {state} next")
            self.state = state

    @property
    def joining(self) -> bool:
        return self.state is State.JOINING

    @property
    def has_state(self) -> bool:
        """Does the peer have the state of its stage?"""
        return self.state in (State.TRAINING, State.LEAVING, State.FINISHED)

    @property
    def arrived(self) -> bool:
        """Has the peer trained on this branch, or could the peer have trained?"""
        return self.state not in (State.JOINING, State.ROLLED_BACK)

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def done(self) -> bool:
        """The peer works on no further step, and only serves earlier steps to other peers."""
        return self.state in (State.LEAVING, State.FINISHED)
