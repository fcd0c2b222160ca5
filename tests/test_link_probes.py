"""Links measured on a virtual clock: what is shaped is found, and nobody measures for just anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muletrain.clock import LoopClock
from muletrain.compute.estimate import Offer
from muletrain.config.fleet_file import Fleet, load_fleet
from muletrain.config.model_sections import ModelConfig
from muletrain.errors import Malformed, Refused
from muletrain.events import Event, FleetMeasured, Note, ProbeProgress
from muletrain.model.spec import ModelSpec
from muletrain.network.base import Network
from muletrain.network.memory import MemoryHub
from muletrain.network.shaped import ShapedNetwork
from muletrain.runs.join.messages import Ready
from muletrain.runs.measure import fleet_survey as survey
from muletrain.runs.measure.probing import (
    MOST,
    PIECES,
    AskLink,
    BlockFound,
    Echo,
    Prober,
    identity_of,
)
from muletrain.wire.codec import encode_raw
from muletrain.wire.frame import Frame
from tests.newcomers import introduction, rendezvous_of
from tests.virtual import virtually

SPEC = ModelSpec.from_config(ModelConfig(layers=2, width=32, heads=2, vocab=512, context=16))
PROFILE = """
[[machines]]
name = "peer"
count = 2
region = "lab"
[[machines]]
name = "peer-2"
region = "home"
up_mbps = 8
down_mbps = 32
[defaults]
rtt_ms = 60
bandwidth_mbps = 50
local_rtt_ms = 10
local_bandwidth_mbps = 100
"""


def found_block(machine: bytes = bytes(32), **changes: Any) -> BlockFound:
    fine = {"forward_s": 0.001, "backward_s": 0.002, "sequences": 2, "chip": "cpu", "machine": machine, "disk": 10**9}
    return BlockFound.model_validate({**fine, **changes})


class Lab:
    """Members on shaped links, in memory. The first one founds."""

    def __init__(self, fleet: Fleet, folder: Path, *, together: bool = False) -> None:
        """``together``: the first two are peers of one machine."""
        self.fleet, self.events = fleet, list[Event]()
        self.hub, self.names = MemoryHub(), [peer.name for peer in fleet.peers()]
        twins = self.names[:2] if together else []
        self.blocks = {n: found_block(identity_of("run", "twin" if n in twins else n)) for n in self.names}
        self.nets: dict[str, Network] = {}
        self.probers: dict[str, Prober] = {}
        for index, name in enumerate(self.names):
            net = self.hub.join(name)
            shaped = ShapedNetwork(net, self._links(index), fleet.peers()[index])
            self.nets[name] = net
            self.probers[name] = Prober(
                net, shaped, self.names[0], LoopClock(), lambda names: None, lambda name=name: self.blocks[name]
            )  # type: ignore[misc]
            self.probers[name].open()
        self.survey = survey.Survey(
            net=self.nets[self.names[0]],
            emit=self.events.append,
            spec=SPEC,
            sequences=2,
            folder=folder,
            people=lambda: {name: (name, Offer(2**30)) for name in self.names},
            clock=LoopClock(),
        )

    def _links(self, index: int) -> Callable[[str], Any]:
        return lambda peer: self.fleet.link(index, self.names.index(peer))

    def last(self) -> Event:
        return self.events[-1]


def fleet_from(text: str, folder: Path) -> Fleet:
    (folder / "given.toml").write_text(text)
    return load_fleet(folder / "given.toml")


WORLD = """
[[machines]]
name = "near"
count = 3
region = "a"
[[machines]]
name = "home"
region = "b"
up_mbps = 1.5
down_mbps = 16
[[machines]]
name = "far"
region = "c"
up_mbps = 500
[defaults]
rtt_ms = 250
bandwidth_mbps = 900
local_rtt_ms = 0.4
local_bandwidth_mbps = 8000
"""


def test_shaped_links_are_found(tmp_path: Path) -> None:
    fleet = fleet_from(WORLD, tmp_path)

    async def scenario() -> None:
        await Lab(fleet, tmp_path).survey.measure()

    virtually(scenario())
    found = load_fleet(tmp_path / "fleet.toml")
    assert [p.name for p in found.peers()] == sorted(p.name for p in fleet.peers())
    index = {p.name: p.index for p in fleet.peers()}
    for a in found.peers():
        for b in found.peers():
            if a.name != b.name:
                is_, was = found.link(a.index, b.index), fleet.link(index[a.name], index[b.name])
                assert is_.bandwidth_bytes_per_s == pytest.approx(was.bandwidth_bytes_per_s, rel=0.05), (a.name, b.name)
                assert is_.delay_s == pytest.approx(was.delay_s, rel=0.05, abs=2e-3), (
                    "2 ms: a few bytes take that at 1.5 Mb/s"
                )


def test_peers_of_one_machine_share_its_links(tmp_path: Path) -> None:
    fleet = fleet_from(PROFILE, tmp_path)

    async def scenario() -> Lab:
        lab = Lab(fleet, tmp_path, together=True)
        await lab.survey.measure()
        return lab

    lab = virtually(scenario())
    found = load_fleet(tmp_path / "fleet.toml")
    assert found.matrix.regions == ("@peer-0", "@peer-2")
    assert found.link(0, 1).bandwidth_bytes_per_s == pytest.approx(100e6 / 8, rel=0.05)
    assert found.link(0, 2) == found.link(1, 2)
    done = [e for e in lab.events if isinstance(e, ProbeProgress)]
    assert [e.done for e in done] == [0, 1, 2], "within the machine, then between the two"


def test_who_gives_no_answer_or_none_that_can_be_is_left_out(tmp_path: Path) -> None:
    fleet = fleet_from(WORLD, tmp_path)

    async def scenario() -> Lab:
        lab = Lab(fleet, tmp_path)
        lab.blocks["near-1"] = found_block(b"1" * 32, forward_s=1e-12, backward_s=1e-12)
        lab.probers["near-2"].close()
        await lab.survey.measure()
        return lab

    lab = virtually(scenario())
    measured = lab.last()
    assert isinstance(measured, FleetMeasured)
    assert measured.peers == ["far", "home", "near-0"]
    assert [line.split()[0] for line in measured.lacking] == ["near-1", "near-2"]
    warnings = " ".join(e.message for e in lab.events if isinstance(e, Note))
    assert "FLOP/s" in warnings
    assert "the run has begun" in warnings
    assert f"# {measured.lacking[0]}" in (tmp_path / "fleet.toml").read_text()


def test_who_stops_answering_does_not_hold_the_others_up(tmp_path: Path) -> None:
    """Its frames arrive nowhere: that takes a while to notice, twice and never again."""
    fleet = fleet_from('machines = [{ name = "x", count = 8, up_mbps = 100 }]\n', tmp_path)

    async def scenario() -> tuple[Lab, float]:
        lab = Lab(fleet, tmp_path)
        lab.probers["x-7"]._begun = True  # it echoes nothing
        lab.blocks["x-7"] = found_block(b"7" * 32)
        lab.probers["x-7"]._check = lambda sender: None  # type: ignore[method-assign]
        clock = LoopClock()
        begin = clock.now()
        await lab.survey.measure()
        return lab, clock.now() - begin

    lab, took_s = virtually(scenario())
    measured = lab.last()
    assert isinstance(measured, FleetMeasured)
    assert any(line.startswith("nothing arrived from x-0 at x-7") for line in measured.lacking)
    assert took_s < 200
    found = load_fleet(tmp_path / "fleet.toml")
    assert found.link(0, 1).bandwidth_bytes_per_s == pytest.approx(100e6 / 8, rel=0.05)


def test_only_the_founder_has_others_measure_and_only_before_the_run(tmp_path: Path) -> None:
    fleet = fleet_from(PROFILE, tmp_path)

    async def scenario() -> None:
        lab = Lab(fleet, tmp_path)
        founder, a, b = lab.names
        ask = AskLink(to=b, seconds=0.1).pack()
        before = lab.hub.peers[a].counters.sent.total()
        with pytest.raises(Refused, match="first peer"):
            await lab.nets[b].call(a, AskLink.KIND, ask, timeout_s=60)
        assert lab.hub.peers[a].counters.sent.total() == before
        await lab.nets[founder].call(a, AskLink.KIND, ask, timeout_s=60)
        lab.probers[a].close()
        with pytest.raises(Refused, match="begun"):
            await lab.nets[founder].call(a, AskLink.KIND, ask, timeout_s=60)

    virtually(scenario())


def test_a_link_costs_a_bounded_number_of_bytes_and_echoes_are_small(tmp_path: Path) -> None:
    fleet = fleet_from('machines = [{ name = "x", count = 2 }]\n', tmp_path)  # nothing limits it

    async def scenario() -> None:
        lab = Lab(fleet, tmp_path)
        await lab.survey.measure()
        for name in lab.names:
            sent = lab.hub.peers[name].counters.sent
            total = sum(n for (_, kind), n in sent.items() if kind == "probe.echo")
            assert MOST <= total < 2.2 * MOST, "its pieces, and its answers to the other's"
        huge = Echo(number=1).frame([encode_raw(bytes(MOST // PIECES + 1))])
        with pytest.raises(Malformed):
            await lab.probers["x-0"].expect("x-1", huge)

    virtually(scenario())


def test_other_frames_wait_for_the_run_while_probes_are_answered() -> None:
    async def scenario() -> list[str]:
        hub, got = MemoryHub(), list[str]()
        a, b = hub.join("a"), hub.join("b")

        def heard(name: str) -> Callable[[str, Frame], Any]:
            async def handler(sender: str, frame: Frame) -> None:
                got.append(f"{name}: {frame.kind}")

            return handler

        b.receive(heard("probes"), ("probe.echo",))
        await a.send("b", Frame("probe.echo", {}))
        await asyncio.sleep(1)
        await a.send("b", Frame("forward", {}))
        await asyncio.sleep(1)
        assert got == ["probes: probe.echo"]
        b.receive(heard("run"))
        await asyncio.sleep(1)
        return got

    assert virtually(scenario()) == ["probes: probe.echo", "run: forward"]


def test_the_run_begins_after_it_is_measured_and_without_who_left_meanwhile() -> None:
    async def scenario() -> None:
        own = rendezvous_of(MemoryHub().join("founder"), [1], expected=1)
        own.open()
        own.seat("founder", introduction("founder"))
        own.ready("founder", Ready(trainer=True, place=""))
        asked = 0

        async def settled() -> bool:
            nonlocal asked
            asked += 1
            if asked == 1:
                own.seat("late", introduction("late"))  # it came while others were measured, and has gone
            return asked == 1

        genesis = await own.gather(settled)
        assert asked == 2
        assert [m.id for m in genesis.members] == ["founder"]

    virtually(scenario())
