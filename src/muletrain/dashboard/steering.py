"""Stops a run or removes a peer for the run's owner: a stop by a file, which the run's command looks for; a removal by the
command ``muletrain kick``, which checks the key."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

from muletrain.dashboard.sources import steering_root
from muletrain.runs.here import ask_command
from muletrain.runs.worker_files import OWNER_FILE, TICKET_FILE

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 90.0
"""Longest wait for a command."""
ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{8,128}")
"""A peer's id; nothing else is passed on, above all no option."""


class Done(NamedTuple):
    """The result of an action."""

    ok: bool
    text: str


REFUSED = Done(False, "only the machine that began the run can do that, while the run goes on")


async def steer(folder: Path, action: str, peer_id: str) -> Done:
    """``action``: 'stop', or 'kick' for the peer ``peer_id``. Works only where the owner's key is."""
    if action == "stop":
        return await _stop(folder) if (folder / OWNER_FILE).exists() else REFUSED
    if action != "kick" or not ID.fullmatch(peer_id):
        return Done(False, "no such action")
    root = steering_root(folder)
    if root is None or not (folder / OWNER_FILE).exists() or not (folder / TICKET_FILE).exists():
        return REFUSED
    ticket = (folder / TICKET_FILE).read_text(encoding="utf-8").strip()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "muletrain", "kick", peer_id),
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


async def _stop(folder: Path) -> Done:
    """Ask the command that trains the run."""
    answer = await asyncio.to_thread(ask_command, folder)
    if answer == "silent":
        return Done(
            False, "the run's command does not answer; where it has ended, 'muletrain stop' asks the other members"
        )
    return Done(
        True, "the run ends after the current step, with a checkpoint" if answer == "taken" else "the run has ended"
    )
