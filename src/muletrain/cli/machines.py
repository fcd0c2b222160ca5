"""A run on several machines: ``start``, ``join``, ``status``, ``stop``, ``ticket``."""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import secrets
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from muletrain.cli.console import make_console
from muletrain.cli.session import Session
from muletrain.cli.train import prepare
from muletrain.config.dump import dump_toml
from muletrain.config.load import load_config
from muletrain.errors import MuletrainError, NetworkError
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.folder import ROOT, new_run_folder
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.ticket import Ticket
from muletrain.runs.worker_files import TICKET_FILE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from muletrain.network.base import Network, PeerId

STOP_TIMEOUT_S = 10.0


def start_run(
    path: Path | None, overrides: Sequence[str], *, listen: str, port: int, announce: tuple[str, ...], json: bool
) -> None:
    """Found a run and serve one of its peers; the report comes when it ends. Raises MuletrainError before anything starts."""
    config = load_config(path, overrides)
    folder = new_run_folder(path.stem if path is not None else "start")
    (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    name = _host()
    threads = config.compute.threads or os.cpu_count() or 1
    with LocalFleet(folder, threads) as fleet:
        fleet.spawn([name])
        config = prepare(config, quiet=json)
        session = Session(folder, fleet, json=json)
        spec = WorkerSpec(
            role="found",
            name=name,
            ticket=str(Ticket.new_run()),
            config=config.model_dump_json(by_alias=True),
            folder=str(folder),
            threads=threads,
            data="config",
            device=config.compute.device,
            memory_gib=config.compute.memory,
            listen=listen,
            port=port or config.network.port,
            announce=announce or config.network.announce,
        )
        try:
            with session.interruptible("the run"), session.console:
                fleet.begin(spec)
                ticket = session.wait_for_ticket(name)
                session.say(f"on every other machine:\n\nmuletrain join {ticket}\n")
                session.watch()
            session.report()
        finally:
            session.close()


def join_run(
    ticket: str,
    *,
    data: str | None,
    stage: int | None,
    memory: float | None,
    device: str,
    threads: int | None,
    listen: str,
    port: int,
    json: bool,
) -> None:
    """Serve until the run ends. Raises MuletrainError with the reason when the run does not take us."""
    Ticket.parse(ticket)
    devices = _devices(device)
    folder = new_run_folder("join")
    host = f"{_host()}-{secrets.token_hex(2)}"  # two machines may have one name
    names = [host if len(devices) == 1 else f"{host}-{k}" for k in range(len(devices))]
    threads = threads or max(1, (os.cpu_count() or 1) // len(devices))
    where = (
        "none" if data is None else os.path.abspath(data) if not data.startswith("hf:") and data != "pydoc" else data
    )
    with LocalFleet(folder, threads) as fleet:
        fleet.spawn(names)
        session = Session(folder, fleet, json=json)
        try:
            with session.interruptible("the run", orderly=False), session.console:
                for k, (name, own) in enumerate(zip(names, devices, strict=True)):
                    fleet.begin(
                        WorkerSpec(
                            role="join",
                            name=name,
                            ticket=ticket,
                            folder=str(folder),
                            threads=threads,
                            data=where,
                            device=own,
                            stage=stage,
                            memory_gib=memory,
                            listen=listen,
                            port=port + k if port else 0,
                            keeps_ticket=True,
                        )
                    )
                session.watch()
        except KeyboardInterrupt:
            session.say("left the run")
        finally:
            session.close()


def show_status(ticket: str | None, *, json: bool) -> None:
    """Print what the members announced in the directory."""

    async def look(network: Network, run_id: str) -> dict[PeerId, bytes]:
        return await network.lookup(f"{run_id}/peers")

    found = asyncio.run(_as_member(_ticket(ticket), look))
    peers: list[dict[str, Any]] = sorted(
        ({"id": peer, **jsonlib.loads(value)} for peer, value in found.items()), key=lambda p: (p["stage"], p["name"])
    )
    if json:
        print(jsonlib.dumps(peers))
        return
    if not peers:
        print("no peer has announced itself: the run has not begun yet (or has just ended)")
        return
    table = Table("stage", "peer", "step", "trainer", "id", title=f"{len(peers)} peers")
    for p in peers:
        table.add_row(str(p["stage"]), p["name"], str(p["step"]), "yes" if p["trainer"] else "", p["id"][-8:])
    make_console().print(table)


def stop_run(ticket: str | None) -> None:
    """Ask any member; the request travels in the next step record, so that everyone stops after the same step."""
    from muletrain.swarm.messages import StopRun

    async def ask(network: Network, run_id: str) -> str:
        problems = []
        for peer in sorted(await network.lookup(f"{run_id}/peers")):
            try:
                await network.call(peer, StopRun.KIND, StopRun().pack(), timeout_s=STOP_TIMEOUT_S)
            except NetworkError as e:
                problems.append(str(e))
            else:
                return peer
        raise MuletrainError(
            "; ".join(problems) or "no peer has announced itself yet; end a waiting run with Ctrl-C at 'start'"
        )

    asyncio.run(_as_member(_ticket(ticket), ask))
    print("the run ends after the step it is in; the checkpoint goes to the run folder of 'start'")


def own_ticket() -> str:
    """The newest ticket under ``runs/``. Raises MuletrainError when this machine is in no run."""
    found = sorted(ROOT.glob(f"*/{TICKET_FILE}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise MuletrainError(
            f"no running run under {ROOT.resolve()}; give the ticket, or call from where 'start' or 'join' was called"
        )
    return found[-1].read_text(encoding="utf-8").strip()


def _ticket(text: str | None) -> Ticket:
    return Ticket.parse(text or own_ticket())


async def _as_member(ticket: Ticket, work: Callable[[Network, str], Awaitable[Any]]) -> Any:
    """Enter the run's network for one question."""
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.runs.worker import PROTOCOL

    with tempfile.TemporaryDirectory(prefix="mule-") as folder:
        network = await Libp2pNetwork.create(
            run_id=ticket.run_id,
            secret=ticket.secret,
            protocol=PROTOCOL,
            folder=Path(folder),
            listen="0.0.0.0",
            initial_peers=ticket.addresses,
        )
        try:
            return await work(network, ticket.run_id)
        finally:
            await network.close()


def _devices(asked: str) -> list[str]:
    """Every GPU under 'auto', else what was asked for."""
    if asked != "auto":
        return [asked]
    import torch

    return [f"cuda:{k}" for k in range(torch.cuda.device_count())] or ["auto"]


def _host() -> str:
    return socket.gethostname().split(".")[0][:32] or "peer"
