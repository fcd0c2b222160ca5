"""The catalogue of devices: names that people and ``torch`` write, sources, and estimates of what is not in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from muletrain.compute import probe
from muletrain.planning.devices import DEVICES, estimated, find_device
from muletrain.sim.machine import device_of


def test_every_device_has_a_source_and_is_found_by_the_names_people_write() -> None:
    assert all(d.source and d.flops > 0 and d.memory_bytes > 0 for d in DEVICES)
    for written, name in (
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100 SXM5", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Apple M2 Max", "M2 Max"),
        ("M4", "M4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080"),
        ("gtx1080ti", "GTX 1080 Ti"),
        ("A100-SXM4", "A100"),
    ):
        device = find_device(written)
        assert device is not None, written
        assert device.name == name
    large = find_device("NVIDIA A100 80GB PCIe")
    assert large is not None
    assert large.memory_bytes == 80 * 2**30
    assert find_device("RTX 9999") is None
    assert find_device("NVIDIA GeForce RTX 4090 Laptop GPU") is None, "far slower than the card of that name"


def test_a_device_of_an_unknown_name_is_estimated_from_what_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of known ones the estimate is near: 114 and 132 multiprocessors of an H100, 128 of an RTX 4090."""
    for name, processors, hz, capability in (
        ("H100", 132, 1.83e9, (9, 0)),
        ("RTX 4090", 128, 2.52e9, (8, 9)),
        ("A30", 56, 1.44e9, (8, 0)),
        ("GTX 1080", 20, 1.73e9, (6, 1)),
    ):
        known = find_device(name)
        assert known is not None
        found = estimated("other", processors, hz, 8 << 30, capability)
        assert found.estimate
        assert found.flops == pytest.approx(known.flops, rel=0.05)
    assert estimated("other", 132, 0.0, 8 << 30, (9, 0)).source.startswith(
        "estimated from 132 multiprocessors at 1.50 GHz"
    )
    properties = SimpleNamespace(
        name="RTX 9999", multi_processor_count=100, clock_rate=2_000_000, total_memory=32 << 30, major=13, minor=0
    )
    monkeypatch.setattr(probe, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 9999")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device_of.cache_clear()
    found_here = device_of("rtx 9999")
    device_of.cache_clear()
    assert found_here is not None
    assert (found_here.memory_bytes, found_here.estimate) == (32 << 30, True)
    properties = SimpleNamespace(
        name="RX 9999", multi_processor_count=96, clock_rate=2_500_000, total_memory=24 << 30, major=11, minor=0
    )
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = probe.reported(torch.device("cuda"))
    assert 30e12 < found.flops < 50e12, "an AMD chip of generation 11 is none of CUDA's after 10"
