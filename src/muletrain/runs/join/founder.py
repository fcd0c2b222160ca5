"""The founder of a run: opens the rendezvous, waits for guests, and begins."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.schema import RunConfig
from muletrain.data.tokens import TokenCache
from muletrain.runs.assemble import RunFacts, resolve_start
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.corpus import owners_sharing
from muletrain.runs.host import place_of
from muletrain.runs.join.admission import RunInfo
from muletrain.runs.join.limits import check_tokenizer
from muletrain.runs.join.messages import Ready
from muletrain.runs.join.rendezvous import Rendezvous
from muletrain.runs.measure.fleet_survey import Survey
from muletrain.runs.training import Seat
from muletrain.runtime.members.roster import Roster

if TYPE_CHECKING:
    from muletrain.network.base import Network
    from muletrain.runs.host import Host


async def found(host: Host, network: Network) -> Seat:
    """Gather the run's first peers, and begin. Raises MuletrainError."""
    spec = host.spec
    assert spec.config is not None
    config = RunConfig.model_validate_json(spec.config, strict=True)
    # a checkpoint has the model's sizes and weights; the model's folder may be gone
    facts = RunFacts.of(resolve_start(config) if spec.resume is None else config, alone=spec.alone)
    cache = await asyncio.to_thread(facts.data)
    checkpoint = None if spec.resume is None else Checkpoint.open(Path(spec.resume))
    check_tokenizer(facts, len(cache.tokenizer_json))
    sharing = await owners_sharing(facts, cache) if isinstance(cache, TokenCache) and facts.config.data.share else None
    machine = await host.probe_machine(facts.config)
    info = RunInfo(
        facts.config.model_dump_json(by_alias=True),
        bytes.fromhex(cache.digest),
        cache.tokenizer_json,
        None if sharing is None else sharing.shared,
    )
    host.open_base(facts, network)
    host.rendezvous = rendezvous = _rendezvous(host, network, facts, info, checkpoint)
    rendezvous.open()
    prober = host.prober(facts, network, network.peer_id, machine)
    survey = Survey(
        net=network,
        emit=host.log.emit,
        spec=facts.spec,
        sequences=facts.config.train.microbatch,
        folder=Path(spec.folder),
        people=rendezvous.prepared,
        clock=host.clock,
    )
    host.hand_out(dataclasses.replace(host.ticket, addresses=tuple(network.addresses())))
    stage = rendezvous.seat(network.peer_id, host.introduction(machine))
    compute = await host.build(facts, stage, machine, checkpoint.parts[stage] if checkpoint is not None else None)
    place = place_of(facts.config, spec, host.log.note)
    rendezvous.ready(network.peer_id, Ready(trainer=True, place=place.name))
    if spec.probe:
        survey.before_training()
    host.survey = survey
    roster = Roster(await rendezvous.gather(survey.settled), network.peer_id)
    host.survey = None
    prober.close()
    return Seat(facts, roster, network, compute, machine, cache, info, place, sharing)


def _rendezvous(
    host: Host, network: Network, facts: RunFacts, info: RunInfo, checkpoint: Checkpoint | None
) -> Rendezvous:
    fleet = facts.config.fleet
    return Rendezvous(
        net=network,
        emit=host.log.emit,
        info=info,
        seating=facts.seating(),
        run_id=host.ticket.run_id,
        config_digest=facts.config_digest,
        expected=fleet.peers or fleet.stages,
        trainers=fleet.trainers,
        checkpoint=checkpoint,
    )
