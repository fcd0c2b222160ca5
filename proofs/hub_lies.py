"""Clients and servers of a hub that lie to each other, within what docs/trust.md promises that a run bears."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from muletrain.errors import NetworkError
from muletrain.optim.sketch import SIZE, packed
from muletrain.policy.passes import LAST, Pass
from muletrain.runtime.core.blocks import BLOCK, RUN, AskBlocks, Block, StateImage
from muletrain.runtime.core.times import GONE_S
from muletrain.runtime.pool.client import Client
from muletrain.runtime.pool.messages import MAX_KEPT, Answer, Ended, Give, Next, Result, Wanted
from muletrain.wire.codec import encode_raw

if TYPE_CHECKING:
    from muletrain.network.base import CallHandler, PeerId
    from muletrain.network.memory import MemoryNetwork
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame

CLIENT_LIES = ("silent", "anew", "downloads", "hurry", "twice", "others", "slow", "unasked", "unable")
"""A client brings back no result; and begins anew after ``ANEW_S``; it asks for the weights each ``OFTEN_S``; it announces
gradients of zero at once, as if it were very fast; it brings back each result twice; it lists other parts than are in its
accumulator; it needs ``SLOW_S`` for each block of that; it lists parts that it was not given, as many as a message holds,
and brings back results of others; it says after ``SLOW_S`` that it cannot compute a part."""
SERVER_LIES = ("idle", "hoards", "much", "weights", "digest", "servers", "ended")
"""A server says that its clients do nothing; and gives them nothing; it gives forwards whose backwards never come; it
gives wrong weights; it says that it has others than it has; it says that its clients do nothing, and that there is no other
server; it does, and that the run has ended where it should give a part."""
SLOW_S, ANEW_S, OFTEN_S = 20.0, 0.3, 0.05
UNASKED = 10**9
"""The lowest number of a part that no server gave."""
MUCH = 40
"""Forwards that a server gives beside each right one."""
STATED: dict[str, dict[str, Any]] = {"digest": {"weights": bytes(32)}}
STATED["idle"] = STATED["hoards"] = STATED["ended"] = {"speed": 0.0, "own": 0.0, "clients": 0}
STATED["servers"] = {**STATED["idle"], "servers": ("nobody",)}
"""Words of a server about itself."""


class LyingClient(Client):
    """Lies while ``how`` says about what."""

    how = ""

    def _state(self) -> Next:
        state = super()._state()
        if self.how != "unasked":
            return state
        more = {
            name: (*getattr(state, name), *range(UNASKED * k, UNASKED * k + 2 * MAX_KEPT))[: 2 * MAX_KEPT]
            for k, name in enumerate(("parts", "uncounted", "forwards"), 2)
        }
        return state.model_copy(update=more)

    async def _do(self, message: Give, tensors: list[Encoded], session: int) -> None:
        for k in range(4 * MAX_KEPT if self.how == "unasked" else 0):
            await self._try_to_send(Result(number=UNASKED + k), [])
        if self.how == "unable":
            await self._clock.sleep(SLOW_S)
            return await self._report(self._work.unable(message, "no"), [], session)
        if self.how == "anew":
            await self._clock.sleep(ANEW_S)
            return self._give_up(session)
        gives = message.what is Pass.FORWARD or (message.what not in LAST and self._compute.stage > 0)
        if self.how != "hurry" or gives:  # false results that go on to another stage are not caught
            return await super()._do(message, tensors, session)
        nothing = packed(np.zeros(SIZE))
        await self._report(Result(number=message.number, sketch=nothing, outputs=nothing), [], session)

    async def _try_to_send(self, message: Result, tensors: list[Encoded]) -> None:
        for _ in range({"silent": 0, "twice": 2}.get(self.how, 1)):
            await super()._try_to_send(message, tensors)

    async def _hand_over(self, wanted: Wanted) -> StateImage:
        copy = await super()._hand_over(wanted)
        if self.how == "others":
            givings, gradient = copy.tensors
            copy = StateImage({"givings": givings.roll(1) + 1000, "gradient": gradient}, copy.channel)
            await copy.name(self._compute.offload)
        return copy

    async def _given_copy(self, taker: PeerId, name: bytes) -> StateImage | None:
        if self.how == "slow":
            await self._clock.sleep(SLOW_S)
        return await super()._given_copy(taker, name)

    async def _call(self, session: int) -> None:
        asks = self._tasks.spawn(self._ask_often(), "downloads")
        try:
            await super()._call(session)
        finally:
            asks.cancel()

    async def _ask_often(self) -> None:
        while True:
            await self._clock.sleep(OFTEN_S)
            if self.how == "downloads" and self._wanted is not None:
                count = -(-4 * self._compute.n_params // BLOCK)
                ask = AskBlocks(digest=self._wanted, blocks=tuple(range(min(RUN, count)))).pack()
                for server in self._servers.known:
                    with contextlib.suppress(NetworkError):
                        await self._net.call(server, AskBlocks.KIND, ask, timeout_s=GONE_S)


class LyingServer:
    """``network`` as a server's own program would use it to lie to clients, while ``how`` says about what."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.how = ""
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def serve(self, method: str, handler: CallHandler, **how: Any) -> None:
        async def answer(sender: PeerId, payload: bytes) -> bytes:
            found = await handler(sender, payload)
            if method == Next.KIND and self.how in STATED:
                return Answer.unpack(found).model_copy(update=STATED[self.how]).pack()
            return found

        self._network.serve(method, answer, **how)

    async def send(self, peer: PeerId, frame: Frame, **how: Any) -> int:
        message: Any = frame.message
        if self.how == "hoards" and isinstance(message, Give):
            return 0
        if self.how == "ended" and isinstance(message, Give):
            frame = Ended().frame()
        if self.how == "much" and isinstance(message, Give) and message.what is Pass.FORWARD:
            for k in range(1, MUCH + 1):
                more = {"number": message.number + 10**9 * k, "index": message.index + 10**6 * k}
                lie = message.model_copy(update=more)
                await self._network.send(peer, lie.frame(frame.tensors), **how)
        if self.how == "weights" and isinstance(message, Block) and peer.startswith("client"):
            frame = message.frame([encode_raw(bytes(frame.tensors[0].shape[0]))])
        return await self._network.send(peer, frame, **how)
