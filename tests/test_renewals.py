"""Renewals: whoever is kicked is out everywhere, and nobody else can renew, or spoil a renewal."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgpack
import pytest

from muletrain.errors import AdmissionError
from muletrain.network.gate import (
    NO_SECRET,
    NOT_IN,
    OTHER_SECRET,
    OUT,
    REMOVED,
)
from muletrain.network.trust import (
    Certificate,
    Chain,
    Renewal,
    packed_chain,
    packed_renewal,
    read_renewal,
)
from tests.gates import NEXT, OWNER, SECRET, Someone, _clock, answered, founder, guest, kick, refused

__all__ = ["_clock", "founder"]


# Coming in ----------------------------------------------------------------------------------------------------------------


async def raw_answer(by: Someone, to: str, payload: bytes) -> bytes:
    return by.gate.answer(to, payload)


# Renewals -----------------------------------------------------------------------------------------------------------------


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
