"""A newcomer tries again while nobody answers, and the others do not wait for ever for one that gets nowhere."""

from __future__ import annotations

import asyncio

import pytest

from muletrain.clock import LoopClock
from muletrain.errors import AdmissionError, DeadlineExceeded, NetworkError, PeerUnreachable, Refused
from muletrain.events import Event, Note, Waiting
from muletrain.network.memory import MemoryHub
from muletrain.runs.join.client import JoinClient, find_admitter
from muletrain.runs.join.messages import AGAIN, CALL_S, Ready
from muletrain.runs.join.patience import LONGEST_S, PATIENCE_S, patiently
from muletrain.runs.join.rendezvous import PREPARE_S
from tests.newcomers import introduction, rendezvous_of
from tests.virtual import virtually


def test_a_newcomer_tries_again_while_nobody_answers_and_says_so_once() -> None:
    async def scenario() -> tuple[list[str], float]:
        said, errors = list[str](), [PeerUnreachable("no"), DeadlineExceeded("late"), Refused(f"it begins; {AGAIN}")]

        async def attempt() -> str:
            if errors:
                raise errors.pop(0)
            return "in"

        assert await patiently(attempt, LoopClock(), said.append) == "in"
        return said, LoopClock().now()

    said, took_s = virtually(scenario())
    assert said == ["joining failed, and is tried again for 60 s: no"]
    assert took_s < 10


@pytest.mark.parametrize(
    ("error", "patience_s"),
    [(PeerUnreachable("gone"), PATIENCE_S), (Refused("another version"), 0), (AdmissionError("wrong secret"), 0)],
)
def test_its_patience_ends_and_a_refusal_is_final(error: Exception, patience_s: float) -> None:
    async def scenario() -> float:
        async def attempt() -> None:
            raise error

        begin = LoopClock().now()
        with pytest.raises(type(error)):
            await patiently(attempt, LoopClock(), lambda why: None)
        return LoopClock().now() - begin

    assert patience_s <= virtually(scenario()) <= patience_s + LONGEST_S


def test_a_newcomer_whose_only_member_is_frozen_for_a_moment_gets_in() -> None:
    async def scenario() -> str:
        hub = MemoryHub()
        net, newcomer = hub.join("founder"), hub.join("newcomer")
        own = rendezvous_of(net, [1], expected=2)
        own.open()
        hub.barriers.freeze("founder")
        asyncio.get_running_loop().call_later(1.2 * CALL_S, hub.barriers.thaw, "founder")
        return await patiently(lambda: find_admitter(newcomer, ("/memory/p2p/founder",)), LoopClock(), lambda why: None)

    assert virtually(scenario()) == "founder"


def test_a_guest_that_gets_nowhere_is_named_and_loses_its_place() -> None:
    """The run begins without it. When it is ready after all, it is told to join again."""

    async def scenario() -> tuple[list[Event], float]:
        hub, said = MemoryHub(), list[Event]()
        own = rendezvous_of(hub.join("founder"), [1], expected=1, emit=said.append)
        own.open()
        own.seat("founder", introduction("founder"))
        own.ready("founder", Ready(trainer=True, place=""))
        slow = JoinClient(hub.join("slow"), "founder")
        await slow.join(introduction("slow"))
        genesis = await own.gather()
        assert [m.name for m in genesis.members] == ["founder"]
        begun_s = LoopClock().now()
        with pytest.raises(NetworkError, match=f"did not wait for this machine, which took long to get ready; {AGAIN}"):
            await slow.begin(Ready(trainer=False, place=""))
        return said, begun_s

    said, begun_s = virtually(scenario())
    assert [e.missing for e in said if isinstance(e, Waiting)] == [["slow preparing"]]
    (note,) = [e.message for e in said if isinstance(e, Note)]
    assert note == "slow has not got its stage ready for 15 min: the run does not wait for it any more"
    assert PREPARE_S <= begun_s <= PREPARE_S + CALL_S
