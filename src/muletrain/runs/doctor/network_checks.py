"""The checks of ``muletrain doctor`` on the network: can this machine listen, and can a run's members connect to this
machine?"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError, NetworkError
from muletrain.runs.doctor.examination import NETWORK, Check, Question, Verdict, advised
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from muletrain.network.base import PeerId
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.join.ticket import Ticket
    from muletrain.runs.measure.vicinity import Seen

ASKED = 5
"""Most members that are asked."""
LISTEN_S, ENTER_S = 40.0, 60.0
"""Longest start of the network daemon, and longest entry into a run [s]."""
ALIKE_S = 1.0
"""Largest clock skew without a warning [s]."""
REFUSED_S = 3.0
"""Clock skew from which hivemind's directory refuses records [s]."""
OF_THE_RUN = ("clock", "from outside", "hole punching", "relay")
CLOCK = "synchronise it over the network: timedatectl set-ntp true (systemd), or chronyd"
OPEN = (
    "open TCP port {port} in this machine's firewall, forward it in its router, and add --announce "
    "/ip4/PUBLIC-ADDRESS/tcp/{port}; otherwise this machine can join, because members relay its traffic, but not 'start' a run"
)


async def network_checks(question: Question) -> AsyncIterator[Check]:
    """Yield the checks; without a ticket, checks that need a member of a run are UNKNOWN."""
    try:
        import hivemind

        import muletrain.network.libp2p  # noqa: F401 # the engine and its daemon's bindings
    except Exception as e:  # a missing shared library is an OSError, a broken build anything
        problem = " ".join(str(e).split())[:300]
        yield Check("network engine", Verdict.MISSING, problem, NETWORK.fixes["network engine"])
        return
    yield Check("network engine", Verdict.OK, f"hivemind {hivemind.__version__}")
    yield await listening(question)
    if question.ticket is None:
        for name in OF_THE_RUN:
            yield Check(name, Verdict.UNKNOWN, "needs a member of a run", "muletrain doctor --ticket TICKET")
        return
    async for check in _in_the_run(question):
        yield check


async def listening(question: Question) -> Check:
    """Check that the daemon can listen as a peer would."""
    from muletrain.network.daemon import Daemon, end_daemon

    with tempfile.TemporaryDirectory(prefix="mule-") as folder:
        try:
            async with asyncio.timeout(LISTEN_S):
                daemon = await Daemon.start(Path(folder), question.listen, question.port, question.announce)
        except TimeoutError:
            problem = f"the network daemon did not start within {LISTEN_S:.0f} s"
            return Check("listening", Verdict.MISSING, problem, NETWORK.fixes["listening"])
        except NetworkError as e:
            return advised("listening", str(e), NETWORK.fixes["listening"])
        try:
            hosts = sorted({a.split("/")[2] for a in await daemon.addresses()})
        finally:
            await end_daemon(daemon.p2p)
    port = f"TCP port {question.port}" if question.port else "any free TCP port (--port names one)"
    found = f"{port} of {', '.join(hosts)}"
    if all(host in ("127.0.0.1", "::1") for host in hosts):
        return Check(
            "listening",
            Verdict.WARNING,
            f"{found}: no other machine can connect",
            "use --listen 0.0.0.0, or connect to a network",
        )
    return Check("listening", Verdict.OK, found)


async def _in_the_run(question: Question) -> AsyncIterator[Check]:
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.join.ticket import Ticket
    from muletrain.runs.worker_files import PROTOCOL

    assert question.ticket is not None
    with tempfile.TemporaryDirectory(prefix="mule-") as folder:
        try:
            ticket = Ticket.parse(question.ticket)
            if not ticket.addresses:
                raise MuletrainError(
                    "the ticket names no member of its run; ask for one that 'muletrain start' printed"
                )
            async with asyncio.timeout(ENTER_S):
                network = await Libp2pNetwork.create(
                    run_id=ticket.run_id,
                    secret=ticket.secret,
                    owner=ticket.owner,
                    protocol=PROTOCOL,
                    folder=Path(folder),
                    listen=question.listen,
                    initial_peers=ticket.addresses,
                    visitor=True,
                )
        except (MuletrainError, TimeoutError) as e:
            yield advised("run", str(e) or f"no entry within {ENTER_S:.0f} s", NETWORK.fixes["run"])
            for name in OF_THE_RUN:
                yield Check(name, Verdict.UNKNOWN, "no member of the run answers", "see above")
            return
        try:
            for check in await checks_by_members(network, ticket, question):
                yield check
        finally:
            await network.close()


async def checks_by_members(network: Libp2pNetwork, ticket: Ticket, question: Question) -> list[Check]:
    """The checks of the run; members connect back to a socket that listens where a peer would."""
    from muletrain.runs.measure.vicinity import sights

    def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    names = await _members(network, ticket)
    asked = random.sample(sorted(names), min(ASKED, len(names)))
    try:
        server = await asyncio.start_server(hang_up, question.listen, question.port)
    except OSError:  # reported already
        server = None
    port = server.sockets[0].getsockname()[1] if server is not None else 0
    try:
        seen = await sights(network, asked, port)
    finally:
        if server is not None:
            server.close()
    reached = f"{plural(len(names), 'member')}; {len(seen)} of {len(asked)} asked answer"
    if not seen:
        unknown = (Check(n, Verdict.UNKNOWN, "no member answers", NETWORK.fixes[n]) for n in OF_THE_RUN)
        return [Check("run", Verdict.MISSING, reached, NETWORK.fixes["run"]), *unknown]
    answers = [s for s, _, _ in seen.values()]
    return [
        Check("run", Verdict.OK, reached),
        clock([ahead for _, ahead, _ in seen.values()], max(off for _, _, off in seen.values())),
        *ways(answers, port, {host for a in network.addresses() for host in a.split("/")[2:3]}),
    ]


async def _members(network: Libp2pNetwork, ticket: Ticket) -> dict[PeerId, str]:
    """Names of the run's members, from the first member of the ticket that answers."""
    from muletrain.runs.join.removal import CALL_TIMEOUT_S, AskMembers

    named = dict.fromkeys(a.rsplit("/p2p/", 1)[-1] for a in ticket.addresses)
    for peer in named:
        try:
            answer = await AskMembers().ask(network, peer, timeout_s=CALL_TIMEOUT_S)
        except NetworkError:
            continue
        return {m.id: m.name for m in answer.members} or {peer: ""}
    return dict.fromkeys(named, "")


def clock(ahead_s: list[float], off_s: float) -> Check:
    """Check the clock against the members', which are ahead by ``ahead_s``; ``off_s``: error of the comparison."""
    skew_s = median(ahead_s)
    side = "behind" if skew_s > 0 else "ahead of"
    found = f"{abs(skew_s):.2f} s {side} the run's members (within {max(off_s, 0.005):.2f} s)"
    if abs(skew_s) <= max(ALIKE_S, off_s):
        return Check("clock", Verdict.OK, found)
    return Check("clock", Verdict.MISSING if abs(skew_s) > REFUSED_S else Verdict.WARNING, found, CLOCK)


def ways(answers: list[Seen], port: int, own: set[str]) -> Iterator[Check]:
    """Yield the checks of the ways from members to this machine. ``own``: its addresses."""
    tried = [s for s in answers if s.reached is not None]
    able = [s for s in tried if s.reached]
    hosts = sorted({s.host for s in answers if s.host})
    router = "" if set(hosts) <= own | {"127.0.0.1", "::1"} else ", which is the address of a router"
    at = f"TCP port {port} of {' or '.join(hosts)}{router}"
    carry = sum(s.carries for s in answers)
    if not tried:
        why = "members reach this machine through relays only" if not hosts else "no member tried"
        yield Check("from outside", Verdict.UNKNOWN, why, OPEN.format(port=port) if port else "choose a free port")
    elif able:
        some = "" if len(able) == len(tried) else "; firewalls of the others may block it"
        yield Check(
            "from outside", Verdict.OK, f"{len(able)} of {plural(len(tried), 'member')} can connect to {at}{some}"
        )
    else:
        yield Check(
            "from outside",
            Verdict.WARNING,
            f"none of {plural(len(tried), 'member')} can connect to {at}",
            OPEN.format(port=port),
        )
    punching = (
        "not needed: members connect to this machine" if able else "not done: members relay traffic to closed ports"
    )
    yield Check("hole punching", Verdict.OK, punching)
    offered = f"{carry} of {plural(len(answers), 'member')} relay traffic for other machines"
    if carry or able:
        yield Check("relay", Verdict.OK, offered)
    else:
        fix = "let a machine with an open port join without --bandwidth, or open a port here"
        yield Check("relay", Verdict.WARNING, offered, fix)
