"""A founder's rendezvous in memory, and what newcomers say to it."""

from __future__ import annotations

from collections.abc import Callable

from muletrain import __version__
from muletrain.compute.estimate import Offer, StageMemory
from muletrain.events import Event
from muletrain.network.base import Network
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.join.admission import RunInfo
from muletrain.runs.join.messages import JoinRequest
from muletrain.runs.join.rendezvous import Rendezvous
from muletrain.runs.join.seating import Seating
from muletrain.strategies.swarm import SWARM


def rendezvous_of(
    net: Network,
    bytes_of_stages: list[int],
    expected: int,
    *,
    emit: Callable[[Event], None] = lambda event: None,
    info: RunInfo | None = None,
    trainers: int | None = 1,
    checkpoint: Checkpoint | None = None,
) -> Rendezvous:
    needs = [
        StageMemory(
            weights=n, moments=0, gradient=0, delayed=0, activations=0, copies=0, on_device=n // 2, on_host=n // 2
        )
        for n in bytes_of_stages
    ]
    return Rendezvous(
        net=net,
        emit=emit,
        info=info or RunInfo("{}", bytes(32), b"t"),
        seating=Seating(needs, [1.0] * len(needs), SWARM),
        run_id="run",
        config_digest=bytes(32),
        expected=expected,
        trainers=trainers,
        checkpoint=checkpoint,
    )


def introduction(name: str, memory: int = 1, *, device: str = "cpu", host: int | None = None) -> JoinRequest:
    return JoinRequest(
        version=__version__,
        name=name,
        stage=None,
        device=device,
        flops=0,
        memory=memory,
        host_memory=host,
    )


GIB = 2**30


class NoTrial:
    """In place of ``runs.join.trial.Trial``: everything is built in this process at once, which takes no seconds."""

    def bound(self, offer: Offer) -> None: ...
    async def build(self, config: str, stage: int) -> None: ...
    async def tokens(self, config: str, tokenizer: bytes, data: str, digest: str) -> None: ...
    async def close(self) -> None: ...
