"""``muletrain start``: found and serve a run on several machines."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING

from muletrain.cli.actions.opening import How, first_checkpoint, names_data, opened, ready, save_config, tell_of
from muletrain.cli.actions.own_peers import OwnPeers, check_name, host_name
from muletrain.cli.actions.session import Session
from muletrain.errors import ConfigError
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.join.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from muletrain.cli.actions.own_peers import Listening
    from muletrain.config.schema import RunConfig
    from muletrain.runs.spec import WorkerSpec


def start_run(
    path: Path | None,
    overrides: Sequence[str],
    *,
    listening: Listening,
    json: bool,
    resume: Path | None = None,
    plan: Path | None = None,
    strategy: str | None = None,
    name: str | None = None,
    probe: bool = False,
) -> None:
    """Found or continue a run, and serve with this machine's peers; print the report at the end. ``plan`` and
    ``strategy``: see ``run_local``. Raises MuletrainError before anything starts."""
    check_name(name)
    with opened(path, overrides, "start", resume, plan, strategy) as (folder, config):
        peers = OwnPeers.on(name or host_name(), config.compute.device, config.compute.threads)
        _check_planned(peers.names, config.pipeline.machines, "pipeline.seats")
        _check_planned(peers.names, config.hub.servers, "hub.seats")
        listening = listening._replace(
            port=listening.port or config.network.port, announce=listening.announce or config.network.announce
        )
        with LocalFleet(folder, peers.threads) as fleet:
            fleet.spawn(peers.names)  # the processes import while we tokenise
            how = How(resumed=resume is not None, means_data=names_data(path, overrides))
            prepared, given, checkpoint, first_step = ready(folder, config, how)
            config = prepared.config
            run = Ticket.new_run(folder)
            if checkpoint is None and config.model.given is not None:
                checkpoint = first_checkpoint(folder, config, run.run_id)
            founder, *others = peers.specs(
                listening,
                ticket="",
                folder=str(folder),
                data="config",
                place=config.checkpoint.place,
                memory_gib=config.compute.memory,
                swap_folder=config.swap.folder,
            )
            first = {
                "role": "found",
                "ticket": str(run),
                "config": config.model_dump_json(by_alias=True),
                "resume": None if checkpoint is None else str(checkpoint),
                "probe": probe,
            }
            session = Session(folder, fleet, json=json, begun=lambda: save_config(folder, given))
            tell_of(prepared, folder, first_step)
            _serve(session, founder.model_copy(update=first), others, config)


def _check_planned(names: list[str], planned: list[str], field: str) -> None:
    if unknown := [name for name in names if planned and name not in planned]:
        raise ConfigError(
            f"{field}: the plan has no machine '{unknown[0]}' there; give this machine's name in the plan by --name NAME "
            f"(several GPUs are NAME-0, NAME-1 ...). The plan has {', '.join(planned)}"
        )


def _serve(session: Session, founder: WorkerSpec, others: list[WorkerSpec], config: RunConfig) -> None:
    """Begin the processes, print how machines join, and watch until the run ends."""
    session.founder = founder.name
    try:
        with session.interruptible():
            with session.console:
                session.fleet.begin(founder)
                ticket = session.wait_for_ticket(founder.name)
                for other in others:
                    session.fleet.begin(other.model_copy(update={"ticket": str(ticket)}))
                if session.json:
                    print(jsonlib.dumps({"kind": "ticket", "ticket": str(ticket)}), flush=True)
                names = ", ".join(spec.name for spec in (founder, *others))
                session.say(f"This machine is {names}. Run this on every other one:\n\nmuletrain join {ticket}\n")
                if (place := config.checkpoint.place) is not None:
                    session.say(f"On machines that can write to {place} themselves, add: --place {place}\n")
                session.say(
                    f"Other machines must reach {ticket.ports()}: open that port, or forward it and start with --announce.\n"
                )
                session.watch()
            session.report()
    finally:
        session.close()
    session.exit()
