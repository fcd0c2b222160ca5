"""A peer as in production whose calls are timed: started in place of ``muletrain.runs.worker``. Its links are the
machine's own, not emulated ones, for the fleet's profile is there for the pace of its compute."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from timed import Call, TimedNetwork, call_in_turn

from muletrain.network.base import Network
from muletrain.runs import worker
from muletrain.runs.assemble import RunFacts
from muletrain.runs.host import Host


def links(self: Host, facts: RunFacts, network: Network) -> Any:
    if not hasattr(self, "timed"):
        file = (Path(self.spec.folder) / f"{self.spec.name}.calls").open("a", buffering=1)

        def record(call: Call) -> None:
            file.write(json.dumps(asdict(call)) + "\n")

        self.timed = TimedNetwork(network, time.time, record)
    if self.roster is not None:  # training begins
        roster = self.roster
        self.calling = asyncio.create_task(call_in_turn(self.timed, self.clock, lambda: [p for p in roster.others()]))
    return self.timed


if __name__ == "__main__":
    Host.links = links  # type: ignore[method-assign]
    worker.main()
