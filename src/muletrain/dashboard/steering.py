"""Stops a run or removes a peer for the run's owner: by the commands ``muletrain stop`` and ``kick``, which check the key."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

from muletrain.dashboard.sources import steering_root
from muletrain.runs.worker_files import OWNER_FILE, TICKET_FILE

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 90.0
"""Longest wait for a command."""
ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{8,128}")
"""A peer's id; nothing else is passed on, above all no option."""


class Done(NamedTuple):
    """The result of a command."""

    ok: bool
    text: str


async def steer(folder: Path, action: str, peer_id: str) -> Done:
    """``action``: 'stop', or 'kick' for the peer ``peer_id``. Works only where the owner's key is."""
    root = steering_root(folder)
    if action not in ("stop", "kick") or (action == "kick" and not ID.fullmatch(peer_id)):
        return Done(False, "no such action")
    if root is None or not (folder / OWNER_FILE).exists() or not (folder / TICKET_FILE).exists():
        return Done(False, "only the machine that began the run can do that, while the run goes on")
    ticket = (folder / TICKET_FILE).read_text(encoding="utf-8").strip()
    words = [sys.executable, "-P", "-m", "muletrain", action, *([peer_id] if action == "kick" else [])]
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=root,
        env={**os.environ, "MULETRAIN_TICKET": ticket},  # other users can read arguments
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        process.kill()
        return Done(False, f"no answer within {TIMEOUT_S:.0f} s")
    told = [line for line in out.decode(errors="replace").splitlines() if "muletrain join" not in line]
    return Done(process.returncode == 0, "\n".join(told)[-2000:].strip())  # the new ticket stays in the run folder
