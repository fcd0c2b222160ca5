"""A joiner's limits are its own: what a founder asks for beyond them is refused before anything is taken, and the
founder hears why."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from muletrain.clock import LoopClock
from muletrain.compute.estimate import Offer
from muletrain.config.load import load_config
from muletrain.errors import AdmissionError, CapacityError, ConfigError, MuletrainError
from muletrain.events import EventLog
from muletrain.network.memory import MemoryHub
from muletrain.runs.assemble import RunFacts, build_compute
from muletrain.runs.host import Host
from muletrain.runs.join import messages, newcomer
from muletrain.runs.join.limits import check_tokenizer, largest_tokenizer
from muletrain.runs.join.messages import PIECE
from muletrain.runs.join.newcomer import join
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure.machine import Machine
from muletrain.runs.spec import WorkerSpec
from muletrain.runtime.checkpoint.messages import largest_part
from muletrain.runtime.core.disk import SPARE_BYTES, check_room
from muletrain.wire.statefile import StateBuffers
from tests.newcomers import GIB, NoTrial
from tests.runners import TICKET, host_of
from tests.targets import resident_bytes

pytestmark = pytest.mark.timeout(120)
SMALL = ("model.width=64", "model.heads=2", "model.context=32", "model.vocab=300")
LARGE = ("model.width=2048", "model.heads=16", "model.layers=8")


@pytest.fixture(autouse=True)
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """``test_trial`` has those limits."""
    monkeypatch.setattr(newcomer, "Trial", NoTrial)


class Founder:
    """Says what it likes, and counts what it is asked for."""

    def __init__(self, hub: MemoryHub, overrides: tuple[str, ...], **told: Any) -> None:
        self.asked: list[str] = []
        self.declined: list[str] = []
        config = load_config(None, list(overrides)).model_dump_json(by_alias=True)
        self.welcome = {"config": config, "stage": 0, "data": bytes(32), "tokenizer_size": 10} | told
        net = hub.join("founder")
        for message in (
            messages.AskAdmitter,
            messages.JoinRequest,
            messages.AskPiece,
            messages.Declined,
        ):
            net.serve(message.KIND, self._answers(message))

    def _answers(self, kind: type[messages.Message]) -> Any:
        async def answer(sender: str, payload: bytes) -> bytes:
            self.asked.append(kind.KIND)
            if kind is messages.AskAdmitter:
                return messages.Admitter(id="founder").pack()
            if kind is messages.JoinRequest:
                return messages.Welcome(**self.welcome).pack()
            if kind is messages.Declined:
                self.declined.append(messages.Declined.unpack(payload).reason)
                return b""
            return bytes(messages.PIECE)

        return answer


def joined(
    tmp_path: Path, memory_gib: float, *overrides: str, text: str = "none", **told: Any
) -> tuple[MuletrainError, Founder]:
    """What a machine that offers so much says to such a founder."""

    async def scenario() -> tuple[MuletrainError, Founder]:
        hub = MemoryHub()
        founder = Founder(hub, overrides, **told)
        ticket = Ticket("run", bytes(32), bytes(32), ("/memory/p2p/founder",))
        spec = WorkerSpec(
            role="join",
            name="a",
            folder=str(tmp_path),
            ticket=str(ticket),
            device="cpu",
            memory_gib=memory_gib,
            data=text,
        )
        with EventLog(tmp_path / "a.jsonl", "a") as log, pytest.raises(MuletrainError) as refusal:
            await join(Host(spec, log, LoopClock()), hub.join("a"))  # type: ignore[arg-type]
        return refusal.value, founder

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("memory_gib", "overrides", "told", "kind", "said"),
    [
        (
            0.1,
            LARGE,
            {},
            CapacityError,
            r"stage 0 needs .* this machine may use 102 MiB: it does not serve it; even swapped it needs .*\. Give more \(--memory",
        ),
        (0.1, LARGE, {"running": True, "name": "a"}, CapacityError, "this machine may use"),
        (2.0, SMALL, {"stage": 7}, AdmissionError, r"serve stage 7 of a run with stages 0..1; nothing was taken"),
        (
            2.0,
            SMALL,
            {"tokenizer_size": 200 << 20},
            AdmissionError,
            "a tokenizer of 200 MiB, and the run's vocabulary takes at most 4",
        ),
        (2.0, SMALL, {"part_size": 1 << 40}, AdmissionError, "a checkpoint's part of .* and stage 0 has at most"),
        (2.0, SMALL, {"config": "{"}, AdmissionError, "cannot be run"),
        (
            2.0,
            SMALL,
            {"config": '{"model": {"layers": 1000000}, "fleet": {"stages": 3000}}'},
            ConfigError,
            "say how many layers each",
        ),
    ],
)
def test_a_founder_that_asks_for_too_much_is_refused_before_anything_is_taken(
    memory_gib: float,
    overrides: tuple[str, ...],
    told: dict[str, Any],
    kind: type[MuletrainError],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = resident_bytes()
    error, founder = joined(tmp_path, memory_gib, *overrides, **told)
    assert isinstance(error, kind)
    with pytest.raises(kind, match=said):
        raise error
    assert founder.declined == [str(error)], "and the founder's people hear why"
    assert founder.asked == ["join.admitter", "join.request", "join.declined"]
    assert not list(temporary.iterdir())
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("too_large", ["model", "tokenizer"])
def test_what_the_trial_did_not_get_through_is_never_built_here(
    too_large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Tried(NoTrial):
        def bound(self, offer: Offer) -> None:
            done.append(f"bound {offer.device / GIB:.0f}")

        async def build(self, config: str, stage: int) -> None:
            assert config == load_config(None, list(SMALL)).model_dump_json(by_alias=True)
            self._try("model", f"{stage}")

        async def tokens(self, config: str, tokenizer: bytes, data: str, digest: str) -> None:
            assert tokenizer == bytes(PIECE)
            self._try("tokenizer", f"{data} {digest[:2]}")

        async def close(self) -> None:
            done.append("close")

        def _try(self, what: str, of: str) -> None:
            done.append(f"{what} {of}")
            if what == too_large:
                raise CapacityError(f"the run's {what} is too large")

    def built(what: str) -> Any:
        return lambda *_: done.append(f"{what} here")

    monkeypatch.setattr(newcomer, "Trial", Tried)
    monkeypatch.setattr(newcomer, "own_data", built("data"))
    if too_large == "model":
        monkeypatch.setattr(newcomer, "told_config", built("model"))
    told = {"stage": 1, "tokenizer_size": PIECE, "data": b"\x01" * 32}
    error, founder = joined(tmp_path, 2.0, *SMALL, text="ours.txt", **told)
    assert (type(error), str(error)) == (CapacityError, f"the run's {too_large} is too large")
    assert done == ["bound 2", "model 1", *(["tokenizer ours.txt 01"] if too_large == "tokenizer" else []), "close"]
    assert founder.declined == [str(error)]


def test_a_stage_that_does_not_fit_is_never_built_whoever_says_so(tmp_path: Path) -> None:
    """After a move, or a step back, too."""
    facts = RunFacts.of(load_config(None, list(LARGE)))
    spec = WorkerSpec(role="join", name="a", folder=str(tmp_path), ticket=TICKET)
    machine = Machine.probe("cpu", facts.config.compute.precision, 0.1)
    with pytest.raises(CapacityError, match="stage 1 needs"):
        asyncio.run(host_of(spec).build(facts, 1, machine, None))


@pytest.mark.parametrize("delayed", [False, True])
def test_what_a_part_may_have_is_what_parts_have(*, delayed: bool) -> None:
    facts = RunFacts.of(
        load_config(
            None, ["model.width=16", "model.heads=2", "model.layers=8", f"optimizer.delayed={str(delayed).lower()}"]
        )
    )

    async def size() -> int:
        machine = Machine.probe("cpu", facts.config.compute.precision, 1.0)
        compute = build_compute(facts, 1, machine, None)
        written = sum(map(len, StateBuffers(await compute.state())))
        compute.close()
        return written

    known = facts.plan().state_bytes[1]
    assert known < asyncio.run(size()) <= largest_part(known) - (15 << 16), "most of that megabyte is to spare"


def test_a_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=SPARE_BYTES + 100))
    check_room(str(tmp_path), 100, "")
    with pytest.raises(CapacityError, match=r"free some space, or set TMPDIR"):
        check_room(str(tmp_path), 101, "set TMPDIR")
    error, founder = joined(tmp_path, 2.0, *SMALL, part_size=1 << 20)
    assert "set TMPDIR to another folder" in str(error)
    assert founder.asked[-1] == "join.declined"


def test_a_tokenizer_that_nobody_would_take_is_refused_by_the_founder() -> None:
    facts = RunFacts.of(load_config(None, ["model.vocab=50000"]))
    check_tokenizer(facts, largest_tokenizer(facts))
    with pytest.raises(ConfigError, match=r"data.tokenizer: .* model.vocab = 50000: machines that join take at most"):
        check_tokenizer(facts, largest_tokenizer(facts) + 1)
