"""Records the messages of one step of a run in a virtual world of the production code: ``python scripts/sequence.py``
writes ``docs/assets/sequence.json``, which ``pictures.py`` draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from muletrain.network.memory import MemoryNetwork, loop_time_s
from proofs.injection import kind_of
from proofs.play import play
from proofs.scenario import Scenario

STEP = 2
"""Deadlines are measured by then."""
PATH = Path(__file__).resolve().parents[1] / "docs" / "assets" / "sequence.json"


def record() -> list[dict[str, Any]]:
    """The frames of step ``STEP`` between peers: seconds since the first, sender, receiver, kind, microbatch."""
    found: list[dict[str, Any]] = []
    sends = MemoryNetwork.send

    async def send(self: MemoryNetwork, peer: str, frame: Any, **how: Any) -> int:
        if getattr(frame.message, "step", None) == STEP and peer != self.peer_id:
            index = getattr(frame.message, "index", None)
            found.append({"s": loop_time_s(), "from": self.peer_id, "to": peer, "kind": kind_of(frame), "index": index})
        return await sends(self, peer, frame, **how)

    MemoryNetwork.send = send  # type: ignore[method-assign]
    try:
        outcome = play(Scenario(2, (2, 2), 1, STEP + 2, 4, 0.005, ()))
    finally:
        MemoryNetwork.send = sends  # type: ignore[method-assign]
    assert not outcome.violations
    return [{**m, "s": round(m["s"] - found[0]["s"], 3)} for m in found]


if __name__ == "__main__":
    PATH.write_text(json.dumps(record(), indent=0) + "\n", encoding="utf-8")
