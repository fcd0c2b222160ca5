"""Which requests are served: those to our own name, from our own page, with the token where one is needed."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
OWN_HEADER = "x-muletrain"
"""Header of our page's commands: a foreign page cannot send it without being asked first."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""


class Gatekeeper:
    """Decides about requests to one server."""

    def __init__(self, host: str) -> None:
        """``host``: the address to listen on."""
        self.host, self.port = host, 0
        self.token = secrets.token_urlsafe(24)
        self.loopback = host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)

    @property
    def cookie(self) -> str:
        """The cookie's name: all ports of a machine share their cookies."""
        return f"muletrain-{self.port}"

    def knows_host(self, header: str) -> bool:
        """Is it a name of this server? Others come from a page that had its own name point to this machine."""
        host = header.rsplit(":", 1)[0] if not header.endswith("]") else header
        host = host.removeprefix("[").removesuffix("]").lower()
        if host == "localhost":
            return True
        if _is_address(host):
            return ipaddress.ip_address(host).is_loopback or not self.loopback
        return not self.loopback and host in {self.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def has_token(self, given: str | None) -> bool:
        """Is it the token? Takes the same time for every answer."""
        return hmac.compare_digest((given or "").encode(), self.token.encode())

    def may_look(self, cookie: str | None) -> bool:
        """On the loopback address everyone on this machine may look; elsewhere the token is needed."""
        return self.loopback or self.has_token(cookie)

    def may_steer(self, cookie: str | None, headers: Mapping[str, str]) -> bool:
        """Is this a command of our own page, from someone with the token?"""
        origin = headers.get("origin", "")
        ours = origin.partition("://")[2] == headers.get("host") and headers.get(OWN_HEADER) == "1"
        return self.has_token(cookie) and ours


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
