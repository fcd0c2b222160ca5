"""Peers over real daemons that die, freeze or close: noticed quickly, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from muletrain.errors import (
    DeadlineExceeded,
    MuletrainError,
    NetworkError,
    PeerUnreachable,
)
from muletrain.network.base import Channel
from muletrain.wire.codec import encode_raw
from muletrain.wire.frame import Frame
from tests.daemons import child, world
from tests.polling import poll, repeat

pytestmark = pytest.mark.alone


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_peer_is_unreachable_quickly_and_can_come_back() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            home = w.folder / "child"
            with child(home) as (process, address, daemon):
                peer = await a.connect([address], timeout_s=10)
                await a.send(peer, Frame("x", {}))
                assert await a.call(peer, "echo", b"1", timeout_s=10) == b"1"
                lost: list[tuple[str, Channel]] = []
                a.on_lost(lambda *stream: lost.append(stream))
                process.kill()
                begin = time.monotonic()
                await poll(lambda: lost)  # before anything is sent to it
                assert lost == [(peer, Channel.PIPE)]
                await poll(lambda: not runs(daemon))  # nothing of it is left behind
                for attempt in (
                    lambda: a.send(peer, Frame("x", {}), timeout_s=10),
                    lambda: a.call(peer, "echo", b"", timeout_s=10),
                ):
                    with pytest.raises(PeerUnreachable):
                        await attempt()
                assert time.monotonic() - begin < 3
            with child(home) as (_, address, _):  # the same identity; it does not know us any more
                assert await a.connect([address], timeout_s=20) == peer
                assert await a.call(peer, "echo", b"2", timeout_s=10) == b"2"
                assert await a.send(peer, Frame("x", {}), timeout_s=10) > 0

    asyncio.run(scenario())


def sockets() -> int:
    """Open in this process."""
    found = 0
    for fd in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found += stat.S_ISSOCK(os.fstat(int(fd)).st_mode)
    return found


def test_who_cannot_be_reached_costs_no_socket() -> None:
    """Refused, or given up while the daemon dials: no socket waits until errors, which hold what they came from, are
    collected."""

    async def scenario() -> None:
        kept: list[object] = []
        async with world() as w:
            a = await w.open()
            with child(w.folder / "child") as (process, address, daemon):
                peer = await a.connect([address], timeout_s=10)
                await a.send(peer, Frame("x", {"n": 0}))
                os.kill(daemon, signal.SIGSTOP)
                await a.p2p.hang_up(peer)
                before = sockets()
                for _ in range(5):
                    await a.p2p.hang_up(peer)  # it may have been dialling us when it stopped
                    with pytest.raises(DeadlineExceeded) as error:
                        await a.send(peer, Frame("x", {"n": 1}), timeout_s=0.1)
                    kept.append(error)
                for pid in (process.pid, daemon):
                    os.kill(pid, signal.SIGKILL)
                for _ in range(20):
                    with pytest.raises(PeerUnreachable) as error:
                        await a.send(peer, Frame("x", {"n": 2}), timeout_s=30)
                    kept.append(error)
                await poll(lambda: sockets() <= before)

    asyncio.run(scenario())


def test_a_frozen_peer_misses_deadlines_and_nothing_else() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            with child(w.folder / "child") as (process, address, daemon):
                peer = await a.connect([address], timeout_s=10)
                await a.send(peer, Frame("x", {}))
                for pid in (process.pid, daemon):
                    os.kill(pid, signal.SIGSTOP)
                with pytest.raises(DeadlineExceeded):
                    await a.call(peer, "echo", b"", timeout_s=0.5)
                big = Frame("x", {}, [encode_raw(bytes(8 << 20))])
                begin = time.monotonic()
                with pytest.raises(DeadlineExceeded):
                    await repeat(8, lambda n: a.send(peer, big, timeout_s=0.5))
                assert time.monotonic() - begin < 5
                for pid in (process.pid, daemon):
                    os.kill(pid, signal.SIGCONT)
                assert await a.call(peer, "echo", b"on", timeout_s=10) == b"on"
                await a.send(peer, Frame("x", {}), timeout_s=10)

    asyncio.run(scenario())


def test_close_leaves_no_process_and_no_socket() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            await b.send(a.peer_id, Frame("x", {"n": 0}))
            await w.next(a)
            pids: list[int] = [n.p2p.daemon.pid for n in (a, b)]
            assert all(map(runs, pids))
            for net in (a, b, a):
                await net.close()
            assert not any(map(runs, pids))
            assert sorted(p.name for p in w.folder.rglob("*") if not p.is_dir()) == ["identity", "identity"]
            await poll(
                lambda: all(t.done() or "sleep" in str(t.get_coro()) for t in others())
            )  # hivemind's bootstrap timer

    def others() -> set[Any]:
        return {t for t in asyncio.all_tasks() if "scenario" not in str(t.get_coro())}

    asyncio.run(scenario())


def test_a_dead_daemon_of_ours_is_no_fault_of_others() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            os.kill(a.p2p.daemon.pid, signal.SIGKILL)
            await a.p2p.daemon.wait()
            with pytest.raises(MuletrainError, match=r"daemon .* has ended with code -9") as caught:
                await a.call(b.peer_id, "echo", b"", timeout_s=5)
            assert not isinstance(caught.value, NetworkError)

    asyncio.run(scenario())
