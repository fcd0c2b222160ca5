"""Run a real local fleet (processes, sockets, DHT) to its end, for tests and benchmarks."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import safetensors.torch

from muletrain.events import EventTail, Note, StepDone
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.folder import latest_checkpoint
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.spec import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    import torch

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event


def run_fleet(
    config: RunConfig,
    folder: Path,
    *,
    threads: int = 1,
    timeout_s: float = 600.0,
    watch: Callable[[LocalFleet, Event], None] = lambda fleet, event: None,
    lost: Collection[str] = (),
    tick: Callable[[LocalFleet], None] = lambda fleet: None,
    stages: tuple[int, ...] | None = None,
    wrap: Callable[[str], list[str]] = lambda name: [],
    each: Callable[[str], dict[str, Any]] = lambda name: {},
) -> list[Event]:
    """All events. Raises AssertionError when a peer failed or the run took longer than ``timeout_s``.

    ``watch`` sees every event, ``tick`` is called some 50 times a second. ``lost``: peers that they kill or remove.
    With clients, the processes are those of the peers and then the clients'. ``stages``: which stage each peer serves,
    in order of their names; default: as the admission chooses. ``wrap``: see
    ``LocalFleet``. ``each``: what else a peer's ``WorkerSpec`` says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config.local()
    names = [f"peer-{i}" for i in range(config.fleet.local_peers)]
    names += (clients := [f"client-{i}" for i in range(config.hub.clients or 0)])
    tail, events = EventTail(folder), []
    deadline = time.monotonic() + timeout_s

    def poll() -> None:
        for event in tail.poll():
            events.append(event)
            watch(fleet, event)
        tick(fleet)
        assert time.monotonic() < deadline, f"not finished after {timeout_s} s"

    with LocalFleet(folder, threads, wrap) as fleet:
        fleet.spawn(names)
        common = {
            "folder": str(folder),
            "data": "config",
            "threads": threads,
            "precision": config.compute.precision.value,
            "device": config.compute.device,
            "listen": config.network.listen,
        }
        founder = str(Ticket.new_run(folder))
        fleet.begin(
            WorkerSpec(
                role="found",
                name=names[0],
                ticket=founder,
                config=config.model_dump_json(by_alias=True),
                fleet_index=0,
                stage=stages[0] if stages else None,
                **common | each(names[0]),
            )
        )
        ticket = str(fleet.wait_for_ticket(names[0], poll))
        for index, name in enumerate(names[1:], start=1):
            stage = stages[index] if stages else None
            spec = common | ({"client": True} if name in clients else {}) | each(name)
            fleet.begin(WorkerSpec(role="join", name=name, ticket=ticket, fleet_index=index, stage=stage, **spec))
        while fleet.alive():
            poll()
            time.sleep(0.02)
        poll()
        failed = [
            f"{e.peer}: {e.message}"
            for e in events
            if e.peer not in lost and isinstance(e, Note) and e.level == "error"
        ]
        assert not failed, failed
        codes = {name: code for name, code in fleet.exit_codes().items() if name not in lost}
        assert set(codes.values()) == {0}, codes
    return events


def checkpoint_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights by name from the newest checkpoint's parts."""
    checkpoint = latest_checkpoint(folder)
    weights = {}
    for part in json.loads((checkpoint / "manifest.json").read_text())["parts"]:
        for name, tensor in safetensors.torch.load_file(checkpoint / part["file"]).items():
            if name.startswith("model/"):
                weights[name.removeprefix("model/")] = tensor
    return weights


def run_losing_a_replica(config: RunConfig, folder: Path) -> list[Event]:
    """Run two stages of two peers each, and kill peer-3 after step 7."""
    killed: list[Event] = []

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 7 and not killed:
            os.killpg(fleet.pid("peer-3"), signal.SIGKILL)
            killed.append(event)

    events = run_fleet(config, folder, watch=watch, lost=frozenset({"peer-3"}))
    assert killed
    return events
