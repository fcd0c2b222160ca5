"""One participant's trouble is not everybody's end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from muletrain.cli.show.console import make_console
from muletrain.cli.show.final_report import final_report
from muletrain.errors import AdmissionError, DeadlineExceeded, PeerUnreachable, ProtocolError, Refused
from muletrain.events import EventLog, Note, events_in
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.network.memory import MemoryHub
from muletrain.policy.chaos import Fault
from muletrain.runs import worker
from muletrain.runs.join.client import JoinClient, find_admitter
from muletrain.runs.join.messages import Ready
from muletrain.runs.join.patience import FIRST_S, PATIENCE_S, patiently
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.view import RunView
from tests.newcomers import introduction, rendezvous_of
from tests.runners import TICKET
from tests.test_chaos_targets import World
from tests.virtual import virtually

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.network.base import Network


def test_a_newcomer_tries_again_while_nobody_answers() -> None:
    """The member at the ticket's address is frozen, or the founder has not come yet."""

    async def scenario() -> None:
        hub, told = MemoryHub(), list[str]()
        newcomer, addresses = hub.join("newcomer"), ("/memory/p2p/founder",)
        entering = asyncio.create_task(patiently(lambda: find_admitter(newcomer, addresses), told.append))
        await asyncio.sleep(PATIENCE_S / 2)
        own = rendezvous_of(hub.join("founder"), [1], expected=2)
        own.open()
        admitter = await asyncio.wait_for(entering, 10.0)
        assert (await JoinClient(newcomer, admitter).join(introduction("newcomer"))).stage == 0
        (said,) = told
        assert "no member of the ticket answers" in said
        assert f"trying again for {PATIENCE_S:.0f} s" in said

    virtually(scenario(), 1000.0)


def test_its_patience_ends_and_a_refusal_is_final() -> None:
    async def scenario() -> None:
        hub, clock = MemoryHub(), asyncio.get_running_loop()
        newcomer, begin = hub.join("newcomer"), clock.time()
        with pytest.raises(PeerUnreachable):
            await patiently(lambda: find_admitter(newcomer, ("/memory/p2p/founder",)))
        assert PATIENCE_S <= clock.time() - begin < PATIENCE_S + 10.0
        hub.join("founder")  # it answers, and admits nobody
        begin = clock.time()
        with pytest.raises(AdmissionError):
            await patiently(lambda: find_admitter(newcomer, ("/memory/p2p/founder",)))
        with pytest.raises(Refused):
            await JoinClient(newcomer, "founder").join(introduction("newcomer"))
        assert clock.time() - begin < FIRST_S, "neither was tried again"

    virtually(scenario(), 1000.0)


def test_a_peer_that_gets_into_no_network_at_once_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members at the ticket's addresses are cut off for a moment, before the first question can be asked."""
    tried: list[str] = []

    async def create(*, run_id: str, **_: object) -> Network:
        tried.append(run_id)
        if len(tried) < 3:
            raise PeerUnreachable("no member of the ticket can be dialled")
        return MemoryHub().join("a")

    monkeypatch.setattr(Libp2pNetwork, "create", create)
    monkeypatch.setattr(worker, "serve_members", lambda *_: None)
    spec = WorkerSpec(role="join", name="a", folder=str(tmp_path), ticket=TICKET)

    async def scenario() -> Network:
        with EventLog(tmp_path / "a.jsonl", "a") as log:
            return await worker.Worker(spec, log)._connected(tmp_path)

    assert virtually(scenario()).peer_id == "a"
    assert tried == ["run"] * 3
    (said,) = events_in(tmp_path, Note)
    assert "no member of the ticket can be dialled; trying again" in said.message


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (PeerUnreachable("cut off"), 3),
        (DeadlineExceeded("frozen"), 3),
        (Refused("full"), 1),
        (ProtocolError("another version"), 1),
        (AdmissionError("another run"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_only_silence_is_repeated(error: Exception, tries: int) -> None:
    tried = 0

    async def attempt() -> int:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise error
        return tried

    async def scenario() -> None:
        clock = asyncio.get_running_loop()
        begin = clock.time()
        if tries == 1:
            with pytest.raises(type(error)):
                await patiently(attempt)
            assert clock.time() == begin
        else:
            assert await patiently(attempt) == tries
            assert clock.time() - begin >= 2 * FIRST_S
        assert tried == tries

    virtually(scenario())


def test_the_run_begins_without_who_cannot_come() -> None:
    async def scenario() -> None:
        own = rendezvous_of(MemoryHub().join("a"), [1], expected=3)
        for name in "ab":
            own.seat(name, introduction(name))
        own.ready("a", Ready(trainer=True, place=""))
        gathering = asyncio.create_task(own.gather())
        await asyncio.sleep(30.0)
        assert not gathering.done()
        own.expect(1)
        genesis = await asyncio.wait_for(gathering, 30.0)
        assert [m.id for m in genesis.members] == ["a"], "'b' was swept: it answers nothing"
        own.expect(9)
        assert own.expected == 1

    virtually(scenario(), 1000.0)


def test_a_frozen_peer_is_ended_after_the_run_not_after_the_others_trouble(tmp_path: Path) -> None:
    """A newcomer that failed left the founder, which was frozen for six seconds, as the only process: it was killed."""
    world = World(tmp_path, Fault("freeze", step=1, target="peer-0", for_s=6.0))
    world.begins()
    assert world.step(1) == [("SIGSTOP", "peer-0")]
    world.fleet.running = ["peer-0"]
    world.ends("peer-3", reason="left in order")
    assert world.tick(1.0) == [], "the others failed, and it goes on"
    assert world.tick(6.0) == [("SIGCONT", "peer-0")]


def test_who_gave_up_is_a_line_in_the_report() -> None:
    view = RunView()
    view.fold(Note("error", "no member of the ticket answers", peer="peer-4"))
    view.ended("peer-2", "was killed by signal 9")
    console = make_console()
    with console.capture() as shown:
        console.print(final_report(view, None, [], {}))
    assert "peer-4  no member of the ticket answers" in shown.get()
    assert "peer-2  was killed by signal 9" in shown.get()
