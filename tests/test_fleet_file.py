"""Fleet files: machines, links and matrices, those that ship, and what is wrong with others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from muletrain.config.fleet_file import Link, example_files, load_fleet
from muletrain.config.load import dump_toml
from muletrain.config.networks import NETWORKS
from muletrain.config.schema import RunConfig
from muletrain.errors import ConfigError
from tests.toml_files import check, write

if TYPE_CHECKING:
    from pathlib import Path


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
            'region = "europe"',
            'region = "home"',
            "my.toml:10: machines[1].name: ... also the region of 'lab'",
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


def test_a_region_has_the_name_of_a_machine_only_if_no_other_is_in_it(tmp_path: Path) -> None:
    own = TWO.replace("europe", "lab").replace('between = ["lab", "lab"]', 'between = ["home", "home"]')
    fleet = load_fleet(write(tmp_path, own))
    assert [1000 * fleet.link(0, k).delay_s for k in (1, 2)] == [0.0, 100.0], "the two in it, and to the other region"
    with pytest.raises(ConfigError, match=r"machines\[0\].name: 'lab' is also the region of 'home', .* 'lab-lan'"):
        load_fleet(write(tmp_path, own.replace('"asia"', '"lab"').replace('["lab", "lab"]', '["home", "lab"]')))
