"""Entering a run: being admitted at one or more of the addresses that a ticket names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muletrain.errors import AdmissionError, NetworkError, PeerUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from muletrain.network.base import Network

ENTER_TIMEOUT_S = 12.0
"""Longest time in which one peer is dialled and admits us [s]."""


async def enter(net: Network, addresses: Iterable[str]) -> list[str]:
    """Connect with the peers at ``addresses``, all at once; '/p2p/ID' of each that admitted us. Raises AdmissionError
    or PeerUnreachable if none did."""
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        by_peer.setdefault(address.rsplit("/p2p/", 1)[-1], []).append(address)
    entering = (net.connect(known, timeout_s=ENTER_TIMEOUT_S) for known in by_peer.values())
    results = await asyncio.gather(*entering, return_exceptions=True)
    reached, problems, no_entry = [], list[str](), list[AdmissionError]()
    for known, result in zip(by_peer.values(), results, strict=True):
        match result:
            case str():
                reached.append("/p2p/" + result)
            case NetworkError():
                problems.append(f"{', '.join(dict.fromkeys(map(_port, known)))} ({result.why})")
            case AdmissionError():
                no_entry.append(result)
            case BaseException():
                raise result
    if not reached and no_entry:
        raise no_entry[0]
    if not reached:
        raise PeerUnreachable(
            "no member of the run could be reached from here. The run must be up, and one of these ports open to this machine:\n  "
            + "\n  ".join(problems)
        )
    return reached


def _port(address: str) -> str:
    """The port of ``address`` in a firewall's words."""
    match address.split("/"):
        case ["", _, host, "tcp", port, *_]:
            return f"TCP port {port} of {host}"
    return address
