"""Samples of a user's data set that raise or are not finite: named, counted, and never the end of all trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muletrain.config.trusted import trust
from muletrain.data.samples import HeldoutSamples, SampleData, SampleSource
from muletrain.errors import DataError
from muletrain.events import read_events
from muletrain.runs.view import RunView
from tests.own_models import NOT_A_NUMBER, RAISES

NAME = "tests.own_models:spoiled_images"
SETTINGS = [
    "model.factory=tests.own_models:regression",
    f"data.factory={NAME}",
    "model.vocab=3",
    "train.batch=100",
    "train.microbatch=25",
    "train.steps=6",
    "fleet.stages=1",
    "fleet.peers=1",
    "compute.precision=fp32",
]


@pytest.fixture
def data() -> SampleData:
    trust(NAME)
    return SampleData.build(NAME)


def test_the_next_usable_sample_takes_the_place_on_every_machine(data: SampleData) -> None:
    told: list[tuple[int, int, str]] = []
    sources = [SampleSource(data, 0, 100, 25, vocab=3) for _ in range(2)]
    sources[0].found = lambda *found: told.append(found)
    for step in range(5):
        for index in range(4):
            ours, theirs = (source.microbatch(step, index) for source in sources)
            assert all(np.isfinite(x).all() and np.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert {(k, other) for k, other, _ in told} == {(k, k + 1) for k in (*RAISES, *NOT_A_NUMBER)}
    assert any("sample 37" in why and "image 37 is broken" in why for *_, why in told)
    assert any("sample 41" in why and "not finite" in why for *_, why in told)


def test_held_out_samples_that_cannot_be_used_are_left_out_and_named(data: SampleData) -> None:
    spoiled = replace(data, heldout=data.train)
    why: list[str] = []
    measured = sum(len(inputs) for inputs, _ in spoiled.heldout_batches(500, 64, 3, why.append))
    assert measured == 500 - len(why) == 500 - len({*RAISES, *NOT_A_NUMBER})
    assert all("held-out sample" in reason for reason in why)
    told: list[str] = []
    source = HeldoutSamples(spoiled, 500, 100, 3)
    source.found = lambda k, other, reason: told.append(reason)
    assert all(np.isfinite(source.microbatch(index)[0]).all() for index in range(len(source)))
    assert told == why


def test_data_of_which_no_sample_can_be_used_are_refused(data: SampleData) -> None:
    with pytest.raises(DataError, match="nor can the samples after it"):
        data.or_next(_Broken(), 3, 3)


class _Broken:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, k: int) -> tuple[Any, Any]:
        raise OSError


def trained(folder: Path, *settings: str, resume: bool = False) -> tuple[int, list[dict[str, Any]], str]:
    given = ["--resume"] if resume else SETTINGS
    options = [
        word for setting in (*given, *settings) for word in (("--set", setting) if "=" in setting else (setting,))
    ]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "muletrain.cli.main", "run", "--json", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_stop_ends_the_run_in_order_with_a_checkpoint_and_names_the_sample(tmp_path: Path) -> None:
    code, events, said = trained(tmp_path)
    (found, *_) = [e for e in events if e["kind"] == "sample_replaced"]
    assert code == 2
    assert f"sample {found['sample']}" in said
    assert "data.on_error=skip" in said
    steps = [e["step"] for e in events if e["kind"] == "step_done"]
    assert len(steps) < 6
    assert [e["step"] for e in events if e["kind"] == "checkpoint_written"][-1] == steps[-1]


def test_skip_goes_on_and_counts(tmp_path: Path) -> None:
    code, events, _ = trained(tmp_path, "data.on_error=skip")
    assert code == 0
    assert [e["step"] for e in events if e["kind"] == "step_done"] == [1, 2, 3, 4, 5, 6]
    found = [e["sample"] for e in events if e["kind"] == "sample_replaced"]
    assert sorted(found) == sorted((*RAISES, *NOT_A_NUMBER)), "each is told once, though the sixth step begins an epoch"


def test_several_trainers_stop_again_at_each_resume_and_skip_counts_each_sample_once(tmp_path: Path) -> None:
    """A step of this run is an epoch: it meets every sample."""
    unusable = {*RAISES, *NOT_A_NUMBER}
    two = ["fleet.peers=2", "train.batch=500", "train.microbatch=25", "train.steps=5"]
    for resume, step in ((False, 1), (True, 2)):
        code, events, said = trained(tmp_path, *(() if resume else two), resume=resume)
        found = {e["sample"]: e["peer"] for e in events if e["kind"] == "sample_replaced"}
        assert (code, found.keys()) == (2, unusable)
        assert any(f"sample {k} of" in said for k in unusable)
        assert [e["step"] for e in events if e["kind"] == "step_done"] == [step]
        assert [e["step"] for e in events if e["kind"] == "checkpoint_written"] == [step]
        assert sum(e["trainer"] for e in events if e["kind"] == "peer_joined") == 2
    code, events, _ = trained(tmp_path, "data.on_error=skip", resume=True)
    assert code == 0
    assert [e["step"] for e in events if e["kind"] == "step_done"] == [3, 4, 5]
    met = [(e["peer"], e["sample"]) for e in events if e["kind"] == "sample_replaced"]
    assert {sample for _, sample in met} == unusable
    assert len(met) == len(set(met)), "no trainer tells it twice"
    assert {peer for peer, _ in met} == {"peer-0", "peer-1"}
    view = RunView()
    for event in (event for log in tmp_path.glob("runs/*/peer-*.jsonl") for event in read_events(log)):
        view.fold(event)
    assert len(view.replaced) == 3, "each counts once"
