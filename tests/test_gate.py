"""Admission without sockets: certificates, renewals, and those who try to get around them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from muletrain.errors import AdmissionError
from muletrain.network import gate as gate_module
from muletrain.network.gate import (
    BANNED,
    BURST,
    FOREIGN,
    FULL,
    NO_SECRET,
    NOT_IN,
    NOT_IN_ITSELF,
    OTHER_SECRET,
    OUT,
    REMOVED,
    TOO_MANY,
    Gate,
)
from muletrain.network.identity import Key
from muletrain.network.offences import BAN_S, LIMIT, MAX_TRACKED, REPORTS, WINDOW_S, Offences, Reports
from muletrain.network.trust import (
    FOREIGN_OWN,
    NO_HOST,
    VISIT_S,
    Certificate,
    Chain,
    Renewal,
    Trust,
    packed_chain,
    packed_renewal,
    read_renewal,
)
from muletrain.network.trust import OWNER as OWNER_SIGNED

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET, NEXT = b"s" * 32, b"n" * 32
OWNER = Key.of_seed(b"o" * 32)


class Shown(Trust):
    """Shows others the chain ``shown``, if there is one, whatever it is worth."""

    shown: Chain | None = None

    @property
    def chain(self) -> Chain:
        return super().chain if self.shown is None else self.shown


class Someone:
    """A peer with its gate; the wire is a method call. ``clock`` is shared by all."""

    clock = 1000.0

    def __init__(self, owner: Any = OWNER.public, secret: bytes = SECRET, *, visitor: bool = False) -> None:
        self.key = Key.new()
        self.id = self.key.peer_id
        self.refusals: list[str] = []
        self.gone: list[frozenset[str]] = []
        self.trust = Shown("run", owner, secret, self.key, now=lambda: Someone.clock)
        self.gate = Gate(
            self.id,
            "run",
            "1",
            self.trust,
            lambda who, why: self.refusals.append(why),
            self.gone.append,
            visitor=visitor,
        )

    def enter(self, other: Someone) -> None:
        asyncio.run(self.gate.enter(other.id, self.wire(other)))

    def wire(self, other: Someone) -> Any:
        async def call(payload: bytes) -> bytes:
            return other.gate.answer(self.id, payload)

        return call

    def sync(self, other: Someone) -> None:
        asyncio.run(self.gate.sync(self.wire(other)))

    def tells(self, other: Someone) -> None:
        asyncio.run(self.gate.pass_on(other.id, self.wire(other)))

    def forget(self, other: Someone) -> None:
        """As if one of the two had been restarted."""
        self.gate.forget_entry(other.id)

    def speaks_to(self, other: Someone) -> bool:
        return other.gate.check(self.id, "call")


@pytest.fixture(autouse=True)
def _clock() -> None:
    Someone.clock = 1000.0


@pytest.fixture
def founder() -> Someone:
    return Someone(OWNER)


def guest(of: Someone, *others: Someone, **options: Any) -> Someone:
    newcomer = Someone(**options)
    for host in (of, *others):
        newcomer.enter(host)
    return newcomer


@contextlib.contextmanager
def refused(*reasons: str) -> Iterator[None]:
    """Somebody is, for one of the reasons."""
    with pytest.raises(AdmissionError) as caught:
        yield
    assert str(caught.value) in reasons


# Coming in ----------------------------------------------------------------------------------------------------------------


def test_one_handshake_admits_both_sides(founder: Someone) -> None:
    newcomer = Someone()
    assert not newcomer.speaks_to(founder)
    assert founder.refusals == ["call before admission"]
    newcomer.enter(founder)
    assert newcomer.speaks_to(founder)
    assert founder.speaks_to(newcomer)
    assert founder.gate.entered(newcomer.id)
    assert newcomer.gate.entered(founder.id)


def test_members_know_each_other_by_their_certificates(founder: Someone) -> None:
    one, other = guest(founder), guest(founder)
    one.trust.secret = other.trust.secret = None  # not needed between members
    one.enter(other)
    assert one.speaks_to(other)
    assert other.speaks_to(one)


def test_a_member_lets_others_in_and_its_guests_do_not(founder: Someone) -> None:
    member = guest(founder)
    newcomer = guest(member)
    newcomer.enter(founder)
    assert newcomer.speaks_to(founder)
    with refused(NO_HOST):
        guest(newcomer)
    forged = Someone()
    forged.trust.shown = (certificate(newcomer.key, forged.id), newcomer.trust.chain[0])
    with refused(FOREIGN):
        forged.enter(founder)


def test_who_has_not_come_in_lets_nobody_in() -> None:
    one, other = Someone(), Someone()
    with refused(NOT_IN_ITSELF):
        one.enter(other)


def test_the_wrong_secret_is_told_to_both(founder: Someone) -> None:
    newcomer = Someone(secret=b"t" * 32)
    with refused(OTHER_SECRET):
        newcomer.enter(founder)
    assert founder.refusals == [NO_SECRET]


def test_a_member_of_another_owner_is_not_believed(founder: Someone) -> None:
    """It has the secret (a ticket was copied) and founds a run of the same name."""
    impostor = Someone(Key.new())
    newcomer = Someone()
    with refused(FOREIGN_OWN):
        newcomer.enter(impostor)
    member = guest(founder)
    with refused(FOREIGN):
        member.enter(impostor)
    with refused(FOREIGN):
        impostor.enter(member)
    assert not impostor.speaks_to(member)
    assert not member.gate.entered(impostor.id)


def test_a_proof_is_of_no_use_to_another_peer(founder: Someone) -> None:
    """A man in the middle relays the honest messages under his own id."""
    newcomer, mallory = Someone(), Someone()

    async def relay(payload: bytes) -> bytes:
        return founder.gate.answer(mallory.id, payload)

    with pytest.raises(AdmissionError):
        asyncio.run(newcomer.gate.enter(mallory.id, relay))
    assert not mallory.speaks_to(founder)
    assert not mallory.speaks_to(newcomer)


def test_a_certificate_is_of_no_use_to_another_peer(founder: Someone) -> None:
    member, thief = guest(founder), Someone()
    stolen = member.trust.chain
    for chain in (stolen, (dataclasses.replace(stolen[0], peer=thief.id),)):
        thief.trust.shown = chain
        with refused(FOREIGN):
            thief.enter(founder)
    assert not thief.speaks_to(founder)


def test_a_recorded_admission_is_of_no_use_again(founder: Someone) -> None:
    """libp2p keeps others from sending it; this is the peer itself, after it was forgotten, without the secret."""
    newcomer, sent = Someone(), list[bytes]()

    async def recorded(payload: bytes) -> bytes:
        sent.append(payload)
        return founder.gate.answer(newcomer.id, payload)

    asyncio.run(newcomer.gate.enter(founder.id, recorded))
    assert len(sent) == 2
    restarted = Someone(OWNER)
    for payload in sent:
        asyncio.run(answered(restarted, newcomer.id, payload))
    assert not restarted.gate.admitted(newcomer.id)


async def raw_answer(by: Someone, to: str, payload: bytes) -> bytes:
    return by.gate.answer(to, payload)


async def answered(by: Someone, to: str, payload: bytes) -> Any:
    return msgpack.unpackb(by.gate.answer(to, payload))


def test_a_visitor_is_let_in_for_some_minutes_and_lets_nobody_in(founder: Someone) -> None:
    visitor = guest(founder, visitor=True)
    assert visitor.speaks_to(founder)
    with refused(NO_HOST):
        guest(visitor)
    Someone.clock += VISIT_S + 1
    assert not visitor.speaks_to(founder)
    assert not founder.gate.entered(visitor.id)
    visitor.forget(founder)
    visitor.enter(founder)  # it still has the ticket
    assert visitor.speaks_to(founder)


def test_visitors_leave_no_trace(founder: Someone) -> None:
    member = guest(founder)
    for _ in range(20):
        guest(founder, visitor=True)
        Someone.clock += VISIT_S / 4
    assert len(founder.gate) < 8
    assert member.speaks_to(founder)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x90", b"x" * 10000, msgpack.packb(["hello", 1, 2]), msgpack.packb(["renewed", [1], b""])]
    + [
        msgpack.packb(["hello", "1", "run", bytes(16), 0, chain])
        for chain in (7, [7], [[]] * 3, [["a", "", 0, 1, b""]])
    ],
)
def test_malformed_admissions_are_refused(founder: Someone, payload: bytes) -> None:
    said = asyncio.run(answered(founder, "peer", payload))
    assert said[0] is False
    assert "malformed" in said[1]
    assert ["malformed" in why for why in founder.refusals] == [True]


def test_a_flood_of_admissions_is_slowed_and_members_are_not(founder: Someone) -> None:
    member = guest(founder)

    async def flood() -> tuple[bytes, bytes]:
        last = [founder.gate.answer(f"peer{n}", b"") for n in range(int(BURST) + 50)][-1]
        return last, founder.gate.answer(member.id, msgpack.packb(["sync", 0]))

    stranger, ours = asyncio.run(flood())
    assert msgpack.unpackb(stranger)[1] == TOO_MANY
    assert msgpack.unpackb(ours) == [True, None]


# Renewals -----------------------------------------------------------------------------------------------------------------


def kick(founder: Someone, *stay: Someone) -> None:
    founder.gate.adopt(founder.trust.renew([founder.id, *(s.id for s in stay)], NEXT), NEXT)


def test_whoever_is_kicked_is_out_everywhere(founder: Someone) -> None:
    stays, kicked = guest(founder), guest(founder)
    kicked.enter(stays)
    kick(founder, stays)
    assert founder.gone == [{kicked.id}]
    assert not kicked.speaks_to(founder)
    assert not founder.gate.entered(kicked.id)
    assert kicked.speaks_to(stays)  # it has not heard yet
    founder.tells(stays)
    assert not kicked.speaks_to(stays)
    assert stays.gone == [{kicked.id}]
    assert stays.trust.secret == NEXT
    assert stays.speaks_to(founder)
    for host in (founder, stays):
        kicked.forget(host)
        with refused(REMOVED, OUT):
            kicked.enter(host)
        assert kicked.trust.secret is None, "it hears that it is out, not the new secret"
        assert not kicked.trust.belongs


def test_the_kicked_do_not_come_back_with_the_old_ticket(founder: Someone) -> None:
    stays = guest(founder)
    kick(founder, stays)
    founder.tells(stays)
    for host in (founder, stays):
        with refused(OTHER_SECRET):
            guest(host)
        assert host.refusals[-1] == NO_SECRET
        assert guest(host, secret=NEXT).speaks_to(host), "who has the new ticket comes in"


def test_identities_kept_in_reserve_are_out_with_the_kicked(founder: Someone) -> None:
    """Before it is kicked, it gets certificates for others of its own, and gives some itself, also for epochs to
    come."""
    stays, kicked = guest(founder), guest(founder)
    reserve = [guest(founder), guest(kicked), guest(stays), guest(founder, visitor=True)]
    ahead = Someone()
    ahead.trust.genuine = ahead.trust.current = lambda peer, chain: True  # type: ignore[method-assign]
    content = (ahead.id, kicked.id, 1, math.inf)
    signature = kicked.key.sign("certificate", "run", *content)
    ahead.trust.shown = (Certificate(*content, signature), *kicked.trust.chain)
    kick(founder, stays)
    founder.tells(stays)
    for sleeper in (*reserve, ahead):
        for host in (founder, stays):
            sleeper.forget(host)
            with refused(REMOVED, OUT, OTHER_SECRET, NO_SECRET, NOT_IN):
                sleeper.enter(host)
            assert not sleeper.speaks_to(host)


def test_guests_of_the_kicked_may_stay(founder: Someone) -> None:
    host = guest(founder)
    innocent = guest(host, founder)
    kick(founder, innocent)
    founder.tells(innocent)
    assert innocent.speaks_to(founder)
    assert founder.speaks_to(innocent)
    other = guest(innocent, secret=NEXT)  # named by the owner, it may let others in
    other.enter(founder)
    assert other.speaks_to(founder)


def test_word_spreads_from_member_to_member(founder: Someone) -> None:
    """By questions now and then, by whoever meets somebody who is behind, and to whoever comes later."""
    one, asleep, kicked = guest(founder), guest(founder), guest(founder)
    for other in (asleep, kicked):
        other.enter(one)
    kicked.enter(asleep)
    kick(founder, one, asleep)
    one.sync(founder)
    assert one.trust.secret == NEXT
    asleep.forget(one)
    asleep.enter(one)
    assert asleep.trust.secret == NEXT
    assert asleep.gone == [{kicked.id}]
    late = guest(founder, secret=NEXT)
    assert late.trust.epoch == 1
    with pytest.raises(AdmissionError):
        late.enter(kicked)
    assert not kicked.speaks_to(late)


def test_a_newcomer_tells_whoever_is_behind(founder: Someone) -> None:
    behind, kicked = guest(founder), guest(founder)
    kick(founder, behind)
    late = guest(founder, secret=NEXT)
    late.enter(behind)
    assert late.speaks_to(behind)
    assert behind.trust.secret == NEXT
    with pytest.raises(AdmissionError):
        late.enter(kicked)
    assert kicked.trust.secret == SECRET
    assert not late.gate.entered(kicked.id)


def test_only_the_owner_renews(founder: Someone) -> None:
    member = guest(founder)
    kept, digest = (member.id,), bytes(32)
    forged = Renewal(9, kept, digest, member.key.sign("renewal", "run", 9, kept, digest))
    other_run = Renewal(9, kept, digest, OWNER.sign("renewal", "other", 9, kept, digest))
    for wrong in (forged, other_run):
        said = asyncio.run(answered(founder, member.id, msgpack.packb(["renewed", packed_renewal(wrong), b"mine"])))
        assert said[0] is False
    assert founder.trust.epoch == 0


def test_an_old_renewal_changes_nothing(founder: Someone) -> None:
    """The kicked brings back the one that named it."""
    once = guest(founder)
    kick(founder, once)
    first = founder.trust.renewal
    founder.gate.adopt(founder.trust.renew([founder.id], b"3" * 32), b"3" * 32)
    said = asyncio.run(answered(founder, once.id, msgpack.packb(["renewed", packed_renewal(first), NEXT])))
    assert said == [True, None]
    assert founder.trust.epoch == 2
    assert founder.trust.secret == b"3" * 32
    assert not once.speaks_to(founder)


def test_a_secret_the_renewal_does_not_name_is_not_taken(founder: Someone) -> None:
    """Anyone may bring a renewal; only the owner's new secret goes with it."""
    member, mallory = guest(founder), guest(founder)
    kick(founder, member)
    for secret in (b"m" * 32, SECRET):
        asyncio.run(
            answered(member, mallory.id, msgpack.packb(["renewed", packed_renewal(founder.trust.renewal), secret]))
        )
        assert member.trust.epoch == 1
        assert member.trust.secret is None
    with refused(OTHER_SECRET):
        guest(member, secret=b"m" * 32)
    member.sync(founder)  # it knows that it lacks it
    assert member.trust.secret == NEXT


def test_strangers_learn_neither_the_secret_nor_who_is_in(founder: Someone) -> None:
    member, stranger = guest(founder), Someone()
    kick(founder, member)
    questions: list[Any] = [
        ["sync", 0],
        ["sync", -1],
        ["hello", "1", "run", bytes(16), 0, []],
        ["proof", bytes(16), bytes(32), False],
        ["hello", "1", "run", bytes(16), 0, packed_chain(forged_by(stranger))],
    ]
    for question in questions:
        said = asyncio.run(raw_answer(founder, stranger.id, msgpack.packb(question)))
        assert NEXT not in said
        assert member.id.encode() not in said


def forged_by(forger: Someone) -> Chain:
    content = (forger.id, "", 0, math.inf)
    return (Certificate(*content, forger.key.sign("certificate", "run", *content)),)


# Found in review: what a member or somebody kicked might try --------------------------------------------------------------


def test_whoever_was_named_cannot_block_the_next_list(founder: Someone) -> None:
    """It needs no certificate any more, so nobody checks the one it shows."""
    member = guest(founder)
    kick(founder, member)
    founder.tells(member)
    member.trust.shown = tuple(Certificate("x" * 60_000, "y" * 60_000, 0, 0.0, bytes(64)) for _ in range(2))
    asyncio.run(answered(founder, member.id, hello(member)))
    assert member.speaks_to(founder)
    assert founder.gate.certificate(member.id) == ()


def hello(of: Someone) -> bytes:
    packed: bytes = msgpack.packb(["hello", "1", "run", bytes(16), of.trust.epoch, packed_chain(of.trust.chain)])
    return packed


def test_the_kicked_cannot_spoil_a_newcomer_with_an_old_renewal(founder: Someone) -> None:
    """It was named in the first renewal and removed by the second; it meets a newcomer before the others do."""
    once = guest(founder)
    kick(founder, once)
    first = packed_renewal(founder.trust.renewal)
    founder.gate.adopt(founder.trust.renew([founder.id], b"3" * 32), b"3" * 32)
    newcomer = Someone(secret=b"3" * 32)
    said = asyncio.run(answered(newcomer, once.id, msgpack.packb(["renewed", first, None])))
    assert said[0] is False

    async def refusing(payload: bytes) -> bytes:
        packed: bytes = msgpack.packb([False, "go away", 1, first])
        return packed

    with pytest.raises(AdmissionError, match="go away"):
        asyncio.run(newcomer.gate.enter(once.id, refusing))
    once.gate.adopt(read_renewal(msgpack.unpackb(msgpack.packb(first))), NEXT)
    with refused(OTHER_SECRET):
        newcomer.enter(once)
    assert newcomer.trust.secret == b"3" * 32
    newcomer.enter(founder)
    assert newcomer.speaks_to(founder)
    assert not once.speaks_to(newcomer)


def test_nobody_comes_back_by_the_next_kick(founder: Someone) -> None:
    """Of a list of who is in, only those count that can show it: the certificates of who was kicked do not."""
    stays, kicked = guest(founder), guest(founder)
    shown = kicked.trust.chain
    assert founder.trust.current(kicked.id, shown)
    kick(founder, stays)
    assert founder.trust.genuine(kicked.id, shown)
    assert not founder.trust.current(kicked.id, shown)
    assert founder.trust.current(stays.id, ())


def test_the_number_of_those_known_is_bounded_and_who_has_gone_makes_room(
    founder: Someone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a long run each process is somebody new."""
    monkeypatch.setattr(gate_module, "MAX_ADMITTED", 8)
    host = guest(founder)
    ids = [host.id]
    for _ in range(40):
        someone = guest(host, founder)
        ids.append(someone.id)
        assert founder.gate.admitted(host.id)  # it speaks now and then
        assert someone.speaks_to(founder)
        assert len(founder.gate) <= 8
    speaking = sum(map(founder.gate.admitted, ids))
    monkeypatch.setattr(gate_module, "MAX_ADMITTED", speaking)
    with refused(FULL):  # all are there
        guest(host, founder)


# Repeat offenders ---------------------------------------------------------------------------------------------------------


def test_repeat_offenders_are_left_out_for_a_while_and_rare_ones_are_not() -> None:
    clock = [0.0]
    offences = Offences(lambda: clock[0])
    for _ in range(3 * LIMIT):
        clock[0] += WINDOW_S / (LIMIT - 2)
        assert not offences.count("rare")
    said = [offences.count("often") for _ in range(LIMIT)]
    assert said == [False] * (LIMIT - 1) + [True]
    assert offences.banned("often")
    assert not offences.banned("rare")
    assert not any(offences.count("often") for _ in range(LIMIT)), "it is told once"
    clock[0] += BAN_S + WINDOW_S + 1
    assert not offences.banned("often")
    assert [offences.count("often") for _ in range(LIMIT)][-1], "and may be again"


def test_the_memory_of_offences_is_bounded() -> None:
    offences = Offences(lambda: 0.0)
    for n in range(3 * MAX_TRACKED):
        for _ in range(LIMIT if n % 2 else 1):
            offences.count(f"peer{n}")
    assert len(offences) <= 2 * MAX_TRACKED
    assert offences.banned(f"peer{3 * MAX_TRACKED - 1}")


def test_a_flood_of_refusals_is_told_in_few_words() -> None:
    clock = [0.0]
    reports = Reports(lambda: clock[0])
    told = [reports.take("wrong") for _ in range(REPORTS + 500)]
    assert told == ["wrong"] * REPORTS + [None] * 500
    clock[0] += 1.0
    assert reports.take("wrong") == "wrong (and 500 refusals that were not told)"
    assert reports.take("wrong") == "wrong"


def test_the_banned_neither_speak_nor_are_spoken_to(founder: Someone) -> None:
    member, other = guest(founder), guest(founder)
    other.enter(member)
    while not founder.gate.offences.count(member.id):
        pass
    assert not member.speaks_to(founder)
    for one, to in [(member, founder), (founder, member)]:
        one.forget(to)
        with refused(BANNED):
            one.enter(to)
    assert other.speaks_to(founder)
    assert other.speaks_to(member)


# Certificates, one by one -------------------------------------------------------------------------------------------------


def certificate(by: Key, peer: str, *, run: str = "run", until: float = math.inf) -> Certificate:
    content = (peer, OWNER_SIGNED if by is OWNER else by.peer_id, 0, until)
    return Certificate(*content, by.sign("certificate", run, *content))


def test_a_chain_leads_to_the_owner_in_at_most_two_steps(founder: Someone) -> None:
    member, visitor, mallory, peer = Key.new(), Key.new(), Key.new(), Key.new().peer_id
    let_in, visiting = certificate(OWNER, member.peer_id), certificate(OWNER, visitor.peer_id, until=2000.0)
    genuine = founder.trust.genuine
    assert genuine(peer, (certificate(OWNER, peer),))
    assert genuine(peer, (certificate(member, peer), let_in))
    for wrong in (
        (),
        (certificate(mallory, peer),),
        (certificate(member, peer),),
        (certificate(OWNER, peer, run="other"),),
        (certificate(mallory, peer), let_in),
        (certificate(visitor, peer), visiting),
        (certificate(mallory, peer), certificate(member, mallory.peer_id)),
        (let_in,),
    ):
        assert not genuine(peer, wrong)


def test_who_answers_with_a_certificate_that_does_not_count_is_not_spoken_to(founder: Someone) -> None:
    member, other, kicked = guest(founder), guest(founder), guest(founder)
    kick(founder, member, other)
    for host in (member, other):
        founder.tells(host)
    sent: list[Any] = []

    for chain in (kicked.trust.chain, (certificate(kicked.key, kicked.id),), (certificate(OWNER, other.id),)):

        async def lying(payload: bytes, chain: Chain = chain) -> bytes:
            sent.append(payload)
            packed: bytes = msgpack.packb([True, [0, packed_chain(chain), bytes(16), b""]])
            return packed

        with refused(NOT_IN):
            asyncio.run(member.gate.enter(kicked.id, lying))
        assert not member.gate.entered(kicked.id)
        assert not kicked.speaks_to(member)
    founder.tells(kicked)
    assert kicked.trust.epoch == 0
    assert kicked.trust.secret == SECRET
    assert all(NEXT not in payload for payload in sent)
