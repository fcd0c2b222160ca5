"""Costs of real runs that no fleet file states, as TOML. ``simulate calibrate`` writes this file,
``simulate fleet --costs`` reads the costs."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pydantic import Field

from muletrain.config.dump import WIDTH, dump_toml
from muletrain.config.load import load_toml
from muletrain.config.section import Section

if TYPE_CHECKING:
    from pathlib import Path


class DeviceSpeed(Section):
    """Measured speed of a device."""

    device: str = Field(description="name, as in a fleet file", examples=["NVIDIA T4"])
    tflops: float = Field(gt=0, description="sustained speed, recomputed forwards included [TFLOP/s]")


class Costs(Section):
    """Costs measured in real runs; 0: not measured."""

    runs: tuple[str, ...] = Field(default=(), description="run folders of the measurement")
    call_ms: float = Field(
        default=0.0,
        ge=0,
        description="time of a forward or backward beyond forward_ms or backward_ms of a fleet file [ms]",
    )
    hop_ms: float = Field(
        default=0.0,
        ge=0,
        description="time of a message beyond the link: encoding, network stack, decoding [ms]",
    )
    ending_ms: float = Field(
        default=0.0,
        ge=0,
        description="time of the end of a step beyond its messages: sealing, reducing, hashing, applying [ms]",
    )
    stage_params: int = Field(
        default=0,
        ge=0,
        description="largest stage of the measurement; ending_ms applies to stages of that size [parameters]",
    )
    devices: tuple[DeviceSpeed, ...] = Field(default=(), description="speeds, which override the catalogue")


def load_costs(path: Path) -> Costs:
    """Raises ConfigError."""
    return load_toml(Costs, path)


def explained(costs: Costs) -> str:
    """``dump_toml`` with the meaning of each field."""
    lines = ["# measured by 'muletrain simulate calibrate', for 'muletrain simulate fleet --costs'"]
    for line in dump_toml(costs).splitlines():
        field = Costs.model_fields.get(line.partition(" = ")[0])
        about = "" if field is None else field.description or ""
        lines += [*textwrap.wrap(about, WIDTH, initial_indent="# ", subsequent_indent="# "), line]
    return "\n".join(lines) + "\n"
