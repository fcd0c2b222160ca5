"""The token cache: what it holds, when it is built again, and several processes that build it at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muletrain.config.model_sections import DataConfig
from muletrain.data import tokens as tokens_module
from muletrain.data.tokenizer import END_OF_TEXT, train_tokenizer
from muletrain.data.tokens import TokenCache
from muletrain.errors import DataError
from tests.corpora import SRC, build, folder, pydoc, sides, texts, words, write_rows

__all__ = ["folder", "pydoc"]


def test_cache_holds_all_documents_on_two_sides(pydoc: TokenCache) -> None:
    train, heldout = sides(pydoc)
    assert pydoc.train.dtype == np.uint16
    assert not pydoc.train.flags.writeable
    assert sorted("".join(train + heldout)) == sorted("".join(texts("pydoc")))
    assert {*train} & {*texts("pydoc")}


def test_cache_counts(pydoc: TokenCache) -> None:
    stats = pydoc.stats
    train, heldout = ("".join(side) for side in sides(pydoc))
    assert stats.train_bytes == len(train.encode())
    assert stats.heldout_bytes == len(heldout.encode())
    assert stats.characters == len(train) + len(heldout)
    assert (stats.train_tokens, stats.heldout_tokens) == (len(pydoc.train), len(pydoc.heldout))
    tokens = stats.train_tokens + stats.heldout_tokens
    assert 2 < (stats.train_bytes + stats.heldout_bytes) / tokens < 5
    assert stats.heldout_documents + stats.documents == len(texts("pydoc"))
    assert 0.025 < stats.heldout_bytes / (stats.train_bytes + stats.heldout_bytes) < 0.1


def test_heldout_text_does_not_shape_the_vocabulary(folder: Path) -> None:
    write_rows(folder / "a.jsonl", [{"text": text} for text in words(0, 300)])
    write_rows(folder / "v.jsonl", [{"text": " zq" * 50}])
    cache = build(path="a.jsonl", validation="v.jsonl")
    assert "zq" in cache.decode(cache.heldout.tolist())
    assert not [token for token in json.loads(cache.tokenizer_json)["model"]["vocab"] if "zq" in token]


def test_bounded_batches_give_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 500)))
    config = DataConfig(path="a.txt")
    whole = TokenCache.build(config, 300)
    monkeypatch.setattr(tokens_module, "_BATCH", 1 << 10)
    again = TokenCache.build(config.model_copy(update={"cache": str(folder / "other")}), 300)
    assert again.folder != whole.folder
    assert again.digest == whole.digest


def test_cache_is_reused_and_follows_content(folder: Path) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 200)))
    config = DataConfig(path="a.txt")
    progress: list[float] = []
    first = TokenCache.build(config, 300, progress.append)
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    assert len(progress) > 100
    assert first.folder.parent == folder.parent / "cache" / "muletrain" / "tokens"
    stamp = (first.folder / "train.bin").stat().st_mtime_ns
    reused: list[float] = []
    assert TokenCache.build(config, 300, reused.append).digest == first.digest
    assert reused == [1.0]
    assert (first.folder / "train.bin").stat().st_mtime_ns == stamp
    os.rename("a.txt", "b.txt")
    assert TokenCache.build(DataConfig(path="b.txt"), 300).folder == first.folder
    for changed in (
        TokenCache.build(DataConfig(path="b.txt"), 301),
        TokenCache.build(DataConfig(path="b.txt", heldout=0.1), 300),
    ):
        assert changed.digest != first.digest
    (folder / "b.txt").write_text("\n\n".join(words(1, 200)))
    assert TokenCache.build(DataConfig(path="b.txt"), 300).digest != first.digest


@pytest.mark.parametrize("name", ["train.bin", "heldout.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damaged_cache_is_rebuilt(folder: Path, name: str, damage: str) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 200)))
    config = DataConfig(path="a.txt")
    good = TokenCache.build(config, 300)
    file = good.folder / name
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-2])
    elif damage == "flip":
        file.write_bytes(content[:1] + bytes([content[1] ^ 0x80]) + content[2:])
    else:
        file.unlink()
    assert TokenCache.open(good.folder) is None
    assert TokenCache.build(config, 300).digest == good.digest
    assert file.read_bytes() == content
    assert [path.name for path in good.folder.parent.iterdir()] == [good.folder.name]


def test_build_survives_removal_by_another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that judged the old cache damaged may remove the new one: it is built again."""
    (folder / "a.txt").write_text("\n\n".join(words(0, 200)))
    replace = os.replace
    removed: list[Path] = []

    def replace_then_lose(source: Path, target: Path) -> None:
        replace(source, target)
        if not removed:
            removed.append(target)
            shutil.rmtree(target)

    monkeypatch.setattr(os, "replace", replace_then_lose)
    cache = TokenCache.build(DataConfig(path="a.txt"), 300)
    assert removed == [cache.folder]
    assert TokenCache.open(cache.folder) is not None


def _build_at(barrier: Any, queue: Any, config: DataConfig) -> None:
    barrier.wait(60)
    queue.put(TokenCache.build(config, 300).digest)


def test_several_processes_build_at_once(folder: Path) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 2000)))
    config = DataConfig(path=str(folder / "a.txt"), cache=str(folder / "cache"))
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_build_at, args=(barrier, queue, config)) for _ in range(3)]
    for process in processes:
        process.start()
    digests = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(set(digests)) == 1
    assert len(list((folder / "cache" / "tokens").iterdir())) == 1


def test_digest_does_not_depend_on_the_process(pydoc: TokenCache, tmp_path: Path) -> None:
    code = (
        "from muletrain.data.tokens import TokenCache; from muletrain.config.schema import DataConfig; "
        f"print(TokenCache.build(DataConfig(cache={str(tmp_path)!r}), 1024).digest)"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout.strip() == pydoc.digest


def test_loaded_tokenizer_gives_wide_tokens_and_its_json(folder: Path) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 200)))
    tokenizer = train_tokenizer(iter(words(0, 200)), 300)
    description = json.loads(tokenizer.to_str())
    description["added_tokens"][0]["id"] = 70000  # beyond 16 bits
    description["model"]["vocab"][END_OF_TEXT] = 70000
    description["post_processor"] = None
    (folder / "t.json").write_text(json.dumps(description))
    config = DataConfig(path="a.txt", tokenizer="t.json", end_token=END_OF_TEXT)
    cache = TokenCache.build(config, 70001)
    assert cache.train.dtype == np.uint32
    assert int(cache.train[-1]) == 70000
    assert json.loads(cache.tokenizer_json)["model"]["vocab"][END_OF_TEXT] == 70000
    with pytest.raises(DataError, match=r"has 70001 tokens, model\.vocab = 70000"):
        TokenCache.build(config, 70000)


def test_nothing_to_hold_out_says_so(folder: Path) -> None:
    (folder / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"data\.path: 'a\.txt' has too little text to train on"):
        TokenCache.build(DataConfig(path="a.txt"), 300)
    assert list((folder.parent / "cache" / "muletrain" / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"deduplicate": "documents"},
        {"special_tokens": "text"},
        {"heldout": 0.1},
        {"heldout": 0},
        {"validation": "v.txt"},
        {"field": "other"},
    ],
)
def test_every_option_that_changes_tokens_has_a_cache_of_its_own(change: dict[str, Any], folder: Path) -> None:
    rows = [{"text": text, "other": text[1:]} for text in [*words(0, 100), words(0, 1)[0], END_OF_TEXT]]
    write_rows(folder / "a.jsonl", rows)
    (folder / "v.txt").write_text("Held out.")
    before = build(path="a.jsonl")
    after = build(path="a.jsonl", **change)
    assert after.folder != before.folder
    assert after.digest != before.digest


def test_unwritable_cache_names_the_field(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"data\.cache: cannot write .*file.*set data\.cache"):
        TokenCache.build(DataConfig(cache=str(folder / "file")), 300)
