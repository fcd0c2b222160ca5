"""A command's processes from the beginning to the end of its run: for whom it waits, and whom it ends. Processes and time
are played."""

from __future__ import annotations

import math
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.errors import MuletrainError
from muletrain.events import PeerJoined, RunFinished, RunStarted, Waiting
from muletrain.runs.session import HEARD_S, POLL_S, SEATED_S, STOP_S, STOPPED_S, Role, Session
from muletrain.runs.worker_files import LEFT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from muletrain.events import Event

STARTED = RunStarted(
    run_id="r", config_digest="d", versions={}, steps=9, stages=2, peers=2, microbatches=1, tokens_per_step=1
)
FOR_EVER = (math.inf, 0)
LOOKS_S = 3 * POLL_S
"""By then a session has seen what happened."""


class Played:
    """Stands for ``LocalFleet``: processes that end at a time [s] with an exit code, unless they are killed. ``news``: events
    by the time at which they arrive."""

    def __init__(self, ends: dict[str, tuple[float, int]], news: dict[float, Event]) -> None:
        self.now_s = 0.0
        self.ends, self.news = ends, news
        self.told: list[tuple[float, str, str]] = []
        self.stopped_s = self.killed_s = math.inf
        self.signals: dict[float, int] = {}
        self.session: Any = None
        self.show: Callable[[Event], None] = lambda event: None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 1000, "nobody ends it"
        for at_s in [s for s in self.news if s <= self.now_s]:
            self.show(self.news.pop(at_s))
        for at_s in [s for s in self.signals if s <= self.now_s]:
            self.session.asked.hear(self.signals.pop(at_s))

    def alive(self) -> list[str]:
        return [name for name, (end_s, _) in self.ends.items() if self.now_s < end_s]

    def exit_codes(self) -> dict[str, int]:
        return {name: code for name, (end_s, code) in self.ends.items() if end_s <= self.now_s}

    def tell(self, name: str, line: str) -> None:
        self.told.append((self.now_s, name, line))

    def stop(self) -> None:
        self.stopped_s = min(self.stopped_s, self.now_s)

    def kill(self) -> None:
        if alive := self.alive():
            self.killed_s = min(self.killed_s, self.now_s)
            self.ends.update({name: (self.now_s, -9) for name in alive})


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    def play(
        ends: dict[str, tuple[float, int]],
        news: dict[float, Event] | None = None,
        *,
        clients: Any = (),
        first: str = "",
        stages: int = 0,
        role: Role = "run",
        signals: Any = (),
    ) -> Played:
        fleet: Any = Played(ends, news or {})
        monkeypatch.setattr(time, "monotonic", lambda: fleet.now_s)
        monkeypatch.setattr(time, "sleep", fleet.sleep)
        names = [*([first] if first else ()), *clients]
        workers: Any = [SimpleNamespace(name=name, client=name in clients) for name in names]
        session = Session(role, tmp_path, fleet, workers, stages=stages)
        fleet.show, fleet.session, fleet.signals = session.show, session, dict(signals)
        try:
            session.watch()
        except MuletrainError:
            fleet.told.append((fleet.now_s, "", "failed"))
        finally:
            session.close()
        assert isinstance(fleet, Played)
        return fleet

    return play


def waiting(*missing: str) -> Waiting:
    return Waiting(list(missing))


def joined(name: str, stage: int) -> PeerJoined:
    return PeerJoined(
        peer_id=f"id-of-{name}",
        name=name,
        stage=stage,
        device="cpu",
        precision="fp32",
        trainer=True,
        params=1,
        threads=1,
        peer=name,
    )


# --- until the run begins ----------------------------------------------------------------------------------------------


def test_a_run_begins_without_a_process_that_failed_if_the_others_serve_every_stage(
    played: Callable[..., Played],
) -> None:
    """The founder waits for it no more. Once the run has begun, the protocol does without who dies."""
    news = {20.0: waiting("1 of 2 peers ready"), 60.0: STARTED}
    fleet = played({"a": (90.0, 0), "b": (90.0, 0), "c": (1.0, 1), "d": (70.0, 1)}, news, first="a", stages=2)
    assert {(name, line) for s, name, line in fleet.told if s < 60} == {("a", "expect 3")}
    assert fleet.killed_s == math.inf
    assert fleet.now_s >= 90
    begun = played({"a": (9.0, 0), "b": (5.0, 1)}, {3.0: STARTED}, first="a", stages=2)
    assert (begun.told, begun.killed_s) == ([], math.inf)


@pytest.mark.parametrize("ends", [{"a": (1.0, 1), "b": FOR_EVER, "c": FOR_EVER}, {"a": FOR_EVER, "b": (1.0, 1)}])
def test_a_run_ends_at_once_if_its_founder_failed_or_too_few_are_left_for_its_stages(
    played: Callable[..., Played], ends: dict[str, tuple[float, int]]
) -> None:
    fleet = played(ends, first="a", stages=2)
    assert 1.0 <= fleet.killed_s <= 1.0 + LOOKS_S
    assert [line for _, _, line in fleet.told] == ["failed"]


def test_clients_are_no_peers_that_a_stage_could_begin_with(played: Callable[..., Played]) -> None:
    ends = {"a": FOR_EVER, "b": (1.0, 1), "c": FOR_EVER}
    assert played(ends, clients=["c"], first="a", stages=2).killed_s <= 1.0 + LOOKS_S
    gone = {"a": (9.0, 0), "b": (9.0, 0), "c": (1.0, 1)}
    assert played(gone, clients=["c"], first="a", stages=2).told == [], "nor does a run wait for one that failed"


def test_those_left_may_move_to_the_stage_without_a_peer_and_if_they_do_not_the_run_ends(
    played: Callable[..., Played],
) -> None:
    """Twenty seconds after the last that failed. A guest that prepares its stage may take longer: if it never gets ready,
    the founder lets it go (``test_patience``), and then the stage has no peer for good."""
    lacks, prepares = "stage 1 has no peer (needs 1 GiB)", "b preparing"
    fleet = played({"a": FOR_EVER, "b": FOR_EVER, "c": (1.0, 1)}, {2.0: waiting(lacks)}, first="a", stages=2)
    assert 1.0 + SEATED_S <= fleet.killed_s <= 1.0 + SEATED_S + LOOKS_S
    ends = {"a": FOR_EVER, "b": FOR_EVER, "c": (1.0, 1), "d": (15.0, 1)}
    fleet = played(ends, {2.0: waiting(lacks)}, first="a", stages=2)
    assert 15.0 + SEATED_S <= fleet.killed_s <= 15.0 + SEATED_S + LOOKS_S
    news = {2.0: waiting(lacks, prepares), 900.0: waiting(lacks)}
    fleet = played({"a": FOR_EVER, "b": FOR_EVER, "c": (1.0, 1)}, news, first="a", stages=2)
    assert 900.0 <= fleet.killed_s <= 900.0 + LOOKS_S
    news = {2.0: waiting(lacks), 10.0: waiting("1 of 2 peers ready"), 300.0: STARTED}
    fleet = played({"a": (400.0, 0), "b": (400.0, 0), "c": (1.0, 1)}, news, first="a", stages=2)
    assert fleet.killed_s == math.inf, "one has moved there"


# --- asked to end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("role", ["run", "start", "join"])
def test_a_peer_that_never_ends_is_ended_within_the_stated_time(
    played: Callable[..., Played], role: Role, number: signal.Signals
) -> None:
    """A machine that joined waits for its step after Ctrl-C, which its owner can repeat."""
    ends = {"a": (500.0, 0) if (role, number) == ("join", signal.SIGINT) else FOR_EVER}
    signals = {9.0: number, 9.02: number}
    fleet: Any = played(ends, {1.0: STARTED}, first="a", stages=1, role=role, signals=signals)
    assert 9.0 <= fleet.stopped_s <= 9.0 + LOOKS_S
    assert fleet.session.exit_code() == 128 + number
    if ends["a"] == (500.0, 0):
        assert fleet.killed_s == math.inf
    else:
        assert 9.0 + STOP_S <= fleet.killed_s <= 9.0 + STOP_S + LOOKS_S


# --- after its end -----------------------------------------------------------------------------------------------------


def test_clients_are_told_once_no_server_is_left_and_then_ended(played: Callable[..., Played]) -> None:
    fleet = played({"a": (30.0, 0), "b": (10.0, 0), "c": FOR_EVER}, clients=["c"])
    assert 30.0 + HEARD_S <= fleet.stopped_s <= 30.0 + HEARD_S + LOOKS_S
    assert 30.0 + STOPPED_S <= fleet.killed_s <= 30.0 + STOPPED_S + LOOKS_S
    assert fleet.told == [], "the run has not failed"
    assert played({"a": (30.0, 0), "c": (30.0 + HEARD_S / 2, 0)}, clients=["c"]).stopped_s == math.inf


@pytest.mark.parametrize("reason", [None, LEFT, "all steps done"])
def test_a_frozen_peer_is_not_ended_because_all_others_have(played: Callable[..., Played], reason: str | None) -> None:
    """It may wake up and go on alone, or take the result."""
    news: dict[float, Event] = {1.0: joined("a", 0), 1.5: joined("b", 1)}
    if reason is not None:
        news[5.0] = RunFinished(steps=9, seconds=1.0, reason=reason, peer="b")
    fleet = played({"a": (300.0, 0), "b": (6.0, 0)}, news)
    assert (fleet.stopped_s, fleet.killed_s) == (math.inf, math.inf)


@pytest.mark.parametrize("ended", [True, False])
def test_a_newcomer_to_a_run_that_has_ended_is_ended_and_one_whose_run_goes_on_elsewhere_is_not(
    played: Callable[..., Played], ended: bool
) -> None:
    """Of this machine's two processes one came too late, or the other one has only left."""
    end = RunFinished(steps=9, seconds=1.0, reason="all steps done" if ended else LEFT, peer="a")
    fleet = played({"a": (6.0, 0), "late": (300.0, 0)}, {1.0: joined("a", 0), 5.0: end})
    assert (fleet.killed_s <= 6.0 + STOPPED_S + LOOKS_S) == ended
    assert (fleet.stopped_s <= 6.0 + HEARD_S + LOOKS_S) == ended


def test_the_time_until_clients_are_ended_counts_anew_if_a_peer_came_meanwhile(played: Callable[..., Played]) -> None:
    end = RunFinished(steps=9, seconds=1.0, reason="all steps done", peer="a")
    news = {1.0: joined("a", 0), 5.0: end, 7.0: joined("late", 0)}
    fleet = played({"a": (6.0, 0), "late": (40.0, 0), "c": FOR_EVER}, news, clients=["c"])
    assert fleet.stopped_s >= 40 + HEARD_S
    assert 40 + STOPPED_S <= fleet.killed_s <= 40 + STOPPED_S + LOOKS_S
