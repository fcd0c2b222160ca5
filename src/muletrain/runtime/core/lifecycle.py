"""The lifecycle of a peer at one stage, from when it comes to when it goes."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """What a peer is doing."""

    JOINING = "joining"
    """A newcomer without its stage's state; it is on no branch yet."""
    ROLLED_BACK = "rolled_back"
    """It loads what a checkpoint has of its stage, on the branch of a step back."""
    RECOVERING = "recovering"
    """It fell behind, and asks replicas for their state."""
    TRAINING = "training"
    LEAVING = "leaving"
    """It has applied its last step, and waits until the other replicas of its stage have."""
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
"""Allowed transitions. A peer that is rolled back begins anew, with another lifecycle."""


class Lifecycle:
    """``Peer`` is its only writer."""

    def __init__(self, state: State = State.TRAINING) -> None:
        self.state = state

    def to(self, state: State) -> None:
        """Raises RuntimeError for a transition that is not allowed."""
        if state is not self.state:
            if state not in AFTER[self.state]:
                raise RuntimeError(f"a peer that is {self.state} cannot be {state} next")
            self.state = state

    @property
    def joining(self) -> bool:
        return self.state is State.JOINING

    @property
    def has_state(self) -> bool:
        """Does it have its stage's state?"""
        return self.state in (State.TRAINING, State.LEAVING, State.FINISHED)

    @property
    def arrived(self) -> bool:
        """Has it trained, or could it have?"""
        return self.state not in (State.JOINING, State.ROLLED_BACK)

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def done(self) -> bool:
        """It works on no step any more: from now on it gives only what others lack of the steps before."""
        return self.state in (State.LEAVING, State.FINISHED)
