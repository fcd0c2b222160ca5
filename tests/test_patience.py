"""Nobody waits for ever for a newcomer that gets nowhere, and it comes again by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from muletrain.clock import LoopClock
from muletrain.config.schema import RunConfig
from muletrain.errors import AdmissionError, MuletrainError, NetworkError, Refused
from muletrain.events import Event, Note, Waiting
from muletrain.model.spec import ModelSpec
from muletrain.network.base import Network
from muletrain.network.memory import MemoryHub
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.host import Host
from muletrain.runs.join import newcomer
from muletrain.runs.join.admission import PREPARE_S, Admission, LiveMembers
from muletrain.runs.join.client import JoinClient
from muletrain.runs.join.messages import AGAIN, CALL_S, AskPiece, Ready
from muletrain.runs.join.newcomer import AGAIN_TRIES
from muletrain.runs.join.patience import PATIENCE_S
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.spec import WorkerSpec
from muletrain.runtime.members.roster import Roster
from tests.newcomers import NoTrial, introduction, rendezvous_of
from tests.runners import TICKET, host_of
from tests.virtual import virtually


@pytest.mark.parametrize(("asked_again", "error"), [(AGAIN_TRIES - 1, None), (AGAIN_TRIES, Refused)])
def test_a_newcomer_that_is_told_to_come_again_does_a_few_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked_again: int, error: type[Exception] | None
) -> None:
    left, seat = [Refused(f"it begins at this very moment; {AGAIN}")] * asked_again, object()

    async def once(host: Host, network: Network) -> object:
        if left:
            raise left.pop()
        return seat

    monkeypatch.setattr(newcomer, "_join", once)
    spec = WorkerSpec(role="join", name="a", folder=str(tmp_path), ticket=TICKET)

    async def scenario() -> object:
        return await newcomer.join(host_of(spec), MemoryHub().join("a"))  # type: ignore[arg-type]

    if error is None:
        assert virtually(scenario()) is seat
    else:
        with pytest.raises(error):
            virtually(scenario())


def test_a_newcomer_looks_for_the_run_until_somebody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By command, too: its network is there, and the member that the ticket names comes half a minute later."""
    monkeypatch.setattr(newcomer, "Trial", NoTrial)
    ticket = Ticket("run", bytes(32), bytes(32), ("/memory/p2p/founder",))
    spec = WorkerSpec(role="join", name="a", folder=str(tmp_path), ticket=str(ticket), device="cpu", precision="fp32")

    async def scenario() -> str:
        hub = MemoryHub()
        host, net = host_of(spec), hub.join("a")
        joining = asyncio.create_task(newcomer.join(host, net))  # type: ignore[arg-type]
        await asyncio.sleep(PATIENCE_S / 2)
        assert not joining.done()
        rendezvous_of(hub.join("founder"), [1 << 50], expected=2).open()
        with pytest.raises(MuletrainError) as refused:
            await joining
        return str(refused.value)

    assert "needs" in virtually(scenario()), "the newcomer told its memory, which holds no stage"


def test_a_guest_that_takes_its_part_keeps_its_place(tmp_path: Path) -> None:
    """A checkpoint's part may take hours on a slow link. What counts is the time without a piece."""
    config = RunConfig()
    listed = {"step": 4, "parts": [{"file": "0", "sha256": "00" * 32}]}
    checkpoint = Checkpoint(tmp_path, listed, ModelSpec.from_config(config.model), config)
    checkpoint.parts[0].write_bytes(b"weights")

    async def scenario() -> float:
        hub = MemoryHub()
        own = rendezvous_of(hub.join("founder"), [1], expected=1, checkpoint=checkpoint)
        own.open()
        own.seat("founder", introduction("founder"))
        own.ready("founder", Ready(trainer=True, place=""))
        net = hub.join("slow")
        slow = JoinClient(net, "founder")
        await slow.join(introduction("slow"))
        gathering = asyncio.create_task(own.gather())
        for _ in range(4):
            await asyncio.sleep(0.6 * PREPARE_S)
            assert not gathering.done()
            await net.call("founder", AskPiece.KIND, AskPiece(offset=0, part=True).pack(), timeout_s=CALL_S)
        genesis = await gathering
        assert [m.name for m in genesis.members] == ["founder"]
        return LoopClock().now()

    assert 3.4 * PREPARE_S <= virtually(scenario()) <= 3.4 * PREPARE_S + 2 * CALL_S


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
        running = LiveMembers(Roster(genesis, "founder"))  # admits once the run has begun
        with pytest.raises(AdmissionError, match=AGAIN):
            running.begun("slow", Ready(trainer=False, place=""))
        return said, begun_s

    said, begun_s = virtually(scenario())
    assert [e.missing for e in said if isinstance(e, Waiting)] == [["slow preparing"]]
    (note,) = [e.message for e in said if isinstance(e, Note)]
    assert note == "slow has not got its stage ready for 15 min: the run does not wait for it any more"
    assert PREPARE_S <= begun_s <= PREPARE_S + CALL_S


def test_a_guest_that_is_ready_keeps_its_place_however_long_another_is_waited_for() -> None:
    async def scenario() -> list[str]:
        hub = MemoryHub()
        own = rendezvous_of(hub.join("founder"), [1], expected=3)
        own.open()
        own.seat("founder", introduction("founder"))
        own.ready("founder", Ready(trainer=True, place=""))
        gathering = asyncio.create_task(own.gather())
        begins = []
        for name in ("early", "late"):
            client = JoinClient(hub.join(name), "founder")
            await client.join(introduction(name))
            begins.append(asyncio.create_task(client.begin(Ready(trainer=False, place=""))))
            await asyncio.sleep(3 * PREPARE_S)
            assert gathering.done() == (name == "late")
        assert [await begun for begun in begins] == [await gathering] * 2
        return sorted(m.name for m in (await gathering).members)

    assert virtually(scenario()) == ["early", "founder", "late"]


def test_machines_that_come_together_get_different_stages_while_they_prepare() -> None:
    """They are in no roster yet: all eight of a machine with eight GPUs got the same stage."""

    async def scenario() -> None:
        hub = MemoryHub()
        own = rendezvous_of(hub.join("founder"), [1, 1], expected=2)
        JoinClient(hub.join("other"), "founder")
        for name in ("founder", "other"):
            own.seat(name, introduction(name))
            own.ready(name, Ready(trainer=True, place=""))
        live = LiveMembers(Roster(await own.gather(), "founder"))
        running = Admission(hub.join("admits"), lambda event: None, own.info, own.seating, live)
        first, second, third = (running.admit(name, introduction(name)).stage for name in "abc")
        assert {first, second} == {0, 1}
        await asyncio.sleep(PREPARE_S / 2)
        assert live.remove("c")
        assert running.admit("d", introduction("d")).stage == third, "it declined"
        await asyncio.sleep(PREPARE_S + 1)
        assert live.consider(introduction("e")) == [["cpu"], ["cpu"]], "those that do not come hold no place"

    virtually(scenario())


def test_a_machine_that_comes_again_and_again_does_not_keep_the_run_from_beginning() -> None:
    """Each time the wait for it began anew, for ever."""

    async def scenario() -> float:
        hub = MemoryHub()
        own = rendezvous_of(hub.join("founder"), [1], expected=1)
        own.open()
        own.seat("founder", introduction("founder"))
        own.ready("founder", Ready(trainer=True, place=""))
        laptop = JoinClient(hub.join("laptop"), "founder")
        await laptop.join(introduction("laptop"))
        gathering = asyncio.create_task(own.gather())
        with pytest.raises(Refused, match="begins at this very moment"):  # noqa: PT012
            for _ in range(40):
                await asyncio.sleep(60.0)
                await laptop.join(introduction("laptop"))
        assert [m.name for m in (await gathering).members] == ["founder"]
        return LoopClock().now()

    assert virtually(scenario()) <= PREPARE_S + 4 * CALL_S
