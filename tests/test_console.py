"""What people see of a run: the fold, plain lines, JSON lines, the final report, TensorBoard files."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from muletrain import cli as cli_package
from muletrain import events as ev
from muletrain.cli.show.console import (
    JsonConsole,
    LiveConsole,
    Quality,
    RunView,
    final_report,
    make_console,
    plain_line,
    status,
)
from muletrain.runs.tensorboard import TensorBoardSink

if TYPE_CHECKING:
    from collections.abc import Iterable

ID = "12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"
OTHER_ID = ID[:-1] + "u"


def started(**kw: Any) -> ev.RunStarted:
    defaults = {"run_id": "r1", "config_digest": "d", "versions": {}, "steps": 10, "stages": 2, "peers": 2}
    return ev.RunStarted(**{**defaults, "microbatches": 4, "tokens_per_step": 2000, **kw})


def prepared(**kw: Any) -> ev.RunPrepared:
    texts = dict.fromkeys(("data", "unit", "model", "start", "optimizer", "schedule", "precision", "strategy"), "")
    counts = "train heldout steps first_step taken epochs params trained_params batch microbatch context lr warmup"
    numbers = dict.fromkeys((*counts.split(), "final_lr", "stages", "peers"), 0)
    return ev.RunPrepared(**{**texts, **numbers, "documents": {}, "changes": [], "devices": [], **kw})


def joined(name: str, stage: int, peer_id: str = ID) -> ev.PeerJoined:
    return ev.PeerJoined(peer_id, name, stage, "cpu", "fp32", stage == 0, 1_500_000, 1, peer=name)


def applied(peer: str, stage: int, step: int = 1, **kw: Any) -> ev.StepApplied:
    values = {"microbatches": 2, "recomputed": 1, "forward_s": 1.0, "backward_s": 2.0, "averaging_s": 0.5}
    rest = {"apply_s": 0.5, "wait_s": 1.0, "sent": {}, "skipped": False, "lineage": "l"}
    return ev.StepApplied(step=step, stage=stage, peer=peer, **{**values, **rest, **kw})


def done(step: int, loss: float = 5.0, seconds: float = 2.0, lineage: str = "l") -> ev.StepDone:
    return ev.StepDone(step, loss, 1.0, 0.003, 2000, seconds, lineage, t=100.0 + step)


def fold(events: Iterable[ev.Event]) -> RunView:
    view = RunView()
    for event in events:
        view.fold(event)
    return view


def shown(renderable: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


# --- the fold --------------------------------------------------------------------------------------------------------


def test_progress_speed_and_time_left() -> None:
    view = fold([started(), done(1), done(2, seconds=1.0)])
    assert (view.step, view.pace.tokens, view.pace.seconds) == (2, 4000, 3.0)
    assert view.pace.tokens_per_s() == pytest.approx(4000 / 3)


def test_the_time_left_is_told_once_steady_steps_tell_it() -> None:
    """The first step takes five times as long as the others; the seventh waits for a lost peer."""
    view, steps = fold([started(steps=300)]), 300
    for step in range(1, 41):
        view.fold(done(step, seconds=2.8 if step == 1 else 30.0 if step == 7 else 0.55))
        left, true = view.pace.seconds_left(steps), (steps - step) * 0.55
        assert math.isnan(left) if step < 4 else left == pytest.approx(true, rel=0.7 if 7 <= step < 12 else 0.25)
        assert ("left" in plain_line(view)) == (step >= 4)


def test_the_speed_of_a_run_that_stands_still_goes_to_zero() -> None:
    """While the next step is not overdue, and without a clock, it is that of the last steps."""
    view = fold([started(), done(1), done(2, seconds=1.0)])
    end = view.pace.end_s
    assert view.pace.tokens_per_s(end + 4.0) == view.pace.tokens_per_s() == pytest.approx(4000 / 3)
    assert view.pace.tokens_per_s(end + 44.0) == pytest.approx(4000 / 43)
    for step in (3, 4, 5):
        view.fold(done(step, seconds=1.0))
    end = view.pace.end_s
    assert "left" in plain_line(view, end + 1.0)
    assert "left" not in plain_line(view, end + 1000.0), "nobody knows"
    assert "  10 tokens/s" in plain_line(view, end + 1000.0)
    assert math.isnan(fold([started()]).pace.tokens_per_s(5.0))


def test_the_speed_counts_neither_a_wait_for_a_lost_peer_nor_the_end_of_a_step() -> None:
    """The founder was lost for a quarter of an hour; a newcomer saw a tenth of its first step."""
    view = fold([started(), *(done(step, seconds=900.0 if step == 5 else 1.0) for step in range(1, 10))])
    assert view.pace.tokens_per_s() == pytest.approx(9 * 2000 / (8 + 3))
    newcomer = fold([started(steps=200), done(118, seconds=0.1)])
    assert "step 118/200  loss 5.000  ? tokens/s" in plain_line(newcomer)
    newcomer.fold(done(119, seconds=1.0))
    assert "2,000 tokens/s over 1 step" in plain_line(newcomer)


def test_the_loss_is_smoothed_without_a_bias_at_the_start() -> None:
    assert fold([done(1, loss=6.0)]).pace.loss == pytest.approx(6.0)
    assert 4.0 < fold([done(1, loss=6.0), done(2, loss=4.0)]).pace.loss < 5.0
    assert fold([done(1, loss=6.0), done(2, loss=math.nan)]).pace.loss == pytest.approx(6.0)
    assert math.isnan(fold([]).pace.loss)


def test_a_step_counts_once_and_another_history_of_it_is_news() -> None:
    view = RunView()
    assert [view.fold(e) for e in (done(1), done(1), done(1, lineage="other"))] == [True, False, True]
    assert view.pace.tokens == 2000


def back(step: int, to: int) -> ev.SteppedBack:
    return ev.SteppedBack(step=step, to=to, lost=[1], moves=[], lineage="new")


def test_steps_that_were_taken_back_count_once_and_the_time_without_a_stage_counts() -> None:
    """Steps 1 to 3, then 40 s without stage 1, then 2 again: two steps in the 6 + 40 + 2 s since the start."""
    again = dataclasses.replace(done(2, lineage="new"), t=100.0 + 3 + 40 + 2)
    view = fold([started(), *(dataclasses.replace(done(s), t=97.0 + 2 * s) for s in (1, 2, 3)), back(3, 1), again])
    assert (view.step, view.pace.tokens) == (2, 4000)
    assert view.pace.seconds == pytest.approx(6 + 40 + 2)
    lines = shown(final_report(view, None, [], {})).splitlines()
    assert lines[2:4] == [
        "speed    2 of 10 steps, 4,000 tokens in 48.0 s: 83 tokens/s",
        "trouble  went back to a checkpoint (1 time)",
    ]
    assert view.pace.tokens_per_s() == pytest.approx(1000), "what is left is done at the speed of the steps"


def test_after_a_step_back_the_run_is_shown_as_if_the_lost_steps_had_not_been() -> None:
    view = fold([started(), *(done(s, loss=9.0 - s) for s in (1, 2, 3, 4)), back(4, 2)])
    assert plain_line(view).startswith(plain_line(fold([started(), done(1, loss=8.0), done(2, loss=7.0)]))[:24])
    assert not view.fold(back(4, 2)), "another peer reports it, too"
    view.fold(done(3, loss=6.5))
    assert not view.fold(dataclasses.replace(back(4, 2), t=999.0))
    straight = fold([started(), done(1, loss=8.0), done(2, loss=7.0), done(3, loss=6.5)])
    assert (view.step, view.pace.loss, view.pace.tokens) == (3, straight.pace.loss, straight.pace.tokens)


def test_a_resumed_run_counts_as_one_without_the_break() -> None:
    """The first processes did 4 steps and were killed; those after the break go on from the checkpoint of step 3."""
    earlier = [started(), *(done(s, loss=9.0 - s) for s in (1, 2, 3, 4))]
    view = RunView(earlier=earlier)
    view.fold(started(first_step=3))
    assert plain_line(view).startswith("step 3/10  loss 6.930")
    assert view.fold(dataclasses.replace(done(4, loss=5.5), t=9000.0)), "the lost one had the same lineage"
    straight = fold([started(), *(done(s, loss=9.0 - s) for s in (1, 2, 3)), done(4, loss=5.5)])
    assert (view.step, view.pace.loss, view.pace.tokens) == (4, straight.pace.loss, straight.pace.tokens)
    assert view.pace.seconds == pytest.approx(5.0 + 2.0), "steps 1 to 4 took from 99 to 104; the break does not count"
    assert view.pace.tokens_per_s() == pytest.approx(1000)
    view.fold(joined("a", 0))
    text = shown(final_report(view, None, [], {}))
    assert "Peers since step 3 (cpu fp32)" in text
    assert "trouble  since step 3: none" in text
    over = RunView(earlier=earlier)
    over.fold(started())
    assert (over.step, over.pace.tokens, over.pace.seconds) == (0, 0, 0.0), "without a checkpoint it starts over"


def test_a_step_back_is_told_from_where_the_run_was() -> None:
    """The first to tell may be a newcomer, which had done none."""
    view = fold([started(steps=1000), done(400)])
    assert view.fold(back(0, 300))
    assert "steps back from step 400 to the checkpoint of step 300" in view.headline(back(0, 300))
    assert "the run steps back to the checkpoint of step 300" in fold([]).headline(back(0, 300))
    assert "steps back from step 40 to the beginning" in fold([]).headline(back(40, 0))


def test_peers_add_up() -> None:
    sent = {"b": {"activation": 100, "control": 1}}
    view = fold([joined("a", 0), applied("a", 0, sent=sent), applied("a", 0, step=2, sent=sent)])
    peer = view.peers["a"]
    assert (peer.microbatches, peer.recomputed, peer.total_s) == (4, 2, 10.0)
    assert peer.busy == pytest.approx(0.8)
    assert peer.microbatches_per_s == pytest.approx(0.4)
    assert (peer.sent_bytes(), peer.sent_bytes("activation")) == (202, 200)
    assert (peer.state, peer.step, peer.device, peer.trainer) == ("training", 2, "cpu", True)


def test_a_suspected_peer_is_so_until_it_applies_a_step() -> None:
    view = fold([joined("a", 0), ev.PeerDown(ID, "late")])
    assert view.peers["a"].state == "suspected"
    view.fold(applied("a", 0))
    assert view.peers["a"].state == "training"
    view.fold(ev.RunFinished(1, 2.0, "done", peer="a"))
    assert view.peers["a"].state == "finished"


def test_stages_without_a_peer_are_listed() -> None:
    view = fold([started(stages=3), joined("b", 1), joined("a", 1, OTHER_ID)])
    assert {stage: [p.name for p in peers] for stage, peers in view.stages().items()} == {0: [], 1: ["a", "b"], 2: []}


def test_another_peer_under_the_name_of_one_that_is_gone_has_a_row_of_its_own() -> None:
    events = [joined("a", 0), joined("b", 1, OTHER_ID), applied("b", 1), ev.MemberRemoved(OTHER_ID, "b", peer="a")]
    view = fold([started(), *events])
    assert plain_line(view).endswith("stage 1: no peer; 1 gone"), "the owner removed it"
    new_id = ID[:-1] + "v"
    for event in (joined("b", 0, new_id), applied("b", 0, microbatches=5), applied("b", 0, microbatches=6)):
        view.fold(event)
    assert plain_line(view).endswith("stage 0: a (ready), b; stage 1: no peer; 1 gone")
    rows = [line.split() for line in shown(final_report(view, None, [], {})).splitlines()]
    assert ["0", "b", "11"] in [row[:3] for row in rows]
    assert ["1", "b", f"({OTHER_ID[-8:]})", "2"] in [row[:4] for row in rows]
    assert (view.peers[OTHER_ID].state, view.gone()) == ("removed", 1)
    assert (view.name_of(OTHER_ID), view.name_of(new_id)) == (f"b ({OTHER_ID[-8:]})", "b")


def test_a_machine_that_comes_back_is_gone_no_more() -> None:
    """Its new process has another id, or it joins again after a pause with the same one."""
    view = fold([started(), joined("a", 0), joined("b", 1, OTHER_ID), applied("b", 1), done(1), late(), done(40)])
    assert "b is gone: stage 1 has no peer" in shown(status(view))
    view.fold(joined("b", 1, ID[:-1] + "v"))
    for line in (shown(status(view)), plain_line(view)):
        assert "gone" not in line
    assert "trouble  1 peer lost" in shown(final_report(view, None, [], {}))
    view.fold(late(ID[:-1] + "v"))
    assert "b does not answer" in shown(status(view))
    view.fold(joined("b", 1, ID[:-1] + "v"))
    assert "does not answer" not in shown(status(view))


LONG = "workstation-of-the-third-laboratory-4f2a"


@pytest.mark.parametrize(
    ("width", "name", "heads"), [(150, LONG, 10), (100, LONG, 6), (80, LONG, 5), (60, LONG[:20], 5)]
)
def test_long_names_cost_columns_before_they_are_cut(width: int, name: str, heads: int) -> None:
    view = fold(
        [started(stages=1), joined(LONG, 0), applied(LONG, 0, sent={OTHER_ID: {"activation": 3_000_000}}), done(1)]
    )
    head, row = shown(status(view), width).splitlines()[4:6]
    assert len(head.split()) == heads
    assert name in row
    assert "training" in row
    assert row.endswith("3 MB" if width == 150 else "200")


def test_a_peer_that_the_run_calls_otherwise_than_its_log_has_one_row() -> None:
    """A newcomer whose name is taken gets another one."""
    view = fold([started(), dataclasses.replace(joined("b-0", 1), peer="b"), applied("b", 1)])
    assert plain_line(view).endswith("stage 0: no peer; stage 1: b-0")
    view.fold(ev.PeerLeft(ID, "b-0", 1, peer="b"))
    assert plain_line(view).endswith("stage 1: no peer; 1 gone")


def late(peer_id: str = OTHER_ID, **kw: Any) -> ev.PeerDown:
    return ev.PeerDown(peer_id, "late", t=100.0, **kw)


def test_those_that_have_gone_are_counted_and_not_named_any_more() -> None:
    view = fold([started(), joined("a", 0), joined("b", 1, OTHER_ID), late(), done(30)])
    assert plain_line(view).endswith("stage 0: a (ready); stage 1: b (suspected)")
    assert view.asides == []
    view.fold(done(31))
    assert plain_line(view).endswith("stage 0: a (ready); stage 1: no peer; 1 gone")
    assert "b is gone: stage 1 has no peer" in shown(status(view))
    view.fold(applied("b", 1))
    assert plain_line(view).endswith("stage 1: b")
    assert view.asides == ["b is gone: no answer for 30 s; stage 1 has no peer", "b is back"]
    view.ended("b", "was killed")
    view.fold(applied("b", 1))
    view.fold(late())
    assert plain_line(view).endswith("stage 1: no peer; 1 gone"), "its process is no more, whatever comes of it late"


def test_who_goes_on_without_a_peer_that_is_gone_is_said_once() -> None:
    peers = [joined("a", 0), joined("b", 1, OTHER_ID), joined("c", 1, ID[:-1] + "v")]
    said = plain([started(), *peers, late(), done(31), late(), done(32)], [9.0] * 9)
    assert [line for line in said if "b is gone" in line] == ["b is gone: no answer for 30 s; stage 1 goes on with c"]


def test_a_refusal_is_told_unless_the_peer_is_admitted_right_after() -> None:
    refused = [ev.JoinRefused(who, "call before admission", t=100.0) for who in (ID, OTHER_ID)]
    refused.append(ev.JoinRefused(OTHER_ID, "call before admission", t=110.0))
    early = [*refused[:2], ev.FrameRefused(ID, "call before admission", t=100.0), ev.Admitted(ID, t=100.5)]
    said = plain([*early, done(1), done(9), refused[2], done(20)], [9.0] * 9)
    told = [line for line in said if "was not admitted" in line]
    assert told == [f"..{OTHER_ID[-8:]} was not admitted: call before admission"]


def test_who_was_refused_is_named_and_who_was_admitted_is_known_by_name() -> None:
    refused = ev.JoinRefused(OTHER_ID, "stage 0 needs 4 GiB", "mule-3")
    said = plain([refused, ev.Admitted(ID, "mule-2"), ev.FrameRefused(ID, "of another step")], [])
    assert said == [
        f"mule-3 (..{OTHER_ID[-8:]}) was not admitted: stage 0 needs 4 GiB",
        "refused a message from mule-2: of another step",
    ]


def test_that_a_gradient_stands_out_is_no_warning() -> None:
    """Honest data do that. Only another result of a second peer is news."""
    stands_out, differs = ev.GradientStandsOut(step=3, name="b", who="a"), ev.ResultsDiffer(step=3, name="b")
    assert (stands_out.is_warning(), differs.is_warning()) == (False, True)
    assert not fold([stands_out]).warnings
    assert plain([stands_out], []) == []
    assert fold([differs]).warnings.total() == 1
    (line,) = plain([differs], [])
    assert "microbatches of b, whose hardware may be faulty" in line


def test_messages_name_peers_of_which_they_have_the_end_of_an_id() -> None:
    view = fold([started(members={ID: "a"}), late(name="b"), ev.MemberAdmitted(ID[:-1] + "v", "c", 1)])
    heard = f"{ID[-6:]}: sync to {OTHER_ID[-6:]}: step {ID[:-1]}v, /p2p/{ID}"
    assert view.named(heard) == f"a: sync to b: step c, /p2p/{ID}"


def test_a_client_that_is_lost_has_its_name_in_the_reason() -> None:
    """Nothing else told this view its name."""
    lost = ev.ClientLost(peer_id=ID, name="m2", reason=f"sync to {ID[-6:]}: no route to it is known", parts=1)
    assert plain([lost], []) == ["client m2 is gone (sync to m2: no route to it is known); 1 part computed again"]


def test_ids_become_names_and_addresses_stay() -> None:
    view = fold([joined("a", 0)])
    assert [view.name_of(x) for x in (ID, OTHER_ID, "/ip4/1.2.3.4/tcp/5", "a")] == [
        "a",
        f"..{OTHER_ID[-8:]}",
        "/ip4/1.2.3.4/tcp/5",
        "a",
    ]


# --- consoles --------------------------------------------------------------------------------------------------------


def plain(events: Iterable[ev.Event], ticks: Iterable[float]) -> list[str]:
    out, clock = io.StringIO(), iter(ticks)
    console = Console(file=out, width=40)  # sentences and lines are not broken to the width
    with LiveConsole(RunView(), console, interval_s=5.0, now=lambda: next(clock)) as live:
        for event in events:
            live(event)
    return out.getvalue().splitlines()


def test_plain_lines() -> None:
    events = [started(params=5_870_000), ev.Waiting(["a peer for stage 1"]), joined("a", 0), joined("b", 1, OTHER_ID)]
    steps = [applied("a", 0), applied("b", 1), done(1), done(2), done(3), done(4)]
    lines = plain([*events, *steps], [0, 0, 4, 5, 5, 6, 7])  # printed at 0 and 5 s, and the last one at the end
    assert lines == [
        "run r1: 10 steps, 5.87M parameters in 2 stages, 2 peers",
        "waiting: a peer for stage 1",
        "a serves stage 0 (cpu, fp32, 1.5M parameters); as a trainer, it also builds microbatches from the data",
        "b serves stage 1 (cpu, fp32, 1.5M parameters)",
        "step 1/10  loss 5.000  1,000 tokens/s over 1 step  stage 0: a; stage 1: b",
        "step 3/10  loss 5.000  1,000 tokens/s over 3 steps  stage 0: a; stage 1: b",
        "step 4/10  loss 5.000  1,000 tokens/s over 4 steps  12.0 s left  stage 0: a; stage 1: b",
    ]


def test_the_same_warning_is_printed_once_and_brackets_are_kept() -> None:
    refused = ev.FrameRefused("/ip4/9.9.9.9/tcp/1", "not a frame [bold]")
    lines = plain([refused, refused, ev.JoinRefused("/ip4/9.9.9.9/tcp/1", "wrong ticket")], [])
    assert len(lines) == 2
    assert lines[0].endswith("/ip4/9.9.9.9/tcp/1: not a frame [bold]")
    assert lines[1].endswith(": wrong ticket")


@pytest.mark.parametrize(
    ("event", "facts"),
    [
        (ev.CheckpointWritten(5, "runs/x", 2_000_000, 0.25), ("step 5: runs/x (2 MB, 250 ms)",)),
        (ev.CheckpointFailed(5, "no space"), ("step 5", ": no space")),
        (ev.Evaluated(5, 3.64, 38.09, 100), ("step 5: ", "loss 3.640, perplexity 38.1")),
        (ev.PeerDown(ID, "no answer"), (f"..{ID[-8:]} does not answer and gets no work: no answer",)),
        (ev.PeerDown(ID, "it trains in another lineage", "b"), ("b gets no work: it trains in",)),
        (ev.Note("info", "hello"), ("hello",)),
        (ev.MicrobatchesRerun(3, 1, 1), ("step 3: stage 1 ", "1 microbatch ")),
        (ev.MicrobatchesRerun(3, 1, 2), ("step 3: stage 1 ", "2 microbatches again")),
        (
            ev.MicrobatchesRerun(3, 1, 2, "peer-0"),
            ("gradient of peer-0 is much", "another peer of stage 1 computes its 2 microbatches again"),
        ),
    ],
)
def test_sentences(event: ev.Event, facts: tuple[str, ...]) -> None:
    (sentence,) = plain([event], [])
    for fact in facts:
        assert fact in sentence


def test_a_machine_that_hears_only_its_own_peers_says_so() -> None:
    view = RunView(whole=False)
    for event in (started(), joined("a", 1), done(1)):
        view.fold(event)
    assert plain_line(view).endswith("tokens/s over 1 step  this machine: stage 1: a (ready)")
    assert "this machine's peers; 'muletrain status' shows all" in shown(status(view))


def test_a_plain_line_before_anything_is_known() -> None:
    assert plain_line(RunView()) == "step 0/0  loss ?  ? tokens/s"


def test_json_lines_are_the_events() -> None:
    out = io.StringIO()
    events = [started(), done(1, loss=math.nan)]
    with JsonConsole(RunView(), out) as console:
        for event in events:
            console(event)
    lines = out.getvalue().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run_started", "step_done"]
    assert ev.Event.from_json(lines[0]) == events[0]
    assert console.view.step == 1


def test_the_status_shows_stages_peers_and_what_is_missing() -> None:
    view = fold([started(), joined("a", 0), applied("a", 0), done(4), ev.Waiting(["a peer for stage 1"])])
    text = shown(status(view))
    assert "step 4/10" in text
    assert "waiting: a peer for stage 1" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["80%", "a", "training", "cpu", "fp32", "trainer", "2", "200", "1", "0", "B"] in [r[2:] for r in rows]
    assert ["1", "no", "peer"] in rows
    narrow = [line.split() for line in shown(status(view), 80).splitlines()]
    assert ["80%", "a", "training", "2", "200"] in [r[2:] for r in narrow]


def of_many(stages: int, peers: int, down: int = 0) -> RunView:
    """A run after its first step, with ``down`` peers that then answer no more."""
    view = fold([started(stages=stages, peers=peers, steps=1000)])
    ids = [ID[:-4] + f"{n:04d}".replace("0", "z") for n in range(peers)]
    for n, peer_id in enumerate(ids):
        for event in (joined(f"spot-{n}", n % stages, peer_id), applied(f"spot-{n}", n % stages)):
            view.fold(event)
    view.fold(done(1))
    for peer_id in ids[:down]:
        view.fold(late(peer_id))
    return view


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    ("stages", "peers", "down"), [(16, 20, 1), (16, 1000, 40), (100, 1000, 9), (1, 1, 0), (4, 12, 2)]
)
def test_the_screen_stays_within_24_lines(stages: int, peers: int, down: int, width: int) -> None:
    view = of_many(stages, peers, down)
    lines = shown(status(view), width).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    for stage in range(stages if stages <= 16 else 9):
        assert any(line.split()[:1] == [str(stage)] for line in lines)
    assert len(plain_line(view)) < 400


def test_a_peer_that_dies_is_seen_with_who_takes_its_work_and_an_empty_stage_with_what_the_run_waits_for() -> None:
    view = fold([started(), joined("a", 0), joined("b", 1, OTHER_ID), joined("c", 1, ID[:-1] + "v"), done(1), late()])
    assert "b does not answer: stage 1 goes on with c" in shown(status(view), 80)
    view.fold(ev.StageEmpty(stages="stage 1", lacks="and nobody can take it", minutes=15))
    assert "stage 1 lost all peers, and nobody can take it. The run waits for 15 minutes" in shown(status(view))
    assert "waiting" in plain_line(view)
    view.fold(done(2))
    assert "lost all peers" not in shown(status(view))


def test_the_screen_does_without_colours_and_without_unicode() -> None:
    view = of_many(2, 4, 1)
    for console in (
        Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True),
        Console(
            file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80, force_terminal=True, color_system=None
        ),
    ):
        with console.capture() as captured:
            console.print(status(view))
        text = captured.get()
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", text), "no colour"
    assert text.isascii()
    assert "#" in text


def test_the_live_display_draws_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with LiveConsole(RunView(), console) as live:
        for event in (started(), joined("a", 0), applied("a", 0), done(1)):
            live(event)
    assert "step 1/10" in out.getvalue()
    assert re.search(r"\d\d:\d\d:\d\d  a serves stage 0", out.getvalue()), "people look at it later"
    assert re.search(r"80%  a +training", out.getvalue())


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_final_report(tmp_path: Path) -> None:
    sent_a = {OTHER_ID: {"activation": 3_000_000, "averaging": 500_000}}
    sent_b = {"a": {"gradient": 3_000_000}}
    view = fold(
        [
            prepared(t=94.0, seconds=2.0),
            started(steps=1),
            joined("a", 0),
            joined("b", 1, OTHER_ID),
            applied("a", 0, sent=sent_a),
            applied("b", 1, wait_s=0.0, sent=sent_b),
            ev.MicrobatchRerouted(1, 0, 1, "late"),
            done(1),
            ev.RunFinished(1, 2.0, "all steps done"),
        ]
    )
    quality = Quality(loss=3.0, unigram=2.9, bigram=4.5, tokens=23456, heldout=23456, counted=9, trained=9)
    paths: dict[str, Path | str] = {
        "run folder": tmp_path,
        "events": "e.jsonl",
        "checkpoint": tmp_path / "checkpoints" / "step-00000001",
    }
    text = shown(final_report(view, quality, ["A  [sample]\ntext"], paths, ["muletrain generate"]), 160)
    short = shown(final_report(view, quality, [], paths, ["muletrain generate"], tables=False), 160)
    assert short == "\n".join(text.splitlines()[:6]), "tables only on request"
    rows = [line.split() for line in text.splitlines()]
    assert text.splitlines()[1:6] == [
        "result   held-out loss 3.000 (unigram 2.900, bigram 4.500), perplexity 20.1",
        "speed    1 of 1 step, 2,000 tokens in 2.0 s: 1,000 tokens/s (all steps done); prepared in 7.0 s",
        "trouble  1 microbatch rerouted",
        f"files    {tmp_path}: checkpoints/step-00000001",
        "next     muletrain generate",
    ]
    assert "On 23,456 held-out tokens" in text
    assert "loss [nats/token]" in text
    assert ["this", "model", "3.000", "20.1"] in rows
    assert ["interpolated", "bigram", "4.500", "90.0", "better", "by", "1.500", "nats"] in rows
    assert ["unigram", "2.900", "18.2", "worse", "by", "0.100", "nats"] in rows
    assert "- A [sample] text" in text
    assert ["0", "a", "2", "1", "200", "60%", "10%", "10%", "20%"] in rows
    assert ["1", "b", "2", "1", "250", "75%", "12%", "12%", "0%"] in rows
    assert ["a", "b", "3", "MB", "-", "500", "kB", "-", "-", "3.5", "MB"] in rows
    assert ["b", "a", "-", "3", "MB", "-", "-", "-", "3", "MB"] in rows
    assert ["all", "3", "MB", "3", "MB", "500", "kB", "0", "B", "0", "B", "6.5", "MB"] in rows
    assert f"run folder  {tmp_path}" in text


def test_the_report_fits_a_narrow_terminal() -> None:
    events = [joined(f"machine-{n}", n % 2, f"{n}{ID}") for n in range(4)]
    view = fold([started(), *events, *(applied(f"machine-{n}", n % 2) for n in range(4)), done(1)])
    text = shown(final_report(view, None, ["word " * 30], {}), width=80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text, "no heading is cut"
    assert "stage  peer       done  again  tokens/s  compute  averaging  update  idle" in text, "nor broken"
    assert "Peers (cpu fp32): microbatches, speed, shares of time" in text
    view.fold(dataclasses.replace(joined("gpu-box", 1), device="cuda:0"))
    rows = [line.split() for line in shown(final_report(view, None, [], {})).splitlines()]
    assert ["1", "gpu-box", "cuda:0", "fp32", "0", "0", *["-"] * 5] in rows


def test_the_report_says_what_was_left_out() -> None:
    part = Quality(loss=3.0, unigram=5.9, bigram=4.5, tokens=1000, heldout=5_000_000, counted=2000, trained=9_000_000)
    text = shown(final_report(fold([]), part, [], {}))
    for count in ("1,000 ", "5,000,000", "2,000 of 9,000,000 "):
        assert count in text
    other = Quality(loss=3.0, unigram=None, bigram=None, tokens=9, heldout=9, counted=0, trained=0)
    text = shown(final_report(fold([]), other, [], {}))
    assert "On 9 tokens" in text, "the model may have seen another text"
    short = Quality(loss=3.0, unigram=None, bigram=None, tokens=9, heldout=9, counted=50, trained=50)
    text = shown(final_report(fold([]), short, [], {}))
    assert "too few training tokens" in text
    assert ["unigram", "-", "-", "-"] in [line.split() for line in text.splitlines()]


def test_the_report_of_a_run_stopped_before_its_first_step() -> None:
    text = shown(final_report(fold([started()]), None, [], {"run folder": "runs/1"}))
    assert "speed    0 of 10 steps, 0 tokens in 0 ms: no step was completed" in text
    assert "next     there is no checkpoint to go on from" in text
    assert "run folder  runs/1" in text
    assert "Peers" not in text


@pytest.mark.filterwarnings("default")
def test_tensorboard_files_hold_every_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for event in (done(1, loss=5.0), done(1, loss=5.0), done(2, loss=4.0), ev.Evaluated(2, 3.5, 33.1, 10)):
        sink(event)
    sink.close()
    sink.close()
    scalars = EventAccumulator(str(tmp_path)).Reload()
    assert [(s.step, s.value, s.wall_time) for s in scalars.Scalars("train/loss")] == [(1, 5.0, 101.0), (2, 4.0, 102.0)]
    assert [s.value for s in scalars.Scalars("speed/tokens_per_s")] == [1000.0, 1000.0]
    assert [s.step for s in scalars.Scalars("validation/loss")] == [2]
    assert set(scalars.Tags()["scalars"]) == {
        *("train/loss", "train/lr", "train/grad_norm"),
        *("speed/tokens_per_s", "validation/loss", "validation/perplexity"),
    }


def test_lines_in_pipes_have_no_blanks_at_the_end() -> None:
    view = fold([started(), joined("a", 0), joined("a-longer-name", 1, OTHER_ID), applied("a", 0), done(1)])
    file = io.StringIO()
    make_console(file).print(final_report(view, None, [], {"run folder": "runs/1"}))
    lines = file.getvalue().splitlines()
    assert any(line.startswith("0      a ") for line in lines), "columns stay aligned"
    assert [line for line in lines if line != line.rstrip()] == []


def test_what_others_say_moves_no_cursor() -> None:
    out = io.StringIO()
    LiveConsole(RunView(), Console(file=out, width=200))(ev.FrameRefused(remote="x", reason="\x1b[2J\x07 wrong\x9b"))
    assert "\ufffd[2J\ufffd wrong\ufffd" in out.getvalue()


def test_all_tables_have_one_style() -> None:
    """They are made in one place; grids have no style."""
    cli = Path(cli_package.__file__).parent
    makers = [str(p.relative_to(cli)) for p in cli.rglob("*.py") if re.search(r"\bTable\(", p.read_text("utf-8"))]
    assert makers == ["show/tables.py"]
