"""Speakers: in a large run a few peers of each stage tell the others what their stage agreed on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from muletrain.errors import ProtocolError
from muletrain.events import FrameRefused
from muletrain.network.memory import MemoryNetwork
from muletrain.policy.speakers import SPEAKERS, speakers
from muletrain.runtime.members.row import StageEntry, Statements
from muletrain.runtime.microbatch.inflight import InFlightStep
from muletrain.runtime.microbatch.microbatches import Microbatches
from muletrain.runtime.step.record import Certificate, RecordBuilder, StepRecord
from proofs.draws import draw
from proofs.injection import kind_of
from proofs.lying import SPEAKS
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import Outcome, readable
from tests.test_ledger import LINEAGE, Alive, entry

pytestmark = pytest.mark.timeout(400)
FIVE = tuple("bcdef")


def test_all_that_know_the_same_peers_know_the_same_speakers() -> None:
    peers = [f"peer-{k}" for k in range(40)]
    chosen = speakers(b"step 1", peers)
    assert len(chosen) == SPEAKERS
    assert speakers(b"step 1", reversed(peers)) == chosen
    assert speakers(b"step 1", [p for p in peers if p != chosen[0]])[: SPEAKERS - 1] == chosen[1:]
    assert {p for k in range(200) for p in speakers(b"%d" % k, peers)} == {*peers}, "everyone's turn comes"
    assert speakers(b"step 1", ["a", "b"]) in (("a", "b"), ("b", "a"))


def builder_with(*said: tuple[str, float], live: tuple[str, ...] = FIVE) -> RecordBuilder:
    """Stage 0 is ours; the peers of stage 1 say which norm its round has."""
    builder = Alive(("a",), live).builder()
    builder.add(entry(0))
    for peer, square in said:
        facts = entry(1, peer, live, shard={"square_norm": square})
        builder.certify(peer, 1, Certificate(facts.for_record()))
    return builder


def test_two_speakers_that_agree_are_believed_and_one_alone_is_not() -> None:
    assert builder_with(("b", 1.0)).record() is None
    assert builder_with(("b", 1.0), ("c", 2.0)).record() is None, "one of them lies"
    found = builder_with(("b", 1.0), ("c", 2.0), ("d", 1.0)).record()
    assert found is not None
    assert found.stages[1].square_norm == 4 * 4.0 + 1.0
    assert builder_with(*((p, float(p < "d")) for p in "bcde")).record() is None, "two and two"
    assert builder_with(("b", 1.0), live=("b",)).record() is not None, "nobody else could say it"
    with pytest.raises(ProtocolError, match="a certificate of stage 0 from a peer of stage 1"):
        builder_with().certify("b", 1, Certificate(entry(0).for_record()))


def test_a_product_of_tied_weights_is_certified_with_its_round() -> None:
    """We are of a third stage, and hear no products."""
    world = Alive(("a",), FIVE, ("x", "y"))
    builder = world.builder()
    builder.tied = (1, 2)
    builder.add(entry(0))
    for peer in "bc":
        builder.certify(peer, 1, Certificate(entry(1).for_record(), 0.5))
    assert builder.record() is None
    builder.certify("x", 2, Certificate(entry(2).for_record(), 0.5))
    assert builder.record() is None, "one of two"
    builder.certify("y", 2, Certificate(entry(2).for_record(), 0.5))
    assert builder.record() == StepRecord(4, LINEAGE, tuple(entry(stage).for_record() for stage in range(3)), 0.5)


# Worlds ---------------------------------------------------------------------------------------------------------------


def played(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, Counter[tuple[str, bool]]]:
    """The outcome, and the frames by kind and whether they stay within their sender's stage."""
    sent, send = Counter[tuple[str, bool]](), MemoryNetwork.send

    def sending(network: MemoryNetwork, peer: str, frame: Any, **how: Any) -> Any:
        sent[kind_of(frame), network.peer_id[:6] == peer[:6]] += 1
        return send(network, peer, frame, **how)

    monkeypatch.setattr(MemoryNetwork, "send", sending)
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert set(outcome.ends.values()) == {"finished"}
    return outcome, sent


def scenario(*faults: Fault, steps: int = 5) -> Scenario:
    return Scenario(3, (6, 5, 5), 2, steps, 12, 0.1, faults, speakers=True)


def test_attestations_stay_in_their_stage_and_speakers_tell_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, sent = played(scenario(), monkeypatch)
    assert sent["entry", False] == 0
    assert sent["entries", False] == 5 * 3 * SPEAKERS * 2 * SPEAKERS, "of each stage to the two others"
    assert sent["entries", True] == 5 * SPEAKERS * (5 + 4 + 4)
    assert outcome.longest < 2.0, "nobody had to ask"


@pytest.mark.parametrize("peer", ["peer-0b", "peer-1c", "peer-2a"])
@pytest.mark.parametrize("nth", [1, 7])
def test_a_speaker_that_dies_as_it_speaks_is_not_missed(peer: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first word, or between its words to others and those to its replicas."""
    outcome, _ = played(scenario(Fault(0.0, "kill", (peer,), on="entries", nth=nth)), monkeypatch)
    assert peer not in outcome.ends, "it died"
    assert outcome.stood_s < 5.0


def test_two_speakers_of_three_that_freeze_cost_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their stage's word is not enough then; the others ask."""
    frozen = [Fault(1.6, "freeze", (p,), 8.0) for p in ("peer-1a", "peer-1b", "peer-1c")]
    outcome, _ = played(scenario(*frozen), monkeypatch)
    assert outcome.stood_s < 15.0


@pytest.mark.parametrize("liar", ["peer-0c", "peer-1a", "peer-2d"])
def test_one_that_lies_as_a_speaker_changes_no_number(liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, sent = played(scenario(Fault(0.0, "lie", (liar,), how=SPEAKS), steps=8), monkeypatch)
    assert sent["entries", True] > 0
    assert outcome.longest < 3.0, "and no time"


@pytest.mark.parametrize("seed", range(6))
def test_drawn_worlds_with_speakers(seed: int) -> None:
    outcome = play(draw(seed, "speakers"))
    assert outcome.violations == [], "\n".join(readable(outcome))


def test_in_a_small_run_a_speaker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one of two replicas could end the other's step before it has begun."""
    send = MemoryNetwork.send

    async def sending(network: MemoryNetwork, peer: str, frame: Any, **how: Any) -> int:
        said = frame.message
        if network.peer_id == "peer-1a" and isinstance(said, Statements) and said.seal is not None:
            entries = tuple(
                StageEntry(stage=k, round=bytes(32), size=2, content=bytes(32), square_norm=1e12, finite=True)
                for k in range(2)
            )
            record = StepRecord(said.step, said.lineage, entries).hash
            lie = Statements(lineage=said.lineage, step=said.step, stage=1, entries=entries, record=record)
            await send(network, peer, lie.frame(), **how)
        return await send(network, peer, frame, **how)

    monkeypatch.setattr(MemoryNetwork, "send", sending)
    outcome = play(Scenario(3, (2, 2), 2, 5, 12, 0.1, ()))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(FrameRefused)
    assert outcome.longest < 2.0, "it costs nothing"


def test_replicas_that_are_no_speakers_do_not_speak_for_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any two of a stage were believed: the other stages applied a round of theirs, and the wrong weights stayed."""
    liars, begin = ("peer-1h", "peer-1i"), Microbatches.begin

    def begins(self: Microbatches, work: InFlightStep, **how: Any) -> None:
        ctx, me = self._ctx, self._ctx.net.peer_id
        if me in liars and work.step and not {*liars} & {*speakers(work.lineage, ctx.roster.stage(1))}:
            content, square = bytes(32), 1e12
            entry = StageEntry(
                stage=1, round=bytes([work.step] * 32), size=3, content=content, square_norm=square, finite=True
            )
            lie = Statements(lineage=work.lineage, step=work.step, stage=1, entries=(entry,))
            ctx.spawn(ctx.tell(ctx.roster.stage(0), lie), "lies")
        begin(self, work, **how)

    monkeypatch.setattr(Microbatches, "begin", begins)
    outcome = play(Scenario(3, (2, 9), 2, 6, 8, 0.02, (), checkpoint_every=1, speakers=True))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < 30.0
