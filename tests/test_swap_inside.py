"""Blocks cut inside: the same numbers in less memory than two blocks need, or one (ATOM sec. III-C)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.compute.swap.fit import blocks_of, swap_memory
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision
from muletrain.model.spec import ModelSpec

from .small_stages import run
from .swapped_stages import ADAMW, LAMB, SEQUENCES, Made, stages_in, train
from .test_swap import check_same_training, states, worst

if TYPE_CHECKING:
    from muletrain.config.schema import OptimizerConfig

made = pytest.fixture(stages_in)
SPEC = ModelSpec.from_config(
    ModelConfig(layers=3, width=64, heads=8, kv_heads=4, ffn=512, vocab=61, context=16, dropout=0.2)
)


def test_first(made: Made) -> None:
    need = swap_memory(SPEC, SPEC.cut(1), 0, 32, Precision.FP32, microbatches=4, lamb=False, disk=True)
    for f in need.finer:
        print(f)
    print(need.least, need.beside)
    for f in need.finer:
        (swapped,) = made.swapped(1, SPEC, budget=f.least, optimizer=ADAMW)
        print(f.inside, len(swapped.plan.runs))
        check_same_training(made.resident(1, SPEC, optimizer=ADAMW), [swapped], loss=1e-4, tensor=1e-5)
