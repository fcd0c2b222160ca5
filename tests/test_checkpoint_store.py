"""Where checkpoints lie: complete or not at all, in a folder or behind a URL, and harmed ones are passed over."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import fsspec
import pytest
import safetensors.torch
import torch

from muletrain.errors import CheckpointError, ConfigError, ProtocolError
from muletrain.events import (
    CheckpointFailed,
)
from muletrain.runs.checkpoint import Checkpoint, bring_home, bring_newest_home
from muletrain.runtime.checkpoint.checkpointing import MAX_OPEN
from muletrain.runtime.checkpoint.messages import PartReady
from muletrain.runtime.checkpoint.store import Folder, Key, PartFacts, open_place
from muletrain.wire.statefile import StateBuffers, cut
from tests.checkpoint_stages import FACTS, FILES, LINEAGE, Stages, names, play, state

pytestmark = pytest.mark.timeout(360)


def test_a_state_is_a_safetensors_file_piece_by_piece() -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(()), "z": torch.zeros(0, 4), "s": torch.ones(2).double()}
    buffers = StateBuffers(tensors)
    whole = b"".join(buffers)
    read = safetensors.torch.load(whole)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[k], tensors[k]) and read[k].dtype == tensors[k].dtype for k in tensors)
    for size in (1, 7, 64, len(whole), len(whole) + 1):
        runs = [b"".join(run) for run in cut(buffers, size)]
        assert b"".join(runs) == whole
        assert {len(r) for r in runs[:-1]} <= {size}
        assert 0 < len(runs[-1]) <= size


class Unfrozen(Folder):
    """A coordinator that froze right before its last step."""

    def go_on(self, key: Key) -> None:
        self._finish(key)


def test_a_checkpoint_is_complete_with_all_its_parts_or_not_at_all(tmp_path: Path) -> None:
    folder, store = Folder(tmp_path / "run", keep=2), open_place(f"memory://{tmp_path.name}", keep=2)
    key, about = Key(4, LINEAGE), FACTS.manifest("run") | {"data": "d"}
    buffers = StateBuffers(state(0))
    parts = {0: PartFacts.of(buffers)}
    for place in (folder, store):
        assert place.publish(key, about, parts, FILES) == {0}
        place.write_part(key, 0, buffers)
        assert not place.publish(key, about, parts, FILES)
        place.abandon(key)  # too late
        assert place.complete() == {key: parts}
    # somebody froze before its last step, and others were there first
    folder.write_part(key, 0, list(buffers)[:1])
    Unfrozen(tmp_path / "run", keep=2).go_on(key)
    assert names(tmp_path / "run") == ["step-00000004"]
    Checkpoint.intact(tmp_path / "run" / "step-00000004")


def test_a_checkpoint_never_goes_before_the_next_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collectors publish the same checkpoint, or two histories one of the same step: with ``keep = 1`` there was a
    moment, or all time after, without any."""
    root, about = tmp_path / "run", FACTS.manifest("run") | {"data": "d"}
    buffers = StateBuffers(state(0))
    parts = {0: PartFacts.of(buffers)}
    one, two = Folder(root, keep=1), Folder(root, keep=1)
    same, rival, later = Key(4, LINEAGE), Key(4, b"x" * 32), Key(8, LINEAGE)
    looks: list[bool] = []

    def complete_is_stale(self: Folder) -> dict[Key, dict[int, PartFacts]]:
        """``two`` looked just before ``one`` was done."""
        found = complete(self)
        if self is two and not looks:
            looks.append(True)
            one.write_part(same, 0, buffers)
            one.publish(same, about, parts, FILES)
        return found

    complete = Folder.complete
    monkeypatch.setattr(Folder, "complete", complete_is_stale)
    two.write_part(same, 0, buffers)
    with contextlib.suppress(FileNotFoundError):
        two.publish(same, about, parts, FILES)
    assert set(complete(one)) == {same}
    two.write_part(rival, 0, buffers)
    assert not two.publish(rival, about, parts, FILES)
    assert set(complete(one)) == {same, rival}
    assert Checkpoint.intact(Path(two.where(rival))).manifest["lineage"] == rival.lineage.hex()
    one.write_part(later, 0, buffers)
    one.publish(later, about, parts, FILES)
    assert names(root) == ["step-00000008"]


def test_a_part_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        own = stages.checkpoints["coordinator"]

        def ready(sender: str = "one", **changes: Any) -> None:
            fields = {"step": 4, "lineage": LINEAGE, "stage": 1, "size": 8, "digest": bytes(32)} | changes
            own.on_ready(sender, PartReady(**fields))

        for wrong in ({"stage": 2}, {"step": 0}, {"step": 1001}, {"size": 0}, {"size": 1 << 43}):
            with pytest.raises(ProtocolError, match="cannot be"):
                ready(**wrong)
        plan, known = stages.plan, 1000
        stages.contexts["coordinator"].plan = dataclasses.replace(plan, state_bytes=(known, known))
        with pytest.raises(ProtocolError, match="cannot be"):  # whoever fetches it makes room for as much
            ready(size=2 * known + (1 << 20) + 1)
        stages.contexts["coordinator"].plan = plan
        ready("coordinator")
        assert not own._open, "a stage's own peers say first what its part is"
        ready("other", digest=b"y" * 32)
        for sender in ("other", "coordinator"):
            ready(sender, digest=b"x" * 32)
        assert [o.parts[1].digest for o in own._open.values()] == [b"y" * 32], (
            "the first counts until the writer speaks"
        )
        ready()
        ready("other", digest=b"x" * 32)
        assert [o.parts[1].digest for o in own._open.values()] == [bytes(32)]
        assert [o.holders[1] for o in own._open.values()] == [{"one"}]
        for step in range(5, 4 + MAX_OPEN):
            ready(step=step)
        with pytest.raises(ProtocolError, match="others are not complete"):
            ready(step=500)
        assert await stages.checkpoint(12)
        assert [(e.step, e.reason) for e in stages.of(CheckpointFailed)] == [
            (s, "no part of stages [0] came before a later checkpoint was complete") for s in range(4, 12)
        ]
        await stages.close()

    play(scenario)


def test_a_store_behind_a_url_holds_the_same_checkpoints(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    place = open_place(url, keep=2)
    for step in (4, 8, 12):
        key, parts = Key(step, LINEAGE), {}
        for stage in (0, 1):
            buffers = StateBuffers(state(stage))
            parts[stage] = PartFacts.of(buffers)
            place.write_part(key, stage, buffers)
            assert key not in place.complete()
        place.write_part(Key(step, b"x" * 32), 0, buffers)  # of another history
        assert not place.publish(key, FACTS.manifest("run") | {"data": "d"}, parts, FILES)
    assert {k.step: p for k, p in place.complete().items()} == {8: ANY, 12: parts}
    assert place.read_part(key, 1) == b"".join(StateBuffers(safetensors.torch.load(place.read_part(key, 1))))
    bring_home(place.where(key), tmp_path / "checkpoints" / "step-00000012")
    checkpoint = Checkpoint.open(tmp_path)
    assert [checkpoint.verify(p).name for p in checkpoint.manifest["parts"]] == [
        f"stage-{s}.safetensors" for s in (0, 1)
    ]
    bring_newest_home(url, tmp_path / "elsewhere")
    assert Checkpoint.open(tmp_path / "elsewhere").step == 12
    assert names(tmp_path / "elsewhere" / "checkpoints") == ["step-00000012"]
    damage(tmp_path / "elsewhere" / "checkpoints" / "step-00000012" / "stage-0.safetensors")
    bring_newest_home(url, tmp_path / "elsewhere")  # once more
    assert Checkpoint.intact(tmp_path / "elsewhere" / "checkpoints" / "step-00000012")
    fsspec.filesystem("memory").pipe_file(f"{place.where(key)}/stage-1.safetensors", b"damaged")
    bring_newest_home(url, tmp_path / "third")
    found = Checkpoint.newest_intact(tmp_path / "third", lambda text: None)
    assert found is not None
    assert found.step == 8, "the newest that is whole"
    place.drop(100)
    assert set(place.complete()) == {Key(8, LINEAGE), Key(12, LINEAGE)}


def test_a_place_that_this_machine_cannot_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.place: nosuch://x: give a folder, or a URL of"):
        open_place("nosuch://x", keep=1)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def without(*keys: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in keys}))

    return remove


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("stage-0.safetensors", damage, "is damaged"),
        ("stage-1.safetensors", Path.unlink, "cannot be read"),
        ("stage-1.safetensors", tear, "is damaged"),
        ("tokenizer.json", damage, "is damaged"),
        ("tokenizer.json", Path.unlink, "cannot be read"),
        ("manifest.json", tear, "cannot be read"),
        ("manifest.json", Path.unlink, "no checkpoint here"),
        ("manifest.json", without("parts"), "parts"),
        ("manifest.json", without("files"), "files"),
        ("manifest.json", lambda path: path.write_text('{"format": 99}'), "this version reads"),
    ],
)
def test_a_harmed_checkpoint_is_passed_over(file: str, harm: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "checkpoints")
        assert await stages.checkpoint(4)
        assert await stages.checkpoint(8)

    play(scenario)
    torn = tmp_path / "checkpoints" / ".step-00000012.partial"
    torn.mkdir()
    harm(tmp_path / "checkpoints" / "step-00000008" / file)
    told: list[str] = []
    found = Checkpoint.newest_intact(tmp_path, told.append)
    assert found is not None
    assert found.step == 4
    assert not torn.exists()
    assert len(told) == 2
    assert "was being written" in told[0]
    assert "step-00000008 is passed over" in told[1]
    assert said in told[1]


def test_a_damaged_tokenizer_is_not_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path)
        assert await stages.checkpoint(4)

    play(scenario)
    damage(tmp_path / "step-00000004" / "tokenizer.json")
    with pytest.raises(CheckpointError, match="is damaged"):
        _ = Checkpoint.open(tmp_path).tokenizer_json


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"spec": ' * 100_000, b"\xff\xfe", b"[]", b'{"format": 2, "step": -1}', b'{"parts": [1]}'],
    ids=["nested lists", "nested objects", "no text", "a list", "a negative step", "no files"],
)
def test_garbage_for_a_manifest_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-00000004").mkdir()
    manifest = tmp_path / "step-00000004" / "manifest.json"
    manifest.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-00000004/manifest.json cannot be read \(.*use another checkpoint"):
        Checkpoint.open(tmp_path)
    assert Folder(tmp_path, keep=1).complete() == {}


def test_garbage_in_the_marker_of_a_place_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    assert Folder(tmp_path / "new", keep=1).name == Folder(tmp_path / "new", keep=2).name
    for garbage in (b"\xff\xfe\x00", b"x" * 1000, b"../../etc"):
        (tmp_path / ".place").write_bytes(garbage)
        with pytest.raises(CheckpointError, match=r"\.place is not what muletrain wrote: remove it"):
            _ = Folder(tmp_path, keep=1).name
