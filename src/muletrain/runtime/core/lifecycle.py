"""A peer's lifecycle says what it is doing at one stage, from its arrival until it leaves or the run ends."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """What a peer is doing."""

    JOINING = "joining"
    """It has just come and has no state of its stage yet. It is on no branch."""
    ROLLED_BACK = "rolled_back"
    """The run rolled back: it loads its stage from the checkpoint, on the new branch."""
    RECOVERING = "recovering"
    """It fell behind, and takes the state of a replica."""
    TRAINING = "training"
    LEAVING = "leaving"
    """It has applied its last step, and waits until the other replicas of its stage have, too."""
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
"""The allowed transitions. A peer that rolls back begins anew, with another lifecycle."""


class Lifecycle:
    """The state of one peer. Only room ``peer`` changes it."""

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
        """Does the peer have its stage's state?"""
        return self.state in (State.TRAINING, State.LEAVING, State.FINISHED)

    @property
    def arrived(self) -> bool:
        """Has the peer trained on this branch, or could it have?"""
        return self.state not in (State.JOINING, State.ROLLED_BACK)

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def done(self) -> bool:
        """The peer works on no further step: it only gives others what they lack of earlier steps."""
        return self.state in (State.LEAVING, State.FINISHED)
