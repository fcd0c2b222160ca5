"""Configuration: every wrong input is one sentence with place, field and remedy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from muletrain.config.load import load_config
from muletrain.config.locate import Origins
from muletrain.config.problems import located
from muletrain.config.schema import MAX_MICROBATCHES
from muletrain.errors import ConfigError, DataError
from tests.toml_files import check, message

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model]\n# heads\nhedas = 4\n", "my.toml:3: model.hedas: ... 'heads'"),
        ("[modle]\nheads = 4\n", "my.toml:1: modle: ... 'model'"),
        ("[train]\nlr = 0.1\n", "my.toml:2: train.lr: ... 'optimizer.lr'"),
        ("layers = 3\n", "my.toml:1: layers: ... 'model.layers'"),
        (
            "[checkpoint]\nxyz = 1\n",
            "my.toml:2: checkpoint.xyz: ... every, keep, place",
        ),
        ('[model]\nlayers = "12"\n', "my.toml:2: model.layers: ... got '12'"),
        ("[model]\nlayers = 1.5\n", "my.toml:2: model.layers: ... got 1.5"),
        ("[model]\nlayers = true\n", "my.toml:2: model.layers: ... got true"),
        ("[data]\npath = 3\n", "my.toml:2: data.path: ... got 3"),
        ("[model]\nshare_layers = 1\n", "my.toml:2: model.share_layers: ... got 1"),
        ("[model]\n\nlayers = 0\n", "my.toml:3: model.layers: ... got 0"),
        ("[model]\ndropout = 1.0\n", "my.toml:2: model.dropout: ... got 1.0"),
        ("[network]\nport = 70000\n", "my.toml:2: network.port: ... got 70000"),
        ("[optimizer]\nlr = inf\n", "my.toml:2: optimizer.lr: ... got inf"),
        ("[optimizer]\nbetas = [0.9]\n", "my.toml:2: optimizer.betas[1]:"),
        ("[optimizer]\nbetas = 0.9\n", "my.toml:2: optimizer.betas: ... got 0.9"),
        (
            '[optimizer]\nname = "adam"\n',
            "my.toml:2: optimizer.name: ... got 'adam' ... 'adamw'",
        ),
        (
            '[wire]\nactivations = "int4"\n',
            "my.toml:2: wire.activations: ... got 'int4' ... 'int8'",
        ),
        (
            '[compute]\ndevice = "gpu"\n',
            "my.toml:2: compute.device: ... got 'gpu'",
        ),
        ("model = 3\n", "my.toml:1: model: ... got 3"),
        (
            "[model]\nwidth = 64\nheads = 6\n",
            "my.toml:3: model.heads: ... model.width = 64 ... 4 heads",
        ),
        (
            "[train]\nsteps = 3\n[model]\nwidth = 64\n",
            "my.toml:4: model.heads: ... model.width = 64 ... 4 heads",
        ),
        (
            "[model]\nwidth = 6\n",
            "my.toml:2: model.heads: ... model.width / heads = 1 ... 3 heads",
        ),
        (
            "[model]\nkv_heads = 4\n",
            "my.toml:2: model.kv_heads: ... model.heads = 6",
        ),
        (
            "[fleet]\npeers = 1\n",
            "my.toml:2: fleet.peers: ... fleet.stages = 2",
        ),
        (
            "[fleet]\nstages = 5\npeers = 4\n[model]\nlayers = 8\n",
            "my.toml:3: fleet.peers: ... fleet.stages = 5",
        ),
        (
            '[data]\npath = ["a.txt", "b.txt"]\n',
            "my.toml:2: data.path: ... got ['a.txt', 'b.txt']",
        ),
        (
            "[model]\nlayers = 1\n",
            "my.toml:2: fleet.stages: ... model.layers = 1",
        ),
        (
            "[fleet]\npeers = 1\nstages = 1\ntrainers = 2\n",
            "my.toml:4: fleet.trainers: ... fleet.peers = 1",
        ),
        (
            "[train]\nbatch = 6\n",
            "my.toml:2: train.microbatch: ... train.batch = 6",
        ),
        (
            "[model]\ncontext = 16\n[train]\nsequence_start = 32\n",
            "my.toml:4: train.sequence_start: ... model.context = 16",
        ),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, expected: str) -> None:
    check(message(tmp_path, text), expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.layers=x", "--set model.layers=x: model.layers: ... got 'x'"),
        ("model.hedas=4", "--set model.hedas=4: model.hedas: ... 'heads'"),
        ("modle.heads=4", "--set modle.heads=4: modle: ... 'model'"),
        ("layers=4", "--set layers=4: layers: ... 'model.layers'"),
        ("model.layers", "--set model.layers: ... SECTION.FIELD"),
        ("model..x=1", "--set model..x=1: ... SECTION.FIELD"),
        ("model=3", "--set model=3: ... model.FIELD=3"),
        (
            'network.announce=["1.2.3.4:4000"]',
            '--set network.announce=["1.2.3.4:4000"]: network.announce: ... /ip4/1.2.3.4/tcp/4000',
        ),
        ("model.layers=none", "--set model.layers=none: model.layers: ... got 'none'"),
        (
            "fleet.peers=1",
            "--set fleet.peers=1: fleet.peers: ... fleet.stages = 2",
        ),
        (
            "model.width=64",
            "--set model.width=64: model.heads: ... model.width = 64 ... 4 heads",
        ),
    ],
)
def test_wrong_override(tmp_path: Path, override: str, expected: str) -> None:
    check(message(tmp_path, None, override), expected)


def test_an_override_is_blamed_for_what_it_replaced(tmp_path: Path) -> None:
    text = "[model]\nlayers = 4\n"
    check(message(tmp_path, text, "model.layers=0"), "--set model.layers=0: model.layers: ... got 0")
    assert message(tmp_path, "[model]\nlayers = 0\n", "model.width=96").startswith("my.toml:2: model.layers: ")


def test_an_override_is_not_blamed_for_another_field_of_its_section(tmp_path: Path) -> None:
    said = message(tmp_path, None, "train.seed=1", "train.batch=6", "train.microbatch=4")
    check(said, "--set train.microbatch=4: train.microbatch: ... train.batch = 6")
    origins = Origins()
    for text in ("data.heldout=0.1", "data.field=body", "model.width=64"):
        origins.override(tuple(text.partition("=")[0].split(".")), text)
    with pytest.raises(DataError, match=r"^--set data\.field=body: data\.field: row 3 has none$"), located(origins):
        raise DataError("data.field: row 3 has none")
    with pytest.raises(DataError, match=r"^default configuration: data\.path: no such file$"), located(origins):
        raise DataError("data.path: no such file")


def test_a_section_that_is_no_table_is_named_before_the_override(tmp_path: Path) -> None:
    check(message(tmp_path, "model = 3\n", "model.layers=2"), "my.toml:1: model: ... [model] ... got 3")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[model]\nlayers = \n", "my.toml:2:10: not valid TOML: "),
        ("[model]\ndata = corpus.txt\n", "my.toml:2:8: not valid TOML: "),
        ("[model]\nlayers = 1\nlayers = 2\n", "my.toml:3:11: not valid TOML: "),
        ('[model]\nname = """abc', "my.toml: not valid TOML: "),
    ],
)
def test_toml_syntax(tmp_path: Path, text: str, place: str) -> None:
    assert message(tmp_path, text).startswith(place)


def test_a_key_given_twice_is_not_a_matter_of_quotes(tmp_path: Path) -> None:
    for twice in ("layers = 2", "[model]"):
        assert "once" in message(tmp_path, f"[model]\nlayers = 1\n{twice}\n").partition("; ")[2]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=re.escape(f"'muletrain config > {missing}'")):
        load_config(missing, [])
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: ")):
        load_config(tmp_path, [])
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin.toml: .*byte 5"):
        load_config(latin, [])


def test_more_microbatches_than_peers_can_name_in_a_message_are_refused(tmp_path: Path) -> None:
    most = MAX_MICROBATCHES
    load_config(None, [f"train.batch={most}", "train.microbatch=1"])
    with pytest.raises(ConfigError, match=r"are 32,769 microbatches a step, and peers agree on at most 32,768; raise"):
        load_config(None, [f"train.batch={most + 1}", "train.microbatch=1"])
