"""A tiny model and a fleet of five machines in two regions, to plan for."""

from __future__ import annotations

FLEET = """
[[machines]]
name = "near"
count = 3
region = "x"
tflops = 0.02
memory_gib = 1.0
price_per_hour = 0.5
[[machines]]
name = "far"
count = 2
region = "y"
tflops = 0.03
memory_gib = 1.0
price_per_hour = 1.0
up_mbps = 200
down_mbps = 200
[defaults]
rtt_ms = 60
bandwidth_mbps = 100
"""

TINY = (
    "model.width=256",
    "model.heads=4",
    "model.layers=4",
    "model.context=512",
    "model.vocab=512",
    "checkpoint.every=0",
    "train.microbatch=1",
    "fleet.rebalance_period=20",
)
