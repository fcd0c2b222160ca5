"""What real runs take beside what a fleet file says, as TOML: ``simulate calibrate`` writes it, ``simulate fleet
--costs`` reads it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pydantic import Field

from muletrain.config.dump import WIDTH, dump_toml
from muletrain.config.load import load_toml
from muletrain.config.schema import Section

if TYPE_CHECKING:
    from pathlib import Path


class DeviceSpeed(Section):
    """What a device got out of the stages it served."""

    device: str = Field(description="name, as in a fleet file", examples=["NVIDIA T4"])
    tflops: float = Field(gt=0, description="sustained speed, recomputed forwards included [TFLOP/s]")


class Costs(Section):
    """Measured in real runs. Nothing is fitted where it is 0."""

    runs: tuple[str, ...] = Field(default=(), description="run folders that it was measured in")
    call_ms: float = Field(
        default=0.0,
        ge=0,
        description="a forward or backward beyond forward_ms or backward_ms, where a fleet file has them [ms]",
    )
    hop_ms: float = Field(
        default=0.0,
        ge=0,
        description="a message from one peer to another beyond what the link takes: encoding, the stack, decoding [ms]",
    )
    ending_ms: float = Field(
        default=0.0,
        ge=0,
        description="the end of a step beyond its messages: sealing, reducing, hashing, applying [ms]",
    )
    stage_params: int = Field(
        default=0,
        ge=0,
        description="the largest stage it was measured with: ending_ms is for stages of that size [parameters]",
    )
    devices: tuple[DeviceSpeed, ...] = Field(default=(), description="speeds, before those of the catalogue")


def load_costs(path: Path) -> Costs:
    """Raises ConfigError."""
    return load_toml(Costs, path)


def explained(costs: Costs) -> str:
    """``dump_toml`` with what each field means."""
    lines = ["# measured by 'muletrain simulate calibrate', for 'muletrain simulate fleet --costs'"]
    for line in dump_toml(costs).splitlines():
        field = Costs.model_fields.get(line.partition(" = ")[0])
        about = "" if field is None else field.description or ""
        lines += [*textwrap.wrap(about, WIDTH, initial_indent="# ", subsequent_indent="# "), line]
    return "\n".join(lines) + "\n"
