"""``muletrain doctor``: every check finds what it is there for, none hangs, and each says what to do."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import sys
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from muletrain.cli import main
from muletrain.cli.actions import examine as cli_doctor
from muletrain.config.load import load_config
from muletrain.errors import AdmissionError, Refused
from muletrain.policy.recent import Bucket
from muletrain.runs.doctor import examination as doctor
from muletrain.runs.doctor import machine_checks as doctor_machine
from muletrain.runs.doctor import network_checks as doctor_network
from muletrain.runs.doctor.examination import Check, Part, Question, Verdict, ask
from muletrain.runs.join.removal import serve_members
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure.vicinity import BURST, PER_S, Seen, seen_by, serve_sight, sights
from tests.daemons import OWNER, SECRET, world

PART = Part("part", 1.0, {"first": "mend the first", "second": "mend the second", "third": "mend the third"})


def question(*overrides: str, listen: str = "127.0.0.1", port: int = 0) -> Question:
    config = load_config(None, overrides).model_dump_json(by_alias=True)
    return Question(config=config, ticket=None, listen=listen, port=port, announce=())


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (low, high), (torch_low, torch_high) = (
        [".".join(map(str, v)) for v in versions] for versions in (doctor.PYTHON, doctor.TORCH)
    )
    assert project["requires-python"] == f">={low},<{high}"
    assert f"torch>={torch_low},<{torch_high}" in project["dependencies"]
    assert any(d in doctor.NETWORK.fixes["network engine"] for d in project["dependencies"])


def test_a_python_that_is_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 0))
    assert doctor.python().verdict is Verdict.MISSING
    assert "3.11 to 3.13" in doctor.python().fix


@pytest.mark.parametrize(
    ("then", "found"),
    [
        ("sleep 60", "no answer within 1 s"),
        ("kill -4 $$", "killed by signal 4"),
        ("echo first lines >&2; echo 'libtorch.so: no such file' >&2; exit 1", "libtorch.so: no such file"),
    ],
)
def test_what_hangs_or_crashes_is_a_finding_and_no_harm(then: str, found: str) -> None:
    first = Check("first", Verdict.OK, "fine")
    begin = time.monotonic()
    script = f"echo noise; echo '{json.dumps(asdict(first))}'; {then}"
    checks = list(ask(PART, question(), ["sh", "-c", script]))
    assert time.monotonic() - begin < 10
    assert checks[0] == first
    assert (checks[1].name, checks[1].verdict, checks[1].fix) == ("second", Verdict.MISSING, "mend the second")
    assert found in checks[1].found
    assert [(c.name, c.verdict) for c in checks[2:]] == [("third", Verdict.UNKNOWN)]


def test_this_machine(tmp_path: Path) -> None:
    """Which runs these tests, and so has what it takes."""
    checks = list(doctor_machine.machine_checks(question()))
    assert {"torch", "GPU", "memory", "disk"} == {c.name for c in checks}
    assert not [c for c in checks if c.verdict is Verdict.MISSING]
    huge = question(
        "model.preset=llama-7b", "model.width=65536", "model.layers=2", "compute.device=cpu", "compute.memory=1.0"
    )
    memory, *disks = [c for c in doctor_machine.machine_checks(huge) if c.name in ("memory", "disk")]
    assert memory.verdict is Verdict.MISSING
    assert "1 GiB" in memory.found
    assert "2 stages" in memory.found
    assert "fleet.stages" in memory.fix
    assert disks[0].verdict is Verdict.WARNING, "three checkpoints of hundreds of billions of parameters"
    settings = ("swap.whole=true", "fleet.stages=1", "compute.device=cpu", "compute.memory=0.03")
    for peers, alone in (1, True), (2, False):
        found = [c.found for c in doctor_machine.machine_checks(question(*settings, f"fleet.peers={peers}"))]
        assert any("where nobody joins" in f for f in found) == alone
    (absent,) = [c for c in doctor_machine.machine_checks(question("compute.device=cuda:77")) if c.name == "memory"]
    assert "no cuda:77 here" in absent.found


def test_a_torch_that_is_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    check = doctor_machine.torch_check()
    assert check.verdict is Verdict.WARNING
    assert check.found.startswith("2.4.1+cu121")
    assert "pip install 'torch>=2.11,<2.14'" in check.fix


def test_a_gpu_that_torch_does_not_see_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor_machine.shutil, "which", lambda name: f"/usr/bin/{name}")  # nvidia-smi is here
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "pip install --force-reinstall torch==" in doctor_machine.no_gpu_check("auto").fix
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert doctor_machine.no_gpu_check("cuda").verdict is Verdict.MISSING
    assert "nvidia-smi" in doctor_machine.no_gpu_check("auto").fix


def test_a_disk_with_little_room_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**8))
    checks = list(doctor_machine.disk_checks(load_config(None, []), tmp_path))
    assert [c.verdict for c in checks] == [Verdict.OK, Verdict.WARNING, Verdict.WARNING], (
        "checkpoints are small, text may be large"
    )
    assert "100 MB free for tokenised text" in checks[1].found
    assert checks[1].fix == "free some space, or set data.cache to another folder"


def test_what_to_do_stands_below_what_was_found_in_80_columns() -> None:
    text = io.StringIO()
    missing = Check(
        "from outside", Verdict.WARNING, "none of 2 members can connect", doctor_network.OPEN.format(port=4000)
    )
    same = [Check(name, Verdict.UNKNOWN, "nobody answers", "try again") for name in doctor_network.OF_THE_RUN]
    Console(file=text, width=80).print(cli_doctor.table([missing, *same]))
    shown = text.getvalue()
    assert "what to do: " in shown
    assert "TCP port 4000" in shown
    assert shown.count("try again") == 1
    assert all(name in shown for name in doctor_network.OF_THE_RUN)


def test_a_folder_that_takes_nothing_is_said() -> None:
    check = doctor_machine.disk_check(Path("/proc/nowhere"), 0, "for text", "take another")
    assert (check.verdict, check.fix) == (Verdict.MISSING, "take another")


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = asyncio.run(doctor_network.listening(question(port=taken.getsockname()[1])))
    assert check.verdict is Verdict.MISSING
    assert "Address already in use" in check.found
    assert "choose another (--port)" in check.fix


@pytest.mark.parametrize(
    ("ahead_s", "off_s", "verdict", "found"),
    [
        ([0.2, -0.1, 500.0], 0.05, Verdict.OK, "0.20 s behind"),
        ([-2.0], 0.1, Verdict.WARNING, "2.00 s ahead of"),
        ([60.0, 61.0, 62.0], 0.1, Verdict.MISSING, "61.00 s behind"),
        ([2.0], 2.5, Verdict.OK, "2.00 s behind"),
    ],
)
def test_clocks(ahead_s: list[float], off_s: float, verdict: Verdict, found: str) -> None:
    check = doctor_network.clock(ahead_s, off_s)
    assert check.verdict is verdict
    assert found in check.found
    assert bool(check.fix) == (verdict is not Verdict.OK)


def seen(reached: bool | None, host: str = "84.1.2.3", *, carries: bool = True) -> Seen:
    return Seen(time=time.time(), host=host, reached=reached, carries=carries)


def verdicts(*answers: Seen) -> dict[str, Check]:
    return {check.name: check for check in doctor_network.ways(list(answers), 4000, {"192.168.1.7"})}


def test_ways_from_outside() -> None:
    closed = verdicts(seen(False), seen(None, ""), seen(False))
    assert closed["from outside"].verdict is Verdict.WARNING, "it can join all the same"
    for fact in ("none of 2 members", "TCP port 4000 of 84.1.2.3", "router"):
        assert fact in closed["from outside"].found
    assert "/ip4/PUBLIC-ADDRESS/tcp/4000" in closed["from outside"].fix
    assert closed["relay"].verdict is Verdict.OK
    assert "relay" in closed["hole punching"].found
    assert verdicts(seen(True, "192.168.1.7"), seen(False))["from outside"].verdict is Verdict.OK
    assert verdicts(seen(None))["from outside"].verdict is Verdict.UNKNOWN
    assert verdicts(seen(False, carries=False))["relay"].verdict is Verdict.WARNING


@pytest.mark.alone
def test_members_say_how_they_see_us_and_strangers_nothing() -> None:
    async def scenario() -> None:
        async with world() as w:
            member = await w.open()
            visitor = await w.open(member, visitor=True)
            serve_sight(member, carries=True)
            serve_members(member, lambda: {member.peer_id: "a"})
            ticket = Ticket("run", SECRET, OWNER.public, (member.addresses()[0],))
            by_name = {c.name: c for c in await doctor_network.checks_by_members(visitor, ticket, question())}
            assert [c.verdict for c in by_name.values()] == [Verdict.OK] * 5, by_name
            assert by_name["from outside"].found.startswith("1 of 1 member ")
            with socket.socket() as nobody:  # bound, and not listening
                nobody.bind(("127.0.0.1", 0))
                (closed, ahead_s, _), *_ = (await sights(visitor, [member.peer_id], nobody.getsockname()[1])).values()
            assert (closed.host, closed.reached) == ("127.0.0.1", False)
            assert abs(ahead_s) < 1
            stranger = await w.open(run_id="another run")
            with pytest.raises(AdmissionError):
                await stranger.connect([member.addresses()[0]], timeout_s=5)
            with pytest.raises(Refused):
                await seen_by(stranger, member.peer_id)

    asyncio.run(scenario())


def test_a_member_connects_back_a_few_times_only() -> None:
    dials = Bucket(BURST, PER_S)
    assert [dials.take(7.0) for _ in range(int(BURST) + 2)] == [True] * int(BURST) + [False] * 2
    assert [dials.take(8.0) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.MISSING, 1), (Verdict.WARNING, 0)])
def test_the_command(verdict: Verdict, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []

    def examine(question: Question, told: object) -> list[Check]:
        asked.append(question)
        return [Check("torch", Verdict.OK, "2.12"), Check("clock", verdict, "an hour ahead", "set it")]

    monkeypatch.setattr(cli_doctor, "examine", examine)
    words = ["doctor", "--port", "4000", "--set", "network.announce=['/ip4/1.2.3.4/tcp/4000']"]
    people, program = (CliRunner().invoke(main.app, [*words, *more]) for more in ([], ["--json"]))
    assert people.exit_code == program.exit_code == code
    assert "set it" in people.stdout
    answer = json.loads(program.stdout)
    assert answer["ready"] == (code == 0)
    assert answer["checks"][1] == {"name": "clock", "verdict": verdict, "found": "an hour ahead", "fix": "set it"}
    assert (asked[0].port, asked[0].announce) == (4000, ("/ip4/1.2.3.4/tcp/4000",))
