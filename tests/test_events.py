"""The event stream: strict both ways, and a log that never stands in the way of training."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import threading
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest

from muletrain import events as ev

if TYPE_CHECKING:
    from pathlib import Path

KINDS = sorted(ev.KINDS.values(), key=lambda cls: cls.kind)

STEP = ev.StepApplied(
    step=3,
    stage=1,
    lineage="ab12",
    skipped=False,
    microbatches=2,
    recomputed=1,
    forward_s=0.25,
    backward_s=0.5,
    averaging_s=0.125,
    apply_s=0.0625,
    wait_s=0.0,
    sent={"mule-2": {"activation": 1000, "control": 3}},
)


def sample(cls: type[ev.Event]) -> ev.Event:
    """An event of any kind, every field filled according to its type."""
    values: dict[Any, Any] = {int: 7, str: "x", bool: True, float: 0.5}
    filled: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if name in {f.name for f in dataclasses.fields(cls)} - {"t", "peer"}:
            text = str(kind)
            by_shape = {
                "'parts'": {"p": {"parts": 1}},
                "dict[str, dict": {"p": {"state": 1}},
                "dict[str, int]": {"k": 7},
                "dict": {"k": "v"},
                "list[int]": [7],
                "list[list": [["a"]],
                "list": ["a"],
                "Literal": "info",
                "float": 0.5,
            }
            filled[name] = values.get(kind) or next(v for shape, v in by_shape.items() if shape in text)
    return cls(**filled, t=12.5, peer="mule-1")


@pytest.mark.parametrize("cls", KINDS, ids=lambda c: c.kind)
def test_every_kind_survives_json(cls: type[ev.Event]) -> None:
    event = sample(cls)
    line = event.to_json()
    assert ev.Event.from_json(line) == event
    assert "\n" not in line
    assert json.loads(line)["kind"] == cls.kind


def test_kinds_are_named_after_their_classes() -> None:
    assert {cls.kind for cls in KINDS} >= {"run_started", "step_done", "microbatch_rerouted", "note"}
    assert len({cls.kind for cls in KINDS}) == len(KINDS) > 17


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_loss_is_valid_json(loss: float) -> None:
    event = ev.StepDone(step=1, loss=loss, grad_norm=1.0, lr=0.1, tokens=4, duration_s=1.0, lineage="")
    text = event.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = ev.StepDone.from_json(text).loss
    assert again == loss or (math.isnan(again) and math.isnan(loss))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"kind": "zap"}', "unknown event kind 'zap'"),
        ("[]", "unknown event kind None"),
        ('{"kind": "note", "level": "info"}', "note event: message: "),
        ('{"kind": "note", "level": "loud", "message": "m"}', "note event: level: "),
        ('{"kind": "note", "level": "info", "message": 3}', "note event: message: "),
        ('{"kind": "note", "level": "info", "message": "m", "zap": 1}', "note event: zap: "),
        ('{"kind": "admitted", "peer_id": "x", "t": "soon"}', "admitted event: t: "),
    ],
)
def test_what_is_no_event_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(ev.EventError) as caught:
        ev.Event.from_json(line)
    assert str(caught.value).startswith(complaint)


def test_torn_json_and_the_wrong_kind_are_refused() -> None:
    with pytest.raises(ev.EventError, match="not JSON: "):
        ev.Event.from_json('{"kind": "no')
    with pytest.raises(ev.EventError, match="expected a note event, got admitted"):
        ev.Note.from_json(ev.Admitted("x").to_json())


# --- the log ---------------------------------------------------------------------------------------------------------


def test_the_log_stamps_writes_and_notifies(tmp_path: Path) -> None:
    heard: list[ev.Event] = []
    path = tmp_path / "run" / "mule-1.jsonl"
    with ev.EventLog(path, "mule-1", now=lambda: 5.0) as log:
        log.subscribe(heard.append)
        log.emit(STEP)
        log.note("hello")
    expected = [
        dataclasses.replace(STEP, t=5.0, peer="mule-1"),
        ev.Note(level="info", message="hello", t=5.0, peer="mule-1"),
    ]
    assert list(ev.read_events(path)) == heard == expected


def test_each_line_is_on_disk_at_once_and_logs_append(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = ev.EventLog(path, "a")
    log.note("one")
    assert len(list(ev.read_events(path))) == 1
    log.close()
    log.note("nobody hears")
    with ev.EventLog(path, "a") as again:
        again.note("two")
    assert [e.message for e in ev.read_events(path) if isinstance(e, ev.Note)] == ["one", "two"]


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with ev.EventLog(path, "a") as log:
        threads = [threading.Thread(target=lambda: [log.emit(STEP) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(ev.read_events(path))) == 200


def test_on_a_full_disk_events_wait_and_people_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half of a line, then nothing, then has room again: the file holds whole lines only."""
    heard: list[ev.Event] = []
    path = tmp_path / "a.jsonl"
    log = ev.EventLog(path, "a")
    log.subscribe(heard.append)
    log.note("before")
    real_write = os.write
    monkeypatch.setattr(ev.log, "MAX_WAITING", 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real_write(fd, data[: len(data) // 2]))
        log.note("torn")
        patch.setattr(os, "write", _no_space)
        log.note("waits")
        log.note("waits, too")
    log.note("after")
    log.close()
    assert log.dropped == 2, "there was room for two"
    assert [e.message for e in ev.read_events(path) if isinstance(e, ev.Note)] == ["before", "waits, too", "after"]
    told = [e.message for e in heard if isinstance(e, ev.Note)]
    assert told[:2] + told[3:] == ["before", "torn", "waits", "waits, too", "after"]
    assert told[2].startswith(f"{path}: no space ")


def _no_space(fd: int, data: bytes) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a Linux device")
def test_a_really_full_device_does_not_raise() -> None:
    from pathlib import Path

    heard: list[ev.Event] = []
    log = ev.EventLog(Path("/dev/full"), "a")
    log.subscribe(heard.append)
    log.note("x")
    log.close()
    assert log.dropped == 1
    assert isinstance(heard[-1], ev.Note)
    assert heard[-1].message.startswith("/dev/full: No space left on device")


def test_a_failing_subscriber_is_removed_and_named() -> None:
    heard: list[ev.Event] = []

    def sink(event: ev.Event) -> None:
        raise RuntimeError("broken")

    log = ev.EventLog(None, "a")
    log.subscribe(sink)
    log.subscribe(heard.append)
    log.emit(ev.Admitted("x"))
    log.emit(ev.Admitted("y"))
    notes = [e for e in heard if isinstance(e, ev.Note)]
    assert len(notes) == 1
    assert notes[0].level == "warning"
    assert re.search(r"sink .*admitted.*RuntimeError\('broken'\)", notes[0].message)
    assert [e.peer_id for e in heard if isinstance(e, ev.Admitted)] == ["x", "y"]


# --- readers ---------------------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = ev.Note("info", "whole").to_json()
    path.write_text(f'{whole}\n{{"kind": "no')
    assert [e.kind for e in ev.read_events(path)] == ["note"]
    with ev.EventLog(path, "a") as log:
        log.note("next")
    assert [e.message for e in ev.read_events(path) if isinstance(e, ev.Note)] == ["whole", "next"]


def test_a_bad_line_in_the_middle_is_located(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{ev.Note("info", "m").to_json()}\n{{"kind": "zap"}}\n')
    with pytest.raises(ev.EventError, match=r"a\.jsonl:2: unknown event kind 'zap'"):
        list(ev.read_events(path))


def test_the_tail_follows_all_files_in_order_of_time(tmp_path: Path) -> None:
    tail = ev.EventTail(tmp_path)
    assert tail.poll() == []
    clock = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    a = ev.EventLog(tmp_path / "a.jsonl", "a", now=lambda: next(clock))
    b = ev.EventLog(tmp_path / "b.jsonl", "b", now=lambda: next(clock))
    a.note("third")
    b.note("first")
    b.note("second")
    assert [e.t for e in tail.poll()] == [1.0, 2.0, 3.0]
    assert tail.poll() == []
    c = ev.EventLog(tmp_path / "c.jsonl", "c", now=lambda: next(clock))
    a.note("fourth")
    c.note("fifth")
    assert [(e.t, e.peer) for e in tail.poll()] == [(4.0, "a"), (5.0, "c")]
    for log in (a, b, c):
        log.close()


def test_the_tail_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path, tail = tmp_path / "a.jsonl", ev.EventTail(tmp_path)
    line = ev.Note("info", "héllo\u2028x").to_json() + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode()[:20])
        assert tail.poll() == []
        file.write(line.encode()[20:] + b'{"kind":')
        assert [e.message for e in tail.poll() if isinstance(e, ev.Note)] == ["héllo\u2028x"]


def test_the_tail_tells_of_lines_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"kind": "zap"}}\n{ev.Note("info", "m", t=1.0).to_json()}\n')
    messages = [e.message for e in ev.EventTail(tmp_path).poll() if isinstance(e, ev.Note)]
    assert sorted(messages) == [
        "a.jsonl: unknown event kind 'zap'; was it written by another version of muletrain?",
        "m",
    ]


def test_events_of_some_kinds_are_found_in_all_files_of_a_folder(tmp_path: Path) -> None:
    done = [ev.StepDone(step, 1.0, 1.0, 0.1, 9, 1.0, "l") for step in (1, 2)]
    for name, event, t in (("a", done[1], 2.0), ("b", done[0], 1.0)):
        with ev.EventLog(tmp_path / f"{name}.jsonl", name, now=lambda t=t: t) as log:
            log.emit(STEP)
            log.emit(event)
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"kind": "step_done", "step"')
    found = ev.events_in(tmp_path, ev.StepDone, ev.SteppedBack)
    assert found == [dataclasses.replace(done[0], t=1.0, peer="b"), dataclasses.replace(done[1], t=2.0, peer="a")]
