"""The output of ``muletrain profile --json``: measured time and memory of each block of a model on a device.

``muletrain plan --profile`` reads this file. Times are medians in seconds, sizes in bytes, all of one microbatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from muletrain.config.load import read_output
from muletrain.config.section import Section
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1


class BlockCost(Section):
    """Equal parts of a chain, of which one was measured."""

    first: int = Field(ge=0, description="the measured part: 0 is what comes before the first block")
    parts: tuple[int, ...] = Field(min_length=1, description="all parts that are equal to it, itself included")
    name: str = Field(description="'embedding', 'block 0', 'head'")
    forward_s: float = Field(gt=0, description="forward; of the head with the loss [s]")
    backward_s: float = Field(ge=0, description="backward, gradients of weights and inputs [s]")
    load_s: float = Field(gt=0, description="copy of the weights from the machine's memory to the device [s]")
    parameter_bytes: int = Field(ge=0, description="weights in the working precision [bytes]")
    activation_bytes: int = Field(
        ge=0, description="what autograd keeps from forward to backward, inputs included [bytes]"
    )
    workspace_bytes: int = Field(
        ge=0, description="peak of memory beyond weights and activations: outputs, temporaries, gradients [bytes]"
    )

    @property
    def both_s(self) -> float:
        """Forward and backward [s]."""
        return self.forward_s + self.backward_s


class Profile(Section):
    """The blocks of a model on a device."""

    version: int = Field(description="version of this format")
    model: str = Field(description="digest of the chain and of the sequence length")
    title: str = Field(description="what the user called the model")
    device: str = Field(description="chip, as in a fleet file", examples=["NVIDIA T4", "cpu"])
    precision: str = Field(description="'fp32', 'bf16' or 'fp16'")
    sequences: int = Field(gt=0, description="size of the microbatch [sequences, or samples]")
    context: int = Field(gt=0, description="their length [tokens]; 1 for samples that are no text")
    params: int = Field(ge=0, description="size of the whole model [parameters]")
    versions: dict[str, str] = Field(description="software, and the number of threads on a CPU")
    passes: int = Field(gt=0, description="fewest passes over a block that a median is of")
    blocks: tuple[BlockCost, ...] = Field(min_length=1)

    @property
    def total_s(self) -> float:
        """Forward and backward of a microbatch through the whole model [s]."""
        return sum(len(block.parts) * block.both_s for block in self.blocks)

    def by_part(self) -> list[BlockCost]:
        """The cost of each part of the chain, in order. Raises ConfigError if a part is missing or there twice."""
        found = {part: block for block in self.blocks for part in block.parts}
        count = sum(len(block.parts) for block in self.blocks)
        if found.keys() != set(range(count)):
            raise ConfigError(f"the profile of {self.title} does not name each part of the chain once; measure again")
        return [found[part] for part in range(count)]


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises ConfigError."""
    return read_output(path, Profile, "profile MODEL", VERSION)
