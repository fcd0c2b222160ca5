"""What a member tells of newcomers, by which names, and how often one machine may ask."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from muletrain.errors import Malformed, NetworkError, Refused
from muletrain.events import Admitted, Event, JoinRefused
from muletrain.network.memory import MemoryHub
from muletrain.runs.join.admission import REQUESTS, REQUESTS_PER_S
from muletrain.runs.join.client import JoinClient
from muletrain.runs.join.messages import JoinRequest, Welcome
from tests.newcomers import introduction, rendezvous_of
from tests.virtual import virtually

WRONG = ["\x1b[2J", "a b", "a\nb", "\u202eb", "x" * 129]
"""Names that would steer a terminal, break a line, or fill it."""


def with_name(request: JoinRequest, name: str) -> bytes:
    packed: bytes = msgpack.packb(request.model_dump() | {"name": name})
    return packed


def test_who_was_admitted_or_refused_has_a_name() -> None:
    """An admission states the name in the run; a refusal states the requested name."""

    async def scenario() -> list[Event]:
        hub, said = MemoryHub(), list[Event]()
        rendezvous_of(hub.join("founder"), [4, 4], expected=2, emit=said.append).open()
        for peer, memory in (("a", 4), ("b", 4), ("c", 3)):
            net = hub.join(peer)
            try:
                await JoinClient(net, "founder").join(introduction("mule", memory))
            except Refused:
                assert peer == "c", "it has too little memory"
        return said

    admitted, renamed, refused = virtually(scenario())
    assert admitted == Admitted("a", "mule")
    assert renamed == Admitted("b", "mule-2")
    assert isinstance(refused, JoinRefused)
    assert (refused.remote, refused.name) == ("c", "mule")


@pytest.mark.parametrize("name", WRONG, ids=lambda name: ascii(name[:9]))
def test_no_event_has_a_name_that_was_not_checked(name: str) -> None:
    async def scenario() -> list[Event]:
        hub, said = MemoryHub(), list[Event]()
        rendezvous_of(hub.join("founder"), [4], expected=1, emit=said.append).open()
        net = hub.join("a")
        for memory in (4, 3):
            with pytest.raises(NetworkError, match="JoinRequest: 'name'"):
                await net.call("founder", JoinRequest.KIND, with_name(introduction("a", memory), name), timeout_s=1.0)
        return said

    assert virtually(scenario()) == []


@pytest.mark.parametrize("name", WRONG, ids=lambda name: ascii(name[:9]))
def test_a_newcomer_takes_no_such_name_from_a_member(name: str) -> None:
    told: dict[str, Any] = {"config": "{}", "stage": 0, "data": bytes(32), "tokenizer_size": 1}
    assert Welcome.unpack(Welcome(**told, name="mule-2").pack()).name == "mule-2"
    with pytest.raises(Malformed, match="Welcome: 'name'"):
        Welcome.unpack(msgpack.packb(told | {"name": name}))


def test_one_machine_that_asks_again_and_again_writes_few_events() -> None:
    """In an hour of a question a second, whether it is admitted or not. Another machine is admitted."""

    async def asks(memory: int) -> int:
        hub, said, refused = MemoryHub(), list[Event](), 0
        rendezvous_of(hub.join("founder"), [4, 4], expected=2, emit=said.append).open()
        client = JoinClient(hub.join("a"), "founder")
        for _ in range(3600):
            try:
                await client.join(introduction("a", memory))
            except Refused as e:
                refused += "asked to join too often; wait a minute" in e.why
            await asyncio.sleep(1.0)
        assert refused > 2000
        events = len(said)
        await JoinClient(hub.join("b"), "founder").join(introduction("b", 4))
        assert said[-1] == Admitted("b", "b")
        return events

    for memory in (4, 3):
        assert REQUESTS <= virtually(asks(memory)) <= REQUESTS + 3600 * REQUESTS_PER_S + 1
