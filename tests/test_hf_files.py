"""A folder that holds no whole model of floats is refused with what to do, before anything is computed."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from muletrain.config.load import load_config
from muletrain.errors import CheckpointError
from muletrain.model.hf_files import stored
from muletrain.model.hf_hub import local_folder
from muletrain.runs.assemble import resolve_start
from tests.traced_models import write_folder, write_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4912\n"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native model in shards ('llama'), and a traced one in one file ('qwen2')."""
    folder = tmp_path_factory.mktemp("sources")
    text = write_text(folder / "mine.txt")
    write_folder(folder / "qwen2", text, "qwen2")
    whole = write_folder(folder / "llama", text, "llama")
    (folder / "llama" / "model.safetensors").unlink()
    whole.save_pretrained(folder / "llama", max_shard_size="75KB")
    assert sorted(p.name for p in (folder / "llama").glob("*.safetensors")) == SHARDS
    return folder


@pytest.fixture
def model(sources: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of ``sources``."""

    def copied(name: str) -> Path:
        for file in (sources / name).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    return copied


def refusal(folder: Path) -> str:
    """What a run that begins with ``folder`` is told."""
    with pytest.raises(CheckpointError) as caught:
        resolve_start(load_config(None, [f"model.from={folder}", "model.context=16"]))
    return str(caught.value)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_whole_folder_is_taken(sources: Path, name: str) -> None:
    assert local_folder(str(sources / name)) == sources / name


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_pointer_of_git_lfs_is_named(model: Callable[[str], Path], name: str) -> None:
    folder = model("qwen2")
    (folder / name).write_text(POINTER)
    assert f"{folder / name} is a pointer of git-lfs" in refusal(folder)
    assert "git lfs pull" in refusal(folder)


@pytest.mark.parametrize("name", [SHARDS[1], "model.safetensors.index.json"])
def test_a_pointer_among_shards_is_named(model: Callable[[str], Path], name: str) -> None:
    folder = model("llama")
    (folder / name).write_text(POINTER)
    assert f"{folder / name} is a pointer of git-lfs" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
@pytest.mark.parametrize(("name", "file"), [("llama", SHARDS[2]), ("qwen2", "model.safetensors")])
def test_a_truncated_file_is_named_with_its_sizes(
    model: Callable[[str], Path], name: str, file: str, keep: int
) -> None:
    folder = model(name)
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:keep])
    error = refusal(folder)
    assert f"{folder / file} is not whole: it has {len(whole[:keep]):,} bytes" in error
    assert "fetch it again" in error
    if keep == -1:
        assert f"of {len(whole):,}" in error


def test_what_is_no_safetensors_file_is_named(model: Callable[[str], Path]) -> None:
    folder = model("qwen2")
    for content in (b"<!DOCTYPE html><html>", b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{]"):
        (folder / "model.safetensors").write_bytes(content)
        assert "model.safetensors is no safetensors file" in refusal(folder)


def test_a_missing_shard_is_named(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    (folder / SHARDS[1]).unlink()
    assert f"lacks {SHARDS[1]} (1 of 3 shards" in refusal(folder)


def test_a_tensor_that_its_shard_lacks_is_named(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    save_file({"other": torch.zeros(2)}, folder / SHARDS[1])
    assert f"{folder / SHARDS[1]} has no model." in refusal(folder)


def test_a_tensor_is_read_from_the_shard_that_the_index_names(model: Callable[[str], Path]) -> None:
    """An old copy may be left over in another shard."""
    folder = model("llama")
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, shard in places.items() if shard == SHARDS[0])
    expected, last = stored(folder)[name].read(), load_file(folder / SHARDS[2])
    save_file(last | {name: expected + 1}, folder / SHARDS[2])
    assert torch.equal(stored(folder)[name].read(), expected)


def test_one_file_counts_before_an_index_as_in_transformers(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    state = {name: tensor.read() + 1 for name, tensor in stored(folder).items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert all(torch.equal(tensor.read(), state[name]) for name, tensor in stored(folder).items())


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("model-q4_k_m.gguf", "gguf_file='model-q4_k_m.gguf').save_pretrained"),
        ("pytorch_model.bin", "a pickle, which can run code when it is read. If you trust it, convert it"),
        ("pytorch_model-00001-of-00002.bin", "a pickle"),
        ("consolidated.00.pth", "a pickle"),
        ("consolidated.safetensors", "rename it if it is one file of all weights"),
        ("tf_model.h5", "convert it to a folder of transformers"),
        ("README.md", "take a model that has"),
    ],
)
def test_weights_of_another_kind_are_never_read(model: Callable[[str], Path], file: str, remedy: str) -> None:
    folder = model("qwen2")
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    error = refusal(folder)
    assert str(folder) in error
    assert file == "README.md" or file in error
    assert remedy in error


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_is_refused_although_a_model_lies_beside_it(model: Callable[[str], Path], whole: bool) -> None:
    folder = model("qwen2")
    (folder / "adapter_config.json").write_text("{}")
    if not whole:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert "adapter of peft" in refusal(folder)
    assert f"adapter.from={folder}" in refusal(folder)


@pytest.mark.parametrize("key", ["quantization_config", "quantization", "compression_config"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_quantised_checkpoint_is_refused(model: Callable[[str], Path], name: str, key: str) -> None:
    folder = model(name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: {"bits": 4}}))
    assert f"quantised weights (config.json has {key})" in refusal(folder)


def test_a_quantised_checkpoint_is_known_by_its_file_and_its_types(model: Callable[[str], Path]) -> None:
    folder = model("qwen2")
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for dtype, called in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        save_file(state | {name: state[name].to(dtype)}, folder / "model.safetensors", {"format": "pt"})
        assert f"{name} in {folder}/model.safetensors is stored as {called}" in refusal(folder)
    (folder / "quantize_config.json").write_text("{}")
    assert "quantised weights (quantize_config.json)" in refusal(folder)


def test_a_folder_of_the_cache_is_explained(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    assert "give the model's name, OWNER/NAME, or the folder" in refusal(tmp_path)
    assert "is no folder that can be read (No such file or directory)" in refusal(tmp_path / "none")
    assert "has no config.json" in refusal(tmp_path / "snapshots" / "0123")


def test_refusals_take_no_time(model: Callable[[str], Path]) -> None:
    folder = model("llama")
    refusal(folder.with_name("none"))  # imports
    (folder / SHARDS[2]).write_bytes((folder / SHARDS[2]).read_bytes()[:-1])
    begin = time.process_time()
    refusal(folder)
    assert time.process_time() - begin < 1, "files are looked at before the model is traced"
