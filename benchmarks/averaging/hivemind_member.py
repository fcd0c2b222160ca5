"""The same vector through ``hivemind.DecentralizedAverager``: ``python hivemind_member.py RANK FOLDER``. Prints seconds
per round."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

SIZE, ROUNDS, WARM_UP = 25_000_000, 5, 1


def main(rank: int, folder: Path) -> None:
    import hivemind
    from hivemind.p2p import P2P

    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder.resolve()}/"  # it would leave its sockets in /tmp
    torch.set_num_threads(1)
    address = folder / "address"
    while rank and not address.exists():
        time.sleep(0.1)
    dht = hivemind.DHT(initial_peers=[address.read_text()] if rank else [], start=True)
    if not rank:
        address.write_text(str(dht.get_visible_maddrs()[0]))
    averager = hivemind.DecentralizedAverager(
        [torch.randn(SIZE)],
        dht,
        prefix="bench",
        target_group_size=2,
        min_group_size=2,
        min_matchmaking_time=1.0,
        start=True,
    )
    seconds = []
    for _ in range(ROUNDS + WARM_UP):
        begin = time.perf_counter()
        averager.step(timeout=60)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds[WARM_UP:]}), flush=True)
    time.sleep(1)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
