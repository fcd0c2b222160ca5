"""Before step 0: whom the founder waits for, admits and seats, and what newcomers get."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.config.load import load_config
from muletrain.config.schema import Precision, RunConfig
from muletrain.data.tokens import TokenCache
from muletrain.errors import AdmissionError, CapacityError, PeerUnreachable
from muletrain.events import Event, EventLog, JoinRefused, Note
from muletrain.network.base import Network
from muletrain.network.memory import MemoryHub
from muletrain.runs.assemble import RunFacts, build_compute
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.host import Host
from muletrain.runs.join import newcomer
from muletrain.runs.join.admission import RunInfo
from muletrain.runs.join.client import JoinClient, find_admitter
from muletrain.runs.join.messages import READY_EVERY_S, AskAdmitter, Ready, Welcome
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure import machine
from muletrain.runs.parts import write_first_checkpoint
from muletrain.runs.spec import WorkerSpec
from muletrain.runtime.members.roster import Genesis
from tests.newcomers import GIB, NoTrial, introduction, rendezvous_of
from tests.virtual import virtually
from tests.whole_model import hugging_face_folder


def test_the_founder_does_not_begin_with_a_guest_that_left() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        founder = hub.join("founder")
        own = rendezvous_of(founder, [1, 1], expected=4)
        own.open()

        async def come(name: str) -> asyncio.Task[Genesis]:
            nets[name] = hub.join(name)
            client = JoinClient(nets[name], "founder")
            await client.join(introduction(name))
            return asyncio.create_task(client.begin(Ready(trainer=False, place="")))

        nets: dict[str, Network] = {}
        own.seat("founder", introduction("founder"))
        own.ready("founder", Ready(trainer=True, place=""))
        gathering = asyncio.create_task(own.gather())
        waiting = []
        for name in ("one", "two"):  # out of step with each other, so that one of them always speaks
            waiting.append(await come(name))
            await asyncio.sleep(READY_EVERY_S / 3)
        leaver = await come("leaver")
        leaver.cancel()
        await nets["leaver"].close()
        await asyncio.sleep(4 * READY_EVERY_S)
        assert not gathering.done()
        assert own.missing() == ["3 of 4 peers ready"], "its seat is free again"
        waiting.append(await come("three"))
        genesis = await asyncio.wait_for(gathering, READY_EVERY_S)
        assert {m.id for m in genesis.members} == {"founder", "one", "two", "three"}
        assert await asyncio.wait_for(asyncio.gather(*waiting), READY_EVERY_S) == [genesis] * 3

    virtually(scenario(), 1000.0)


def test_the_machines_that_wait_are_servers_and_clients() -> None:
    async def waiting() -> list[int]:
        own = rendezvous_of(MemoryHub().join("a"), [1, 1], expected=4)
        own.seat("a", introduction("a"))
        own.add("c", introduction("c"), Welcome(config="", stage=1, data=bytes(32), tokenizer_size=0, client=True))
        own.seat("b", introduction("b"))
        return own.machines()

    assert asyncio.run(waiting()) == [1, 2]


def test_every_peer_with_the_data_trains_unless_fewer_are_wanted() -> None:
    async def trainers(limit: int | None) -> tuple[list[str], list[str]]:
        said: list[Event] = []
        hub = MemoryHub()
        own = rendezvous_of(hub.join("a"), [1], expected=4, trainers=limit, emit=said.append)
        for name in "bcd":
            JoinClient(hub.join(name), "a")
        for name in "abcd":
            own.seat(name, introduction(name))
            own.ready(name, Ready(trainer=name != "c", place=""))
        genesis = await own.gather()
        return [m.id for m in genesis.members if m.trainer], [e.message for e in said if isinstance(e, Note)]

    assert asyncio.run(trainers(None)) == (["a", "b", "d"], [])
    told = ["2 of 3 peers that have the data build microbatches (fleet.trainers)"]
    assert asyncio.run(trainers(2)) == (["a", "b"], told)


def test_a_newcomer_with_another_corpus_says_why_it_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the one who came and the one who waits are told."""
    (tmp_path / "ours.txt").write_text("\n\n".join(f"Mules carry {n} loads over bad roads." for n in range(300)))
    (tmp_path / "theirs.txt").write_text("\n\n".join(f"Horses carry {n} riders over good ones." for n in range(300)))
    config = load_config(
        None, [f"data.path={tmp_path}/ours.txt", f"data.cache={tmp_path}/cache", "model.vocab=300", "fleet.peers=2"]
    )
    cache = TokenCache.build(config.data, config.model.vocab)
    ticket = Ticket("run", bytes(32), bytes(32), ("/memory/p2p/founder",))
    spec = WorkerSpec(
        role="join",
        name="b",
        ticket=str(ticket),
        folder=str(tmp_path),
        data=f"{tmp_path}/theirs.txt",
        memory_gib=1.0,
        device="cpu",
        precision="fp32",
    )
    told: list[Event] = []
    monkeypatch.setattr(newcomer, "Trial", NoTrial)

    async def scenario() -> None:
        hub = MemoryHub()
        info = RunInfo(config.model_dump_json(by_alias=True), bytes.fromhex(cache.digest), cache.tokenizer_json)
        own = rendezvous_of(hub.join("founder"), [1, 1], 2, emit=told.append, info=info)
        own.open()
        own.seat("founder", introduction("founder"))
        waiting = own.missing()
        with (
            EventLog(tmp_path / "b.jsonl", "b") as log,
            pytest.raises(AdmissionError, match=r"theirs\.txt: this corpus"),
        ):
            await newcomer.join(Host(spec, log, LoopClock()), hub.join("b"))
        assert own.missing() == waiting, "its seat is free again"

    asyncio.run(scenario())
    (refused,) = [e for e in told if isinstance(e, JoinRefused)]
    assert refused.remote == "b"
    assert "theirs.txt: this corpus has digest" in refused.reason
    assert "join without --data" in refused.reason


def test_a_waiting_run_says_what_a_stage_needs_and_the_largest_offer_that_came() -> None:
    own = rendezvous_of(MemoryHub().join("founder"), [4 * GIB, 10 * GIB], expected=2)
    assert own.missing() == [
        "stage 0 has no peer (needs 4 GiB)",
        "stage 1 has no peer (needs 10 GiB)",
        "no peer has the data (join --data PATH)",
    ]
    own.seat("founder", introduction("founder", 5 * GIB))
    own.ready("founder", Ready(trainer=True, place=""))
    assert own.missing() == ["stage 1 has no peer (needs 10 GiB; the largest offer so far is 5 GiB)"]
    with pytest.raises(CapacityError, match=r"needs 4 GiB \(weights .* may use 3 GiB: give it more memory"):
        own.seat("small", introduction("small", 3 * GIB))
    assert own.seat("middle", introduction("middle", 8 * GIB)) == 0
    assert own.missing() == [
        "stage 1 has no peer (needs 10 GiB; the largest offer so far is 8 GiB)",
        "1 of 2 peers ready, middle preparing",
    ]
    gpu = introduction("gpu", 8 * GIB, device="cuda", host=4 * GIB)
    with pytest.raises(CapacityError, match="needs 5 GiB on a GPU and 5 GiB beside it"):
        own.seat("gpu", gpu.model_copy(update={"stage": 1}))
    assert own.seat("gpu", gpu.model_copy(update={"stage": 1, "host_memory": 5 * GIB})) == 1
    for name in ("middle", "gpu"):
        own.ready(name, Ready(trainer=False, place=""))
    assert own.missing() == []


def test_guests_of_one_name_get_names_of_their_own_and_a_place_that_is_given_back_frees_its_name() -> None:
    own = rendezvous_of(MemoryHub().join("founder"), [1, 1], expected=2)
    for peer in ("a", "b", "b"):  # the second asks twice
        own.seat(peer, introduction("mule"))
    assert own.names() == {"a": "mule", "b": "mule-2"}
    assert own.remove("a")
    own.seat("c", introduction("mule"))
    assert own.names() == {"b": "mule-2", "c": "mule"}


def test_a_machine_takes_the_stage_that_few_can_serve() -> None:
    own = rendezvous_of(MemoryHub().join("founder"), [4 * GIB, 10 * GIB, 4 * GIB], expected=3)
    assert own.seat("large", introduction("large", 12 * GIB)) == 1
    assert own.seat("small", introduction("small", 5 * GIB)) == 0
    assert own.seat("twin", introduction("twin", 5 * GIB)) == 2
    roomy = rendezvous_of(MemoryHub().join("founder"), [4 * GIB, 10 * GIB], expected=2)
    assert roomy.seat("huge", introduction("huge", 100 * GIB)) == 0, "where it makes no difference, the first"


def test_kinds_of_devices_are_not_mixed_in_a_stage_where_it_can_be_avoided() -> None:
    said: list[Event] = []
    own = rendezvous_of(MemoryHub().join("founder"), [1, 1], expected=2, emit=said.append)
    coming = [("cpu", 0), ("cuda", 1), ("cuda", 1), ("cuda", 1), ("cpu", 0), ("mps", 0)]
    for k, (device, expected) in enumerate(coming):
        peer = introduction(f"p{k}", device=device, host=1 if device == "cuda" else None)
        assert own.seat(f"p{k}", peer) == expected
    assert [type(e).__name__ for e in said] == ["Note"], "the last one found no stage of its kind"


def test_who_joins_gets_its_first_weights_and_needs_no_folder(tmp_path: Path) -> None:
    class Cache:
        tokenizer_json, digest = b"{}", ""

    first = hugging_face_folder(tmp_path / "llama")
    model = {"width": 64, "heads": 2, "context": 32, "from": str(tmp_path / "llama")}
    facts = RunFacts.of(RunConfig.model_validate({"model": model}))
    write_first_checkpoint(facts, Cache, tmp_path / "checkpoints", "run", lambda done: None)  # type: ignore[arg-type]
    checkpoint = Checkpoint.newest_intact(tmp_path, pytest.fail)
    assert checkpoint is not None
    shutil.rmtree(tmp_path / "llama")

    async def scenario() -> None:
        hub = MemoryHub()
        own = rendezvous_of(hub.join("founder"), [1, 1], expected=2, checkpoint=checkpoint)
        own.open()
        own.seat("founder", introduction("founder"))
        client = JoinClient(hub.join("newcomer"), "founder")
        welcome = await client.join(introduction("newcomer"))
        await client.part(welcome, tmp_path / "part")
        here = machine.Machine.probe("cpu", Precision.FP32, 1.0)
        compute = build_compute(facts, welcome.stage, here, None, tmp_path / "part")
        state = await compute.state()
        weights = {name.removeprefix("model/"): t for name, t in state.items() if name.startswith("model/")}
        assert "lm_head.weight" in weights, "the second stage"
        assert all(torch.equal(weights[name], first[name]) for name in weights)
        compute.close()

    asyncio.run(scenario())


def test_before_the_run_begins_any_member_says_that_the_founder_admits() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        founder, member, newcomer = (hub.join(name) for name in ("founder", "member", "newcomer"))
        with pytest.raises(AdmissionError, match="ask for a ticket of 'muletrain start'"):
            await find_admitter(newcomer, ("/memory/p2p/founder",))  # does not serve it yet
        with pytest.raises(PeerUnreachable, match="no member of the ticket answers"):
            await find_admitter(newcomer, ("/memory/p2p/gone",))
        with pytest.raises(AdmissionError, match="it names none"):
            await find_admitter(newcomer, ())
        JoinClient(member, founder.peer_id)
        addresses = ("/memory/p2p/gone", "/memory/p2p/member")
        assert await find_admitter(newcomer, addresses) == "founder"
        frozen = hub.join("frozen")
        frozen.serve(AskAdmitter.KIND, never)
        async with asyncio.timeout(5):
            assert await find_admitter(newcomer, ("/memory/p2p/frozen", *addresses)) == "founder"

    async def never(sender: str, payload: bytes) -> bytes:
        await asyncio.sleep(3600)
        return b""

    asyncio.run(scenario())
