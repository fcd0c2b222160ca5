"""The papers' tables and figures beside what our models compute: a module per subject, ``baselines`` for the systems
that the papers compare with, ``rendering`` for Markdown and pictures.

Every reproduction tells which of its numbers are calibration (fitted to what they are compared with) and which are
predictions. Fits are made here each time, by least squares; no fitted constant is written down.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from reproduction.reproduction import Reproduction

INDEX = {
    "swarm-table1": ("swarm_utilisation", "table_1", "how busy a GPU is by model and latency, at 500 Mb/s"),
    "swarm-table2": ("swarm_systems", "table_2", "SWARM, GPipe, 1F1B and ZeRO-Offload, with and without latency"),
    "swarm-table3": (
        "swarm_scaling",
        "tables_3_and_4",
        "throughput of T4, A100 and both, with and without shared layers",
    ),
    "swarm-table5": (
        "swarm_rebalancing",
        "table_5",
        "throughput kept by rebalancing over 32 hours of preemptions; ours beside it",
    ),
    "swarm-table6": ("swarm_utilisation", "table_6", "parameters and FLOP of four layers"),
    "swarm-fig3": ("swarm_utilisation", "figure_3", "computing and idle time of a batch; when tensor parallelism pays"),
    "swarm-fig5": ("swarm_rebalancing", "figure_5", "throughput over the 32 hours"),
    "swarm-fig6": ("swarm_scaling", "figure_6", "throughput from 8 to 128 nodes"),
    "swarm-fig7": ("swarm_rebalancing", "figure_7", "rebalancing with 4 to 32 stages"),
    "atom": ("atom", "reproduce", "how many minibatches hide swapping; up to 20 x over GPipe"),
    "dtfm": ("dtfm_networks", "reproduce", "placements and steps on five networks, by four ways to place"),
    "hybrid-table2": ("hybrid", "table_2", "minutes a batch of four systems in four cases"),
}
"""Name -> module, function, what it shows."""


def reproduce(name: str) -> Reproduction:
    """Reproduce one table or figure. Raises ConfigError for an unknown name."""
    if name not in INDEX:
        raise ConfigError(f"no reproduction {name!r}; there are {', '.join(INDEX)}")
    module, function, _ = INDEX[name]
    found: Reproduction = getattr(import_module(f"reproduction.{module}"), function)()
    return found
