"""Configuration: every wrong input is one sentence with place, field and remedy; what is printed loads again."""

from __future__ import annotations

import math
import re
import tomllib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from muletrain.config.dump import toml_value
from muletrain.config.fleet_file import Fleet, Link, example_files, load_fleet
from muletrain.config.load import describe, digest, dump_toml, load_config, load_toml
from muletrain.config.locate import key_lines
from muletrain.config.networks import NETWORKS
from muletrain.config.problems import keys_of, submodel
from muletrain.config.schema import Codec, RunConfig
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def write(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text)
    return path


def message(folder: Path, text: str | None, *overrides: str) -> str:
    """The error, with the folder taken out so that it reads as a user sees it in the current directory."""
    with pytest.raises(ConfigError) as caught:
        load_config(None if text is None else write(folder, text), overrides)
    return str(caught.value).replace(f"{folder}/", "")


def check(error: str, expected: str) -> None:
    """``expected``: the place and the field that an error begins with, and the facts that it tells."""
    place, *facts = expected.split(" ... ")
    assert error.startswith(place + " ")
    for fact in facts:
        assert fact in error


# --- one clear error -------------------------------------------------------------------------------------------------


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


# --- values ----------------------------------------------------------------------------------------------------------


def test_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nlayers = 8\nwidth = 96\n[wire]\nactivations = "fp32"\n')
    sets = ["model.layers=12", "data.path=corpus/*.txt", "optimizer.clip=none", "optimizer.lr = 1"]
    config = load_config(path, [*sets, "model.from=my/llama", "data.field=2024", 'network.announce=["/a", "/b"]'])
    assert (config.model.layers, config.model.width, config.model.from_) == (12, 96, "my/llama")
    assert (config.data.path, config.data.field) == ("corpus/*.txt", "2024")
    assert (config.optimizer.clip, config.optimizer.lr) == (None, 1.0)
    assert config.wire.activations is Codec.FP32
    assert config.network.announce == ("/a", "/b")


@pytest.mark.parametrize(
    ("value", "expected"), [('"a b"', "a b"), ("a=b", "a=b"), ("1\nx = 2", "1\nx = 2"), ("true", "true"), ("''", "")]
)
def test_text_needs_no_quotes(value: str, expected: str) -> None:
    assert load_config(None, [f"data.path={value}"]).data.path == expected


def test_the_last_override_wins() -> None:
    assert load_config(None, ["train.steps=1", "train.steps=2"]).train.steps == 2


def test_sizes_of_a_preset_are_not_judged_by_the_defaults() -> None:
    for sizes in ("model.preset=gpt3-125m", "model.from=my-llama"):
        config = load_config(None, [sizes, "fleet.stages=12", "fleet.peers=12"])
        assert config.fleet.stages == 12


def test_a_preset_survives_being_written_down(tmp_path: Path) -> None:
    """Readers of a preset override it by ``model_fields_set``: a copy must not state what was not given."""
    config = load_config(None, ["model.preset=gpt3-125m", "model.context=128", "model.from=x"])
    copies = [
        load_config(write(tmp_path, dump_toml(config)), []),
        RunConfig.model_validate_json(config.model_dump_json(by_alias=True)),
        RunConfig.model_validate_json(config.model_dump_json()),
    ]
    for copy in copies:
        assert copy == config
        assert copy.model.model_fields_set == {"preset", "context", "from_"}
        assert digest(copy) == digest(config)
    stating_more = load_config(None, ["model.preset=gpt3-125m", "model.context=128", "model.from=x", "model.width=192"])
    assert digest(stating_more) != digest(config)


def test_the_sizes_of_a_checkpoint_survive_being_written_down(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(dump_toml(load_config(None, ["model.from=my-llama", "model.dropout=0.5"])))
    assert load_config(tmp_path / "a.toml").model.model_fields_set == {"from_", "dropout"}


def test_configs_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().model.layers = 3


# --- printing --------------------------------------------------------------------------------------------------------


def fields(kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, info in keys_of(kind).items():
        if sub := submodel(info):
            yield from ((f"{key}.{k}", sub) for k in keys_of(sub))
        else:
            yield key, kind


@pytest.mark.parametrize("kind", [RunConfig, Fleet])
def test_every_field_is_described_and_numbers_have_a_unit(kind: type[BaseModel]) -> None:
    for name, section in fields(kind):
        info = keys_of(section)[name.split(".")[-1]]
        assert info.description, name
        if re.search(r"\b(int|float)\b", str(info.annotation)):
            assert re.search(r"\[[^]]+\]$", info.description), f"{name} has no unit"
        if info.default is None:
            assert info.examples, f"{name} is off by default and shows no example"


@pytest.mark.parametrize("kind", [RunConfig, Fleet])
def test_the_printed_configuration_names_every_field_with_a_comment(kind: type[BaseModel]) -> None:
    text = describe(kind)
    for name, _ in fields(kind):
        assert re.search(rf"^(# )?{name.split('.')[-1]} = .+  # .+", text, re.MULTILINE), name


def test_the_printed_configuration_is_the_default(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, describe()), []) == RunConfig()


def test_a_preset_put_into_the_printed_configuration_sets_the_sizes(tmp_path: Path) -> None:
    text = describe().replace("# preset = ", "preset = ")
    assert load_config(write(tmp_path, text)).model.model_fields_set == {"preset"}


def test_the_printed_fleet_loads(tmp_path: Path) -> None:
    assert load_fleet(write(tmp_path, describe(Fleet))).machines[0].name == "desk"


@pytest.mark.parametrize("kind", [RunConfig, Fleet])
def test_the_commented_out_examples_load(tmp_path: Path, kind: type[BaseModel]) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", describe(kind), flags=re.MULTILINE)
    config = load_toml(kind, write(tmp_path, text))
    unset = [
        f"{key}.{name}"
        for key, section in config
        if isinstance(section, BaseModel)
        for name, value in section
        if value is None
    ]
    assert unset == []


def test_dump_round_trips(tmp_path: Path) -> None:
    sets = ["optimizer.clip=none", 'data.path=a "b"\\c\n\té\x7f', "model.from=x", "compute.memory=7.5"]
    config = load_config(None, [*sets, 'network.announce=["/ip4/1.2.3.4/tcp/1"]', "wire.gradients=int8"])
    assert config.optimizer.clip is None
    assert load_config(write(tmp_path, dump_toml(config)), []) == config


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_toml(text: str) -> None:
    assert tomllib.loads(f"k = {toml_value(text)}")["k"] == text


@pytest.mark.parametrize(
    ("overrides", "peers", "trainers"),
    [
        ([], 4, 2),
        (["fleet.stages=3"], 6, 2),
        (["fleet.stages=1", "fleet.peers=1"], 1, 1),
        (["fleet.peers=3", "fleet.trainers=3"], 3, 3),
    ],
)
def test_a_local_fleet_has_two_peers_a_stage_and_two_trainers(overrides: list[str], peers: int, trainers: int) -> None:
    config = load_config(None, overrides).local()
    assert (config.fleet.peers, config.fleet.trainers) == (peers, trainers)
    assert digest(config) == digest(load_config(None, overrides))


# --- digest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    ["model.layers=6", "train.seed=1", "optimizer.lr=1", "wire.gradients=fp32", "fleet.stages=1", "data.heldout=0.1"],
)
def test_what_changes_the_numbers_changes_the_digest(override: str) -> None:
    assert digest(load_config(None, [override])) != digest(RunConfig())


@pytest.mark.parametrize(
    "override",
    ["fleet.peers=8", "data.path=x", "data.cache=x", "compute.threads=3", "checkpoint.every=5", "train.time_limit=9"],
)
def test_where_a_run_happens_does_not_change_the_digest(override: str) -> None:
    assert digest(load_config(None, [override])) == digest(RunConfig())


def test_the_digest_is_of_values_not_of_their_spelling(tmp_path: Path) -> None:
    spelled = write(tmp_path, "[optimizer]\nweight_decay = 1\n[model]\nlayers = 4\n")
    assert digest(load_config(spelled, [])) == digest(load_config(None, ["optimizer.weight_decay=1.0"]))


# --- lines -----------------------------------------------------------------------------------------------------------


def test_lines_of_keys() -> None:
    text = (
        'top = 1\n\n[a]  # comment with = and [\nx = """\ny = 2\n"""\ny = [\n  1, # ]\n  "]",\n]\n'
        '"quo ted" = {z = "}", w = [1]}\nb.c = \'#\'\n[[m]]\nn = 1\n[m.sub]\nk = 1\n[[m]]\nn = 2\n[ d . e ]\nf=1'
    )
    tomllib.loads(text)
    lines = key_lines(text)
    assert lines == {
        ("top",): 1,
        ("a",): 3,
        ("a", "x"): 4,
        ("a", "y"): 7,
        ("a", "quo ted"): 11,
        ("a", "b"): 12,
        ("a", "b", "c"): 12,
        ("m",): 13,
        ("m", 0): 13,
        ("m", 0, "n"): 14,
        ("m", 0, "sub"): 15,
        ("m", 0, "sub", "k"): 16,
        ("m", 1): 17,
        ("m", 1, "n"): 18,
        ("d",): 19,
        ("d", "e"): 19,
        ("d", "e", "f"): 20,
    }


# --- fleets ----------------------------------------------------------------------------------------------------------

TWO = """
[[machines]]
name = "lab"
count = 2
region = "europe"
up_mbps = 80.0
speed = 0.5

[[machines]]
name = "home"
region = "asia"
down_mbps = 40.0
forward_ms = 7.0
stall_every_s = 9.0

[[links]]
between = ["asia", "europe"]
rtt_ms = 200.0
bandwidth_mbps = 60.0

[[links]]
between = ["lab", "lab"]
rtt_ms = 2.0

[pacing]
forward_ms = 10.0
backward_ms = 25.0

[stalls]
duration_s = 0.5
"""


def test_fleet_expands_and_links(tmp_path: Path) -> None:
    fleet = load_fleet(write(tmp_path, TWO.replace("forward_ms = 7.0", "forward_ms = 7.0\nqueue_s = 1.5")))
    lab, twin, home = fleet.peers()
    assert [p.name for p in (lab, twin, home)] == ["lab-0", "lab-1", "home"]
    assert (lab.forward_s, lab.backward_s, lab.stall) == (0.02, 0.05, None)
    assert (home.forward_s, home.backward_s) == (0.007, 0.025)
    assert home.stall is not None
    assert (home.stall.every_s, home.stall.duration_s) == (9.0, 0.5)
    assert (lab.up_bytes_per_s, lab.down_bytes_per_s) == (10e6, math.inf)
    assert fleet.link(0, 1) == Link(0.001, 10e6)  # the machines' own path, narrowed by the sender's upload
    assert fleet.link(0, 2) == Link(0.1, 5e6)  # narrowed by the receiver's download
    assert fleet.link(2, 0) == Link(0.1, 7.5e6)  # the path itself is narrowest
    assert fleet.link(1, 1) == Link(0.0, math.inf)
    assert (lab.queue_s, home.queue_s) == (0.25, 1.5)


def test_unnamed_paths_follow_the_defaults(tmp_path: Path) -> None:
    text = '[[machines]]\nname = "a"\ncount = 2\n[[machines]]\nname = "b"\nregion = "far"\n[defaults]\nrtt_ms = 50\n'
    fleet = load_fleet(write(tmp_path, text + "bandwidth_mbps = 8\nlocal_rtt_ms = 4\n"))
    assert fleet.link(0, 1) == Link(0.002, math.inf)
    assert fleet.link(1, 2) == Link(0.025, 1e6)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("count = 2", "count = 0", "my.toml:4: machines[0].count: ... got 0"),
        ('name = "lab"', "", "my.toml:2: machines[0].name:"),
        ("speed = 0.5", "sped = 0.5", "my.toml:7: machines[0].sped: ... 'speed'"),
        (
            '["asia", "europe"]',
            '["asia", "eurpe"]',
            "my.toml:17: links[0].between: ... 'eurpe' ... 'europe'",
        ),
        (
            '["lab", "lab"]',
            '["europe", "asia"]',
            "my.toml:22: links[1].between:",
        ),
        (
            'name = "home"',
            'name = "lab"',
            "my.toml:10: machines[1].name:",
        ),
        (
            'region = "asia"',
            'region = "home"',
            "my.toml:10: machines[1].name:",
        ),
        (
            "[pacing]\nforward_ms = 10.0",
            "[pacing]",
            "my.toml:26: pacing.backward_ms: ... pacing.forward_ms",
        ),
    ],
)
def test_wrong_fleet(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in TWO
    with pytest.raises(ConfigError) as caught:
        load_fleet(write(tmp_path, TWO.replace(old, new, 1)))
    check(str(caught.value).replace(f"{tmp_path}/", ""), expected)


REGIONS = """
[[machines]]
name = "a"
count = 2
region = "berlin"
[[machines]]
name = "b"
region = "boston"
[matrix]
regions = ["berlin", "boston"]
rtt_ms = [[1, 80], [90, 1]]
bandwidth_mbps = [[1000, 200], [100, 1000]]
"""


def test_a_matrix_gives_every_path_its_own_numbers(tmp_path: Path) -> None:
    fleet = load_fleet(write(tmp_path, REGIONS))
    assert fleet.link(0, 1) == Link(0.0005, 125e6)
    assert (fleet.link(0, 2), fleet.link(2, 0)) == (Link(0.04, 25e6), Link(0.045, 12.5e6))
    own = REGIONS + '[[links]]\nbetween = ["a", "b"]\nrtt_ms = 7\n'
    assert load_fleet(write(tmp_path, own)).link(2, 0) == Link(0.0035, math.inf)  # a pair goes before the matrix


def test_published_networks_are_square_and_meet_what_the_paper_says() -> None:
    """DT-FM sec. 4: 5 ms and 2 Gb/s inside a region; 10 to 250 ms and 0.3 to 1.3 Gb/s between them."""
    for network in NETWORKS.values():
        for rows, inside, low, high in ((network.rtt_ms, 5, 10, 250), (network.bandwidth_mbps, 2000, 300, 1300)):
            assert [len(row) for row in rows] == [len(network.regions)] * len(rows) == [len(rows)] * len(rows)
            assert {rows[k][k] for k in range(len(rows))} == {inside}
            apart = [v for i, row in enumerate(rows) for k, v in enumerate(row) if i != k]
            assert low <= min(apart) <= max(apart) <= high
            assert all(row[k] == rows[k][i] for i, row in enumerate(rows) for k in range(len(rows)))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "[[1, 80], [90, 1]]",
            "[[1, 80], [90]]",
            "my.toml:11: matrix.rtt_ms: ... row 2",
        ),
        (
            "[[1000, 200], [100, 1000]]",
            "[[1000, 200]]",
            "my.toml:12: matrix.bandwidth_mbps: ... matrix.regions",
        ),
        (
            "[100, 1000]",
            "[-100, 1000]",
            "my.toml:12: matrix.bandwidth_mbps[1][0]: ... got -100",
        ),
        ("[90, 1]", "[-90, 1]", "my.toml:11: matrix.rtt_ms[1][0]: ... got -90"),
        (
            'region = "boston"',
            'region = "bostn"',
            "my.toml:8: machines[1].region: ... 'bostn' ... 'boston'",
        ),
        (
            "[matrix]",
            '[matrix]\npreset = "worldwide-8"',
            "my.toml:11: matrix.regions: ... matrix.preset",
        ),
        (
            'regions = ["berlin", "boston"]\nrtt_ms = [[1, 80], [90, 1]]\nbandwidth_mbps = [[1000, 200], [100, 1000]]',
            'preset = "worldwide-9"',
            "my.toml:10: matrix.preset: ... 'worldwide-8'",
        ),
    ],
)
def test_wrong_matrix(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in REGIONS
    with pytest.raises(ConfigError) as caught:
        load_fleet(write(tmp_path, REGIONS.replace(old, new, 1)))
    check(str(caught.value).replace(f"{tmp_path}/", ""), expected)


@pytest.mark.parametrize("path", example_files(), ids=lambda p: p.stem)
def test_every_shipped_fleet_loads_and_fits_the_default_run(tmp_path: Path, path: Path) -> None:
    fleet = load_fleet(path.stem)
    assert fleet.name == path.stem
    assert len(fleet.peers()) == RunConfig().fleet.local_peers
    assert load_fleet(write(tmp_path, dump_toml(fleet))) == fleet


def test_there_are_shipped_fleets() -> None:
    assert {"slow-home", "two-regions"} <= {p.stem for p in example_files()}


def test_unknown_fleet_names_those_that_ship() -> None:
    with pytest.raises(ConfigError, match=r"slowhome: .*'slow-home'"):
        load_fleet("slowhome")


def test_a_fleet_too_small_for_the_run_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    assert len(load_fleet(path, peers=3).peers()) == 3
    with pytest.raises(ConfigError) as caught:
        load_fleet(path, peers=4)
    check(str(caught.value), f"{path}: machines: ... 3 machines ... fleet.peers = 4")


def test_a_model_that_was_trained_before_is_trained_further_by_small_steps(tmp_path: Path) -> None:
    """Also after the configuration was written and read again; who sets a rate gets it."""
    rates = [
        load_config(None, sets).optimizer.lr for sets in ([], ["model.from=x"], ["model.from=x", "optimizer.lr=0.5"])
    ]
    assert rates == [3e-3, 2e-5, 0.5]
    assert load_config(None, ["model.from=x", "optimizer.name=lamb"]).optimizer.lr == 1e-3
    config = load_config(None, ["model.from=x"])
    (tmp_path / "a.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "a.toml") == config
    assert RunConfig.model_validate_json(config.model_dump_json(by_alias=True)) == config
