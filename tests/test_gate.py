"""Admission without sockets: certificates, and those who try to get around them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import msgpack
import pytest

from muletrain.errors import AdmissionError
from muletrain.network import gate as gate_module
from muletrain.network.gate import (
    BURST,
    FOREIGN,
    FULL,
    NO_SECRET,
    NOT_IN,
    NOT_IN_ITSELF,
    OTHER_SECRET,
    TOO_MANY,
)
from muletrain.network.identity import Key
from muletrain.network.trust import (
    FOREIGN_OWN,
    NO_HOST,
    VISIT_S,
    Certificate,
    Chain,
    packed_chain,
)
from muletrain.network.trust import OWNER as OWNER_SIGNED
from tests.gates import NEXT, OWNER, SECRET, Someone, _clock, answered, founder, guest, kick, refused

__all__ = ["_clock", "founder"]


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


# Found in review: what a member or somebody kicked might try --------------------------------------------------------------


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
