"""Links that carry questions but no chunks, and replicas that seal and then send nothing: everyone is alive, and no
round completes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.clock import LoopClock
from muletrain.errors import DeadlineExceeded, PeerUnreachable
from muletrain.events import ReplicaApart, StepApplied
from muletrain.network.memory import MemoryNetwork
from muletrain.runtime.averaging.averager import Averager
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.core.blocks import AskBlocks
from proofs.draws import draw
from proofs.play import play
from proofs.scenario import FOR_EVER_S, SUSPENDED, Fault, Scenario
from proofs.verdict import Outcome, readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.runtime.averaging.rounds import Round
    from muletrain.wire.frame import Frame

pytestmark = pytest.mark.timeout(240)
STEPS = 3


def swallowed(monkeypatch: pytest.MonkeyPatch, lost: Callable[[str, str], bool]) -> None:
    """What is large is sent again and again until its sender gives up, where ``lost(sender, receiver)``."""
    send, call = MemoryNetwork.send, MemoryNetwork.call

    async def sends(net: MemoryNetwork, peer: str, frame: Frame, **how: Any) -> int:
        if frame.kind in (Shard.KIND, Reduced.KIND, "block") and lost(net.peer_id, peer):
            await LoopClock().sleep(how["timeout_s"])
            raise DeadlineExceeded("no receipt came")
        return await send(net, peer, frame, **how)

    async def calls(net: MemoryNetwork, peer: str, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if method == AskBlocks.KIND and lost(peer, net.peer_id):
            await LoopClock().sleep(timeout_s)
            raise DeadlineExceeded("no answer came")
        return await call(net, peer, method, payload, timeout_s=timeout_s)

    monkeypatch.setattr(MemoryNetwork, "send", sends)
    monkeypatch.setattr(MemoryNetwork, "call", calls)


def played(*stages: int) -> Outcome:
    return play(Scenario(21, stages, 2, STEPS, 8, 0.01, ()))


def between(a: str, b: str) -> Callable[[str, str], bool]:
    return lambda sender, receiver: {sender, receiver} == {a, b}


def finished(outcome: Outcome) -> set[str]:
    return {p for p, end in outcome.ends.items() if end == "finished"}


def test_a_pair_that_exchanges_no_chunks_is_parted_and_a_third_replica_has_what_both_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swallowed(monkeypatch, between("peer-1a", "peer-1b"))
    outcome = played(2, 3)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert len(finished(outcome)) == 5
    assert outcome.virtual_s < 300, "later steps do not try again"


def test_of_two_replicas_that_exchange_no_chunks_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers gave up, those of the other stage first."""
    swallowed(monkeypatch, between("peer-1a", "peer-1b"))
    outcome = played(2, 2)
    assert finished(outcome) >= {"peer-0a", "peer-0b", "peer-1a"}, "\n".join(readable(outcome))
    assert not [v for v in outcome.violations if not v.startswith("peer-1b did not survive")]


@pytest.mark.parametrize("silent", ["peer-1a", "peer-1c"])
def test_a_replica_whose_chunks_do_not_come_is_left_behind(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others send it comes."""
    swallowed(monkeypatch, lambda sender, receiver: sender == silent)
    outcome = played(2, 3)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert len(finished(outcome)) == 5


def test_three_replicas_of_which_two_exchange_no_chunks_agree_though_a_microbatch_takes_minutes() -> None:
    """Each left another one out, for ending its attempts, and asked for gaps that nobody filled for it: an hour, and no
    end. Found by 'python -m proofs fuzz' (seed 300031)."""
    faults = (
        Fault(3.452645151045946, "join", ("peer-2j0",)),
        Fault(169.62629969387672, "small", ("peer-2a", "peer-2c"), for_s=FOR_EVER_S, limit=2000),
    )
    seats = [[f"peer-{stage}{end}" for end in ends] for stage, ends in enumerate(("aba", "aba", "abc"))]
    world = Scenario(300031, (2, 2, 3), 6, 2, 9, 0.1, faults, overrides=(f"pipeline.seats={seats}",), stalls=0.1)
    slow = replace(world, longer=800.0, slower=800.0, narrow=(("peer-2j0", 69_499.0),), without_data=("peer-2j0",))
    outcome = play(replace(slow, overrides=(*world.overrides, 'pipeline.schedule="gpipe"')))
    assert outcome.violations == [], "\n".join(readable(outcome))


def test_a_replica_that_computes_for_minutes_is_not_left_out() -> None:
    """Each of two replicas left the other one out, and each had its gaps run into the other's accumulator: no end. Found
    by 'python -m proofs fuzz --kind lie' (seed 13038)."""
    sleep = Fault(1197.2, "freeze", ("peer-0b",), for_s=2223.9, how=SUSPENDED)
    seats = tuple(
        f"pipeline.{s}" for s in ("seats=[['peer-0a', 'peer-0b'], ['peer-1a', 'peer-1b']]", 'schedule="gpipe"')
    )
    world = Scenario(13038, (2, 3), 2, 1, 28, 0.0, (sleep,), overrides=seats, stalls=0.01)
    outcome = play(replace(world, longer=905.9, slower=905.9))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert not [e for e in outcome.events if isinstance(e, ReplicaApart)]


def test_gaps_that_wait_for_room_at_full_peers_are_not_given_out_by_a_second_trainer() -> None:
    """Two replicas accumulated each, and dropped all they had: a step of an hour did not end in six. Found by 'python -m
    proofs fuzz --kind lie'."""
    outcome = play(draw(15162, "lie"))
    assert outcome.violations == []


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_replica_that_no_chunks_can_be_sent_to_is_left_out(monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    """It is heard, and nobody was blamed: after 40 attempts replicas ended, of two replicas both."""
    send = MemoryNetwork.send

    async def sends(net: MemoryNetwork, peer: str, frame: Frame, **how: Any) -> int:
        if isinstance(frame.message, Shard | Reduced) and peer == "peer-1a" and frame.message.step:
            raise PeerUnreachable("the peer closes the stream", peer)
        return await send(net, peer, frame, **how)

    monkeypatch.setattr(MemoryNetwork, "send", sends)
    outcome = played(2, replicas)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert set(outcome.ends.values()) == {"finished"}
    assert outcome.virtual_s < 60.0


def test_who_was_down_before_its_chunks_were_waited_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end was told at a moment when nobody waited: the run was lost."""
    reduce = Averager.reduce

    async def slowly(averager: Averager, round_: Round, gradient: Tensor) -> Any:
        pause_s = {"peer-1a": 6.0, "peer-1b": 0.2}.get(averager._ctx.net.peer_id, 0.0)
        await averager._ctx.clock.sleep(pause_s if round_.step == 2 else 0.0)
        return await reduce(averager, round_, gradient)

    monkeypatch.setattr(Averager, "reduce", slowly)
    hole = Fault(2.0, "blackhole", ("peer-1b",), FOR_EVER_S, on="shard")
    outcome = play(Scenario(3, (2, 2), 2, 6, 8, 0.02, (hole,), checkpoint_every=1))
    assert finished(outcome) == {"peer-0a", "peer-0b", "peer-1a"}, "\n".join(readable(outcome))
    assert outcome.of(StepApplied)[-1].t < 120.0
