"""A tiny model on fleets of a few machines, for ``simulate fleet``."""

from __future__ import annotations

from pathlib import Path

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.model.spec import ModelSpec
from muletrain.sim.fleet.accounts import Outcome
from muletrain.sim.fleet.simulation import simulate_fleet, weather
from muletrain.sim.setting import Setting, setting

TINY = (
    "model.width=64",
    "model.heads=2",
    "model.layers=4",
    "model.context=32",
    "model.vocab=512",
    "train.microbatch=1",
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "checkpoint.every=0",
)
PACED = '[[machines]]\nname = "a"\ncount = 4\n[pacing]\nforward_ms = 1000\nbackward_ms = 2000\n'


def run_of(tmp_path: Path, text: str, *overrides: str) -> tuple[Setting, RunConfig]:
    """The setting and the configuration of ``TINY`` on the fleet of this file."""
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    config = load_config(None, [*TINY, *overrides])
    return setting(load_fleet(file), config, ModelSpec.from_config(config.model)), config


def scene_of(tmp_path: Path, text: str, *overrides: str) -> Setting:
    return run_of(tmp_path, text, *overrides)[0]


def played(tmp_path: Path, text: str, *overrides: str, hours: float = 1.0, seed: int = 0) -> Outcome:
    scene, config = run_of(tmp_path, text, *overrides)
    churn = weather(load_fleet(tmp_path / "fleet.toml").churn, tmp_path)
    return simulate_fleet(scene, config, churn, hours=hours, seed=seed)
