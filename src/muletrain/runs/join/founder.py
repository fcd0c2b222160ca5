"""The founder of a run: it opens the lobby, waits for the others, and begins."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.schema import RunConfig
from muletrain.data.tokens import TokenCache
from muletrain.errors import CheckpointError
from muletrain.runs.assemble import RunFacts, resolve_start
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.corpus import owners_sharing
from muletrain.runs.host import place_of
from muletrain.runs.join.limits import check_tokenizer
from muletrain.runs.join.lobby import Lobby
from muletrain.runs.join.reception import Papers
from muletrain.runs.measure.fleet_survey import Survey
from muletrain.runs.training import Seat
from muletrain.runtime.members.roster import Roster

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import Network
    from muletrain.runs.host import Host
    from muletrain.runtime.transfer.tokens import Sharing


async def found(host: Host, network: Network, measuring: Callable[[Survey | None], None]) -> Seat:
    """Gather the run's first peers. ``measuring`` is told of what can measure the links, while the run waits for its
    beginning, and of None after it. Raises MuletrainError."""
    spec = host.spec
    assert spec.config is not None
    facts = RunFacts.of(resolve_start(RunConfig.model_validate_json(spec.config)))
    cache = await asyncio.to_thread(TokenCache.build, facts.config.data, facts.spec.vocab)
    checkpoint = _begins_with(spec.resume, cache)
    check_tokenizer(facts, len(cache.tokenizer_json))
    sharing = await owners_sharing(facts, cache) if facts.config.data.share else None
    machine = await host.probe_machine(facts.config)
    lobby = _lobby(host, network, facts, cache, checkpoint, sharing)
    lobby.open()
    host.names = lobby.names
    prober = host.prober(facts, network, host.links(facts, network), network.peer_id, machine, lambda names: None)
    survey = Survey(
        net=network,
        emit=host.log.emit,
        spec=facts.spec,
        sequences=facts.config.train.microbatch,
        folder=Path(spec.folder),
        people=lobby.prepared,
        clock=host.clock,
    )
    lobby.settled = survey.settled
    host.hand_out(dataclasses.replace(host.ticket, addresses=tuple(network.addresses())))
    stage = lobby.seat(network.peer_id, host.introduction(network, machine))
    compute = await host.build(facts, stage, machine, checkpoint.parts[stage] if checkpoint is not None else None)
    place = place_of(facts.config, spec, host.log.note)
    lobby.ready(network.peer_id, trainer=True, place=place.name)
    if spec.probe:
        survey.before_training()
    measuring(survey)
    roster = Roster(await lobby.gather(), network.peer_id)
    measuring(None)
    prober.close()
    papers = Papers(lobby.config_json, lobby.data_digest, lobby.tokenizer, lobby.tokens)
    return Seat(facts, roster, network, compute, machine, cache, papers, place, sharing)


def _begins_with(folder: str | None, cache: TokenCache) -> Checkpoint | None:
    """Raises CheckpointError."""
    if folder is None:
        return None
    checkpoint = Checkpoint.open(Path(folder))
    if checkpoint.manifest.get("data") != cache.digest:
        raise CheckpointError(f"{checkpoint.folder}: the corpus is not what the run was trained on; restore its files")
    return checkpoint


def _lobby(
    host: Host,
    network: Network,
    facts: RunFacts,
    cache: TokenCache,
    checkpoint: Checkpoint | None,
    sharing: Sharing | None,
) -> Lobby:
    fleet = facts.config.fleet
    return Lobby(
        net=network,
        clock=host.clock,
        emit=host.log.emit,
        run_id=host.ticket.run_id,
        config_json=facts.config.model_dump_json(by_alias=True),
        config_digest=facts.config_digest,
        data_digest=bytes.fromhex(cache.digest),
        tokenizer=cache.tokenizer_json,
        stages=fleet.stages,
        expected=fleet.peers or fleet.stages,
        trainers=fleet.trainers,
        needs=facts.needs(),
        stage_costs=facts.stage_costs(),
        strategy=facts.strategy,
        first_step=checkpoint.step if checkpoint else 0,
        parts=checkpoint.parts if checkpoint else [],
        part_digests=checkpoint.digests if checkpoint else [],
        tokens=None if sharing is None else sharing.shared,
    )
