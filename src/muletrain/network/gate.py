"""The gate: two peers speak only after both have proved membership in the run.

libp2p encrypts and authenticates the peer id, but lets anyone dial. Here every handler (calls, streams, the DHT's own
RPCs) refuses a remote id that was not admitted, and every outgoing call admits the remote side first. All messages use
one protocol:

- ``hello`` (version, run, nonce, epoch, certificate), between any two, is answered in kind. Two members are done then.
- ``proof`` shows that a newcomer, which has no certificate, holds the ticket's secret; in return it gets a certificate.
  Proofs are HMACs bound to version, run, both ids and both nonces. A member's answer to ``hello`` contains a proof, so
  that after a renewal the old secret admits nobody and is believed by nobody.
- ``renewed`` brings the owner's renewal and the new secret, from anyone to a member that stays: both prove themselves.
- ``sync`` asks a member for a renewal that the caller may have missed.

The callee keeps nothing between messages: the nonce is derived from the caller's id and nonce, by a key of this
process.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgpack

from muletrain.clock import loop_time_s
from muletrain.errors import AdmissionError
from muletrain.network.identity import NONCE, derive, proof, same
from muletrain.network.offences import Offences
from muletrain.network.trust import MAX_KEPT, packed_chain, packed_renewal, read_chain, read_renewal, unpacked
from muletrain.policy.recent import Bucket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from muletrain.network.trust import Chain, Renewal, Trust

    Call = Callable[[bytes], Awaitable[bytes]]

MAX_ADMIT = 1 << 18
"""Most bytes of a message."""
BURST, PER_S = 200.0, 50.0
"""Messages of strangers answered at once, and per second after that."""
MAX_ADMITTED = 2 * MAX_KEPT
"""Most peers that a gate remembers. Each process is a new peer, so in a long run most have gone."""
OTHER_SECRET = "the other side does not hold this ticket's secret: the ticket is of another run or was replaced; ask for the current one"
NO_ADMISSION = "the other side's answer is no admission; is it a muletrain of this version?"
BANNED = (
    "banned for some minutes, because it kept sending what no correct peer sends; is it the same version and undamaged?"
)
NOT_IN = "the other side is not in this run (any more)"
OUT = "this peer is not in the run any more: its owner renewed the ticket"
NOT_IN_ITSELF = "this peer is not in the run itself; ask another member"
REMOVED = "the run's owner removed the newcomer, or renewed the ticket before it began; ask for the current one"
FOREIGN = "the newcomer's certificate is not one of this run"
NO_SECRET = "the newcomer does not hold this run's secret; it needs this run's current ticket"
TOO_MANY = "too many peers ask for admission; try again in some seconds"
FULL = "this peer knows as many others as it can; try again in some minutes"
MALFORMED = "malformed admission"


class _Turned(AdmissionError):
    """A peer that knows of ``epoch`` turned us away."""

    def __init__(self, reason: str, epoch: int) -> None:
        super().__init__(reason)
        self.epoch = epoch


class _Out(AdmissionError):
    """The caller was in the run once: the answer contains the renewal that ended the membership."""


class Gate:
    """Knows which peers are admitted, and does the handshake that admits.

    ``refused`` is told (remote, reason). After a renewal ``renewed`` is told the removed ids."""

    def __init__(
        self,
        own: str,
        run_id: str,
        protocol: str,
        trust: Trust,
        refused: Callable[[str, str], None],
        renewed: Callable[[frozenset[str]], None] = lambda gone: None,
        *,
        visitor: bool = False,
    ) -> None:
        self._own, self._run_id, self._protocol, self._visitor = own, run_id, protocol, visitor
        self.trust = trust
        self._refused, self._renewed = refused, renewed
        self._admitted: dict[str, Chain] = {}  # their certificates are genuine
        self._let_us_in: set[str] = set()
        self._spoke: set[str] = set()
        """Peers heard or spoken to since a quarter of ``MAX_ADMITTED`` were admitted."""
        self._admissions = 0
        self._nonce_key = os.urandom(32)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._hellos = Bucket(BURST, PER_S)
        self.offences = Offences()

    def __len__(self) -> int:
        """Peers remembered."""
        return len(self._admitted.keys() | self._let_us_in | self._spoke)

    def admitted(self, peer: str) -> bool:
        """May ``peer``, which is about to, speak to us?"""
        if peer in self._admitted:
            self._spoke.add(peer)
        return self._may_speak(peer)

    def _may_speak(self, peer: str) -> bool:
        chain = self._admitted.get(peer)
        return chain is not None and self.trust.current(peer, chain) and not self.offences.banned(peer)

    def entered(self, peer: str) -> bool:
        """May we speak to ``peer``?"""
        return peer in self._let_us_in and self.admitted(peer)

    def certificate(self, peer: str) -> Chain:
        """The certificates that ``peer`` showed us; empty: none."""
        return self.trust.chain if peer == self._own else self._admitted.get(peer, ())

    def known(self) -> list[str]:
        """The peers to which we may speak."""
        return [p for p in self._let_us_in if self._may_speak(p)]

    def forget_entry(self, peer: str) -> None:
        """Enter again next time: ``peer`` was restarted and does not know us."""
        self._let_us_in.discard(peer)

    def check(self, peer: str, what: str) -> bool:
        """``admitted``, and a report if not. ``what``: the request of ``peer``."""
        if self.admitted(peer):
            return True
        self._refused(peer, f"{what} before admission")
        return False

    def adopt(self, renewal: Renewal, secret: bytes | None) -> None:
        """Apply ``renewal``, if new. Raises AdmissionError without the owner's signature."""
        before = self.trust.epoch, self.trust.secret
        self.trust.adopt(renewal, secret)
        if before == (self.trust.epoch, self.trust.secret):
            return
        gone = frozenset(p for p, chain in self._admitted.items() if not self.trust.current(p, chain))
        self._forget(gone)
        self._renewed(gone)

    def _admit(self, peer: str, chain: Chain) -> None:
        if peer not in self._admitted:
            self._forget(
                {p for p, c in self._admitted.items() if not self.trust.current(p, c)}
            )  # visitors whose time is over
            if len(self._admitted) >= MAX_ADMITTED:  # a forgotten peer that is still there says hello again
                self._forget(self._admitted.keys() - self._spoke)
            if len(self._admitted) >= MAX_ADMITTED:
                raise AdmissionError(FULL)
            self._admissions += 1
            if self._admissions % (MAX_ADMITTED // 4) == 0:
                self._spoke.clear()
        self._admitted[peer] = (
            () if self.trust.remains(peer) else chain
        )  # a remaining peer needs none, and nobody has checked the chain
        self._let_us_in.add(peer)

    def _forget(self, peers: frozenset[str] | set[str]) -> None:
        self._let_us_in -= peers
        self._spoke -= peers
        for peer in peers:
            del self._admitted[peer]

    # The caller's side ----------------------------------------------------------------------------------------------

    async def enter(self, peer: str, call: Call) -> None:
        """Admit ``peer``, and be admitted, unless that is done. ``call`` reaches the admit handler of ``peer``; errors
        pass.

        Raises AdmissionError for another run or version, or if one of us is not in the run."""
        if self.offences.banned(peer):
            raise AdmissionError(BANNED)
        lock = self._locks.setdefault(peer, asyncio.Lock())
        async with lock:
            if not self.entered(peer):
                await self._handshake(peer, call)

    async def _handshake(self, peer: str, call: Call) -> None:
        mine = os.urandom(NONCE)
        epoch, chain, theirs, their_proof = _answer_to_hello(await self._hello(peer, call, mine))
        if not self.trust.belongs:
            await self._be_let_in(peer, call, chain, mine + theirs, their_proof)
        elif epoch > self.trust.epoch:
            await self.sync(call)
        if not self.trust.genuine(peer, chain) or not self.trust.current(peer, chain):
            raise AdmissionError(NOT_IN)
        self._admit(peer, chain)
        if epoch < self.trust.epoch:
            await self.pass_on(peer, call)

    async def _hello(self, peer: str, call: Call, nonce: bytes) -> Any:
        """The answer to our ``hello``, which is sent twice if one of us had to hear of a renewal."""
        for last in (False, True):
            trust, epoch = self.trust, self.trust.epoch
            hello = ["hello", self._protocol, self._run_id, nonce, epoch, packed_chain(trust.chain)]
            try:
                return await self._ask(call, hello)
            except _Turned as e:
                heard = trust.epoch > epoch and trust.belongs
                if not last and not heard and e.epoch < trust.epoch and trust.remains(peer):
                    await self.pass_on(peer, call)
                    heard = True
                if last or not heard:
                    raise
        raise AssertionError  # the last try returns or raises

    async def _be_let_in(self, peer: str, call: Call, chain: Chain, nonces: bytes, their_proof: bytes) -> None:
        """Enter as a newcomer: both prove possession of the secret, and we get our certificate."""
        if self.trust.secret is None:
            raise AdmissionError(OUT)
        genuine = same(their_proof, self._proof("callee", self._own, peer, nonces)) and bool(chain)
        own_proof = self._proof("caller", self._own, peer, nonces)
        try:
            answer = await self._ask(call, ["proof", nonces[:NONCE], own_proof, self._visitor])
        except AdmissionError:  # our proof is sent even if the member's is wrong, so that the member can report
            if genuine:
                raise
        if not genuine:
            raise AdmissionError(OTHER_SECRET)
        match answer:
            case [certificate, None]:
                self.trust.welcomed(read_chain(certificate))
            case [certificate, renewal]:
                self.adopt(read_renewal(renewal), self.trust.secret)
                if self.trust.secret is None:
                    raise AdmissionError(OTHER_SECRET)
                self.trust.welcomed(read_chain(certificate))
            case _:
                raise AdmissionError(NO_ADMISSION)

    async def pass_on(self, peer: str, call: Call) -> None:
        """Bring ``peer`` the last renewal, if that names ``peer``."""
        if self.trust.remains(peer):
            await self._ask(call, ["renewed", packed_renewal(self.trust.renewal), self.trust.secret])

    async def sync(self, call: Call) -> None:
        """Ask a member for the last renewal. Raises AdmissionError if we are unknown there (any more)."""
        missing = self.trust.secret is None
        match await self._ask(call, ["sync", self.trust.epoch - missing]):
            case [renewal, bytes() | None as secret]:
                self.adopt(read_renewal(renewal), secret)

    async def _ask(self, call: Call, message: list[Any]) -> Any:
        match unpacked(await call(msgpack.packb(message))):
            case [True, content]:
                return content
            case [False, str() as reason, int() as epoch, renewal]:
                # a newcomer gets renewals with the certificate, and only there
                if renewal is not None and self.trust.belongs:
                    self.adopt(read_renewal(renewal), None)
                raise _Turned(reason[:500], epoch)
        raise AdmissionError(NO_ADMISSION)

    # The callee's side ----------------------------------------------------------------------------------------------

    def answer(self, peer: str, payload: bytes) -> bytes:
        """The answer to a message of ``peer``."""
        try:
            reply = [True, self._answer(peer, payload)]
        except AdmissionError as e:
            self._refused(peer, str(e))
            renewal = packed_renewal(self.trust.renewal) if isinstance(e, _Out) else None
            reply = [False, str(e), self.trust.epoch, renewal]
        packed: bytes = msgpack.packb(reply)
        return packed

    def _answer(self, peer: str, payload: bytes) -> Any:
        if self.offences.banned(peer):
            raise AdmissionError(BANNED)
        if not self.admitted(peer) and not self._hellos.take(loop_time_s()):
            raise AdmissionError(TOO_MANY)
        match unpacked(payload) if len(payload) <= MAX_ADMIT else None:
            case ["hello", str() as protocol, str() as run_id, bytes() as nonce, int() as epoch, chain] if (
                len(nonce) == NONCE
            ):
                self._same_run(protocol, run_id)
                return self._on_hello(peer, nonce, epoch, read_chain(chain))
            case ["proof", bytes() as nonce, bytes() as given, bool() as visitor] if len(nonce) == NONCE:
                return self._on_proof(peer, nonce, given, visitor)
            case ["renewed", renewal, bytes() | None as secret] if self.trust.belongs:
                return self.adopt(read_renewal(renewal), secret)
            case ["sync", int() as epoch]:
                return self._on_sync(peer, epoch)
        raise AdmissionError(MALFORMED)

    def _same_run(self, protocol: str, run_id: str) -> None:
        if protocol != self._protocol:
            raise AdmissionError(
                f"this run speaks {self._protocol}, the newcomer {protocol[:100]}: install the same version on both"
            )
        if run_id != self._run_id:
            raise AdmissionError(
                f"this peer belongs to run {self._run_id}, the ticket to run {run_id[:100]}: use the ticket of this run"
            )

    def _on_hello(self, peer: str, nonce: bytes, epoch: int, chain: Chain) -> Any:
        trust = self.trust
        if not trust.belongs:
            raise AdmissionError(NOT_IN_ITSELF)
        if chain or trust.remains(peer):
            self._judge(peer, epoch, chain)
            self._admit(peer, chain)  # we learn the answer to our certificate when we call the peer
        nonces = nonce + self._own_nonce(peer, nonce)
        own_proof = self._proof("callee", peer, self._own, nonces) if trust.secret is not None else b""
        return [trust.epoch, packed_chain(trust.chain), nonces[NONCE:], own_proof]

    def _judge(self, peer: str, epoch: int, chain: Chain) -> None:
        trust = self.trust
        genuine = trust.genuine(peer, chain)
        if genuine and trust.current(peer, chain):
            return
        if epoch > trust.epoch:
            raise AdmissionError("this peer has not heard of the last renewal of the run's ticket")
        if genuine:
            raise _Out(REMOVED)
        raise AdmissionError(FOREIGN)

    def _on_proof(self, peer: str, nonce: bytes, given: bytes, visitor: bool) -> Any:
        nonces = nonce + self._own_nonce(peer, nonce)
        if self.trust.secret is None or not same(given, self._proof("caller", peer, self._own, nonces)):
            raise AdmissionError(NO_SECRET)
        chain = self.trust.issue(peer, visitor=visitor)
        self._admit(peer, chain)
        return [packed_chain(chain), packed_renewal(self.trust.renewal)]

    def _on_sync(self, peer: str, epoch: int) -> Any:
        if not self.admitted(peer):
            raise AdmissionError("not admitted to this run")
        behind = epoch < self.trust.epoch
        return [packed_renewal(self.trust.renewal), self.trust.secret] if behind else None

    def _own_nonce(self, peer: str, nonce: bytes) -> bytes:
        return derive(self._nonce_key, peer.encode() + nonce)

    def _proof(self, role: str, caller: str, callee: str, nonces: bytes) -> bytes:
        assert self.trust.secret is not None
        return proof(self.trust.secret, role, [self._protocol, self._run_id, caller, callee], nonces)


def _answer_to_hello(content: Any) -> tuple[int, Chain, bytes, bytes]:
    match content:
        case [int() as epoch, chain, bytes() as nonce, bytes() as given] if len(nonce) == NONCE:
            return epoch, read_chain(chain), nonce, given
    raise AdmissionError(NO_ADMISSION)
