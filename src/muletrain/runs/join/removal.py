"""Removing a member: ``muletrain kick``, on the machine of the run's owner.

A renewal names the members that stay (``network/trust.py``). So we first ask members for a list of all members, with
all seen certificates, and check the certificates again. A peer without a valid certificate does not stay. Clients of a
hub are in no roster, so every member is asked for its clients.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from muletrain.errors import AdmissionError, MuletrainError, NetworkError
from muletrain.network.trust import MAX_KEPT, chain_from
from muletrain.runs.join.client import find_founder, first_answer
from muletrain.runtime.core.messages import Call, Header, Id, Name, Natural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from muletrain.network.base import Network, PeerId
    from muletrain.network.libp2p import Libp2pNetwork

CALL_TIMEOUT_S = 15.0
"""Seconds that a member has to answer."""
ASKED = 8
"""Most members that are asked who is in the run."""
HEARD_S = 600.0
"""Seconds without a word after which a server does not list a client any more."""
SHORTEST_ID = 6
"""Fewest characters of the end of an id that may name a peer."""


class Listed(Header):
    """Describes one member. ``certificate``: empty if the answering peer has seen none. ``stage``: None for a member
    believed dead, and before the run begins."""

    id: Id
    name: Name
    certificate: Annotated[bytes, Field(max_length=1024)]
    stage: Natural | None = None


class Members(Header):
    """Lists the members of the run, or clients of a server."""

    members: Annotated[tuple[Listed, ...], Field(max_length=MAX_KEPT)]


class AskMembers(Call[Members]):
    """Asks for the run's members; with ``clients``, for the clients that the receiver had lately, as a server."""

    KIND: ClassVar[str] = "run.members"
    clients: bool = False


def serve_members(
    net: Libp2pNetwork,
    names: Callable[[], dict[PeerId, str]],
    stages: Callable[[], dict[PeerId, int]] = dict,
    clients: Callable[[], dict[PeerId, str]] = dict,
) -> None:
    """Answer requests for the run's members. ``names``: of all members; ``stages``: of members believed alive;
    ``clients``: names of our clients, including earlier clients."""

    def listed(p: PeerId, name: str, stage: int | None = None) -> Listed:
        return Listed(id=p, name=name, certificate=net.certificate(p), stage=stage)

    async def answer(sender: PeerId, ask: AskMembers) -> Members:
        if ask.clients:
            since = asyncio.get_running_loop().time() - HEARD_S
            return Members(members=tuple(listed(p, n) for p, n in clients().items() if net.heard_s(p) >= since))
        at = stages()
        return Members(members=tuple(listed(p, n, at.get(p)) for p, n in names().items()))

    AskMembers.serve(net, answer)


async def serving(net: Network, ask: Iterable[PeerId]) -> list[Listed]:
    """The members that serve a stage, by the first answer of the first ``ASKED`` in ``ask``, which are asked side by side;
    empty without an answer."""

    async def answer(member: PeerId) -> list[Listed]:
        said = await AskMembers().ask(net, member, timeout_s=CALL_TIMEOUT_S)
        return [m for m in said.members if m.stage is not None]

    found, _ = await first_answer(map(answer, list(dict.fromkeys(ask))[:ASKED]))
    return found or []


@dataclass(frozen=True)
class Removal:
    """The result of a removal. ``kept``: members that stay; ``told``: informed members among ``kept``, which inform all
    other members and the clients."""

    name: str
    id: PeerId
    secret: bytes
    kept: int
    told: int
    unproven: tuple[str, ...]
    """Names of peers with no seen certificate. Such peers are out, too, and need the new ticket."""
    out: frozenset[PeerId]
    """All peers that are out now."""
    emptied: int | None
    """The stage that no peer serves any more, as far as the answering members know."""


async def remove(
    net: Libp2pNetwork, addresses: tuple[str, ...], who: str, before: frozenset[PeerId] = frozenset()
) -> Removal:
    """Remove the peer with the name, id or end of id ``who``. ``net`` holds the owner's key; ``addresses`` are the
    ticket's. ``before``: peers that are out already, which members still list. Raises MuletrainError when no peer is
    removed."""
    founder = await find_founder(net, addresses)
    answers = await _ask_around(net, [founder, *(a.rsplit("/p2p/", 1)[-1] for a in addresses)], before)
    clients = await _clients(net, {m.id for listed in answers.values() for m in listed}, before)
    helping = {m.id for listed in clients.values() for m in listed}
    for server, listed in clients.items():
        answers[server] = (*answers.get(server, ()), *listed)
    called = {m.id: m.name for listed in answers.values() for m in listed}
    target = find(called, who)
    if target == founder:
        raise MuletrainError(
            f"{who} is the run's first peer, which collects checkpoints; 'muletrain stop' ends the run"
        )
    # the target has no say
    said = [m for peer, listed in answers.items() for m in listed if target not in (peer, m.id)]
    names = {m.id: m.name for m in said}
    kept = {m.id for m in said if _counts(net, m)}
    if not kept - helping:
        raise MuletrainError(
            f"no member but {who} answers; give the ticket of another one, as in 'muletrain kick NAME TICKET'"
        )
    secret = secrets.token_bytes(32)
    net.renew(kept, secret)
    members = kept - helping
    results = await asyncio.gather(*(_tell(net, p) for p in members))
    if all(results):
        raise MuletrainError(
            f"no member could be told that {who} is out ({results[0]}); nothing has changed, try again"
        )
    unproven = names.keys() - kept
    stage = next((m.stage for p, listed in answers.items() if p != target for m in listed if m.id == target), None)
    served = {m.stage for m in said if m.id in kept}
    return Removal(
        called[target],
        target,
        secret,
        len(members),
        sum(r is None for r in results),
        unproven=tuple(sorted(names[p] for p in unproven)),
        out=frozenset({target, *unproven}),
        emptied=None if stage in served else stage,
    )


def find(names: dict[PeerId, str], who: str) -> PeerId:
    """The id of the peer with the name, id or end of id ``who``. Raises MuletrainError unless exactly one peer
    matches."""
    found = [p for p, name in names.items() if who in (name, p)]
    if not found and len(who) >= SHORTEST_ID:
        found = [p for p in names if p.endswith(who)]
    if len(found) != 1:
        known = ", ".join(sorted(f"{name} ({p[-8:]})" for p, name in names.items()))
        problem = "several peers are called" if found else "no peer of the run is called"
        raise MuletrainError(f"{problem} {who!r}; give the name, the id or the end of the id of one of: {known}")
    return found[0]


def _counts(net: Libp2pNetwork, m: Listed) -> bool:
    try:
        chain = chain_from(m.certificate)
    except AdmissionError:
        return False
    return net.trust.genuine(m.id, chain) and net.trust.current(m.id, chain)


async def _ask_around(
    net: Libp2pNetwork, ask: list[PeerId], out: frozenset[PeerId]
) -> dict[PeerId, tuple[Listed, ...]]:
    """Ask members until we have seen the certificates of all listed peers. Returns the answers by member, without peers
    that are ``out``."""
    answers: dict[PeerId, tuple[Listed, ...]] = {}
    asked: set[PeerId] = set()
    problems = []
    while ask and len(asked) < ASKED:
        peer = ask.pop(0)
        if peer in asked:
            continue
        asked.add(peer)
        try:
            answer = await AskMembers().ask(net, peer, timeout_s=CALL_TIMEOUT_S)
        except NetworkError as e:
            problems.append(str(e))
            continue
        answers[peer] = tuple(m for m in answer.members if m.id not in out)
        seen = {m.id for listed in answers.values() for m in listed if _counts(net, m)}
        lacking = {m.id for listed in answers.values() for m in listed} - seen
        if not lacking:
            break
        ask += sorted(seen)
    if not answers:
        raise MuletrainError(f"no member says who is in the run: {'; '.join(problems)}")
    return answers


async def _clients(
    net: Libp2pNetwork, members: set[PeerId], out: frozenset[PeerId]
) -> dict[PeerId, tuple[Listed, ...]]:
    """Returns the clients that each of the ``members`` had lately, without peers that are ``out``."""

    async def of(peer: PeerId) -> tuple[Listed, ...]:
        try:
            answer = await AskMembers(clients=True).ask(net, peer, timeout_s=CALL_TIMEOUT_S)
        except NetworkError:  # the member is gone
            return ()
        return tuple(m for m in answer.members if m.id not in out)

    asked = sorted(members)
    return dict(zip(asked, await asyncio.gather(*map(of, asked)), strict=True))


async def _tell(net: Libp2pNetwork, peer: PeerId) -> MuletrainError | None:
    try:
        await net.tell_renewal(peer, timeout_s=CALL_TIMEOUT_S)
    except MuletrainError as e:
        return e
    return None
