"""Who may have what: a peer gives weights, moments and gradients to those whose work needs them, and to nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from blake3 import blake3

from muletrain.config.schema import RunConfig
from muletrain.errors import ProtocolError, Refused
from muletrain.model.spec import ModelSpec
from muletrain.network.memory import MemoryHub
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.join import messages as join
from muletrain.runs.join.client import JoinClient
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core.blocks import AskBlocks
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.core.messages import Message
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.members.messages import Acquaintances, Introduce, Member
from muletrain.runtime.peer.messages import Presence
from muletrain.runtime.peer.reporting import PeerHost
from muletrain.runtime.recovery.messages import AskStanding, StandsAt, StepBack
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.step.runner import StepRunner
from muletrain.runtime.transfer.messages import AskSnapshot, Snapshot

from .checkpoint_stages import LINEAGE, Stages, play
from .newcomers import introduction, rendezvous_of
from .targets import Target, until, warm_up
from .test_joining import context, step_of

if TYPE_CHECKING:
    from muletrain.network.memory import MemoryNetwork

pytestmark = pytest.mark.timeout(240)
PEERS = {"coordinator": 0, "a": 0, "b": 1, "c": 1, "d": 2, "e": 2}


async def asked(net: MemoryNetwork, donor: str, ask: Message) -> bytes:
    return await net.call(donor, ask.KIND, ask.pack(), timeout_s=10.0)


async def refused(net: MemoryNetwork, donor: str, ask: Message, match: str) -> None:
    with pytest.raises(Refused, match=match):
        await asked(net, donor, ask)


def part(stages: Stages, holder: str, step: int = 4) -> AskBlocks:
    """Asks for the part that ``holder`` has written."""
    own = stages.checkpoints[holder].open(Key(step, LINEAGE)).own
    assert own is not None
    return AskBlocks(digest=own[1].digest)


def test_a_part_of_a_checkpoint_is_for_its_stage_its_keepers_and_the_collector(tmp_path: Path) -> None:
    """Any member, and any visitor with the ticket, got the weights and moments of any stage."""

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", stages=PEERS)
        nets = {n: ctx.net for n, ctx in stages.contexts.items()}
        await stages.write(4, "b")
        stranger = stages.hub.join("stranger")
        keepers = stages.checkpoints["b"].roles.keepers(1, "b")
        others = {"a", "d", "e"} - {*keepers}
        assert len(keepers) == 2
        assert others
        for peer in others:
            await refused(nets[peer], "b", part(stages, "b"), "for the coordinator and for peers that serve or keep it")  # type: ignore[arg-type]
        await refused(stranger, "b", part(stages, "b"), "not a member")
        offer = b""
        for peer in (*keepers, "c", "coordinator"):
            offer = await asked(nets[peer], "b", part(stages, "b"))  # type: ignore[arg-type]
        copy = blake3(offer).digest()
        for thief in (*(nets[peer] for peer in others), stranger):  # one that has heard what it is called
            for ask in (AskBlocks(digest=copy), AskBlocks(digest=copy, blocks=(0,))):
                await refused(thief, "b", ask, "for the coordinator and for peers that|not a member")  # type: ignore[arg-type]
        assert await asked(nets["c"], "b", AskBlocks(digest=copy))  # type: ignore[arg-type]
        await stages.close()

    play(scenario)


def test_who_moves_by_a_step_back_gets_the_part_of_its_new_stage(tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run", stages=PEERS)
        await stages.write(4, "b")
        giver, mover = (
            stages.contexts["b"],
            next(p for p in "ade" if p not in stages.checkpoints["b"].roles.keepers(1, "b")),
        )
        net: Any = stages.contexts[mover].net
        await refused(net, "b", part(stages, "b"), "for the coordinator and for peers that serve or keep it")
        giver.roster.moved(mover, 1)
        assert await asked(net, "b", part(stages, "b"))
        await stages.close()

    play(scenario)


def test_the_state_and_gradients_of_a_stage_are_for_its_replicas(tmp_path: Path) -> None:
    async def scenario() -> None:
        await warm_up()
        target = Target(1, tmp_path)
        stranger = target.hub.join("stranger")
        await asyncio.sleep(0.2)
        for thief, said in ((target.others["first"], "for members that serve it"), (stranger, "not a member")):
            await refused(thief, target.name, AskSnapshot(stage=1), said)
        offer = Snapshot.unpack(await asked(target.others["last"], target.name, AskSnapshot(stage=1)))
        for thief in (target.others["first"], stranger):
            await refused(thief, target.name, AskBlocks(digest=offer.digest), "not kept for you")
            await refused(thief, target.name, AskBlocks(digest=offer.digest, blocks=(0,)), "not kept for you")
        assert await asked(target.others["last"], target.name, AskBlocks(digest=offer.digest))
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def test_the_founder_gives_a_guest_its_own_stages_part_and_only_until_the_run_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        config = RunConfig()
        parts = [{"file": name, "sha256": "00" * 32} for name in ("0", "1")]
        checkpoint = Checkpoint(tmp_path, {"step": 4, "parts": parts}, ModelSpec.from_config(config.model), config)
        for path in checkpoint.parts:
            path.write_bytes(f"weights of stage {path.name}".encode())
        own = rendezvous_of(hub.join("founder"), [1, 1], expected=2, checkpoint=checkpoint)
        own.open()
        own.seat("founder", introduction("founder"))
        guest, stranger = hub.join("guest"), hub.join("stranger")
        client, ask = JoinClient(guest, "founder"), join.AskPiece(offset=0, part=True)
        welcome = await client.join(introduction("guest"))
        assert await asked(guest, "founder", ask) == f"weights of stage {welcome.stage}".encode()
        await refused(stranger, "founder", ask, "did not wait for this machine")
        own.ready("founder", join.Ready(trainer=True, place=""))
        beginning = asyncio.create_task(client.begin(join.Ready(trainer=False, place="")))
        assert await own.gather() == await beginning
        await refused(guest, "founder", ask, "did not wait for this machine")

    asyncio.run(scenario())


# What others make a peer serve ------------------------------------------------------------------------------------------


def step_back(moves: dict[str, int]) -> StepBack:
    return StepBack(count=1, step=0, base=bytes(32), parts=(), moves=tuple(moves.items()), lost=(0,))


class OneStage(PeerHost):
    """A machine that has memory for ``stage`` alone."""

    def __init__(self, stage: int) -> None:
        self._stage = stage

    def fits(self, stage: int) -> bool:
        return stage == self._stage


def test_nobody_moves_a_peer_to_a_stage_that_it_has_no_room_for(tmp_path: Path) -> None:
    """Only the founder looked at what a joiner offered."""

    async def scenario() -> None:
        await warm_up()
        target = Target(1, tmp_path, host=OneStage(1))
        await asyncio.sleep(0.2)
        peer = target.peer
        order, last = step_back({target.name: 0}), target.others["last"]

        async def tell(sender: str, payload: bytes) -> bytes:
            at = {"branch": branch_of(order.lineage), "step": 0, "stage": 0, "state": State.TRAINING}
            return StandsAt(**at, targets=(), parts=(), began=order).pack()

        await refused(last, target.name, order, r"more memory than it may use \(--memory\)")
        assert any("step_back" in e.reason for e in target.refused())
        last.serve(AskStanding.KIND, tell)
        await target.send(
            "last", Presence(lineage=order.lineage, step=0).frame()
        )  # so it asks what that branch began with
        await until(lambda: any(e.reason.startswith("a rollback that moves") for e in target.refused()))
        peer.move(0)
        assert peer.destination is None
        assert not peer.departure.wanted
        assert not peer.begins_anew
        assert peer.roster.own.stage == 1
        async with asyncio.timeout(30):
            while not peer.begins_anew:  # an order is dropped while the peer still asks about the one before
                await asked(target.others["last"], target.name, step_back({"last": 0}))
                await asyncio.sleep(0.1)
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def test_a_newcomer_that_moved_while_we_were_away_is_asked_who_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run", stages=PEERS)
        await stages.write(4, "b")
        newcomer = stages.hub.join("newcomer")

        async def who(sender: str, payload: bytes) -> bytes:
            assert Introduce.unpack(payload).member is None
            own = Member(id="newcomer", name="newcomer", stage=1, trainer=False)
            return Acquaintances(members=(own,)).pack()

        newcomer.serve(Introduce.KIND, who)
        assert await asked(newcomer, "b", part(stages, "b"))
        await stages.close()

    play(scenario)


def test_the_gradient_of_a_step_that_lies_back_is_for_replicas_alone() -> None:
    """Also for one that has heard what it is called."""

    async def scenario() -> None:
        ctx = context()
        ctx.roster.admit(Member(id="c", name="c", stage=0, trainer=False))
        own = GradientLog(ctx, 1 << 30)
        own.follow("b", 0)
        for step in range(2):
            own.add(*step_of(step))
        await asyncio.sleep(0.1)
        state: Any = SimpleNamespace(gradient=None, other=None, builder=SimpleNamespace(tied=()))
        runner: Any = SimpleNamespace(state=state, _ctx=ctx, _log=own, _membership=Membership(ctx))
        copy = await StepRunner._given(runner, "b", bytes(32))
        assert copy is not None
        for name in (bytes(32), copy.digest):
            assert await StepRunner._given(runner, "b", name) is copy
            with pytest.raises(ProtocolError, match="not a member"):
                await StepRunner._given(runner, "stranger", name)
        assert await StepRunner._given(runner, "stranger", bytes(31) + b"1") is None, "perhaps a copy of another room"
        member: Any = SimpleNamespace(own=SimpleNamespace(stage=1), knows=ctx.roster.knows, member=ctx.roster.member)
        runner._ctx = SimpleNamespace(roster=member)
        assert await StepRunner._given(runner, "b", copy.digest) is None
        await ctx.tasks.close()

    asyncio.run(scenario())
