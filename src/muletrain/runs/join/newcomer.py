"""A newcomer to a run: it asks to be let in, gets its stage ready, and learns who takes part."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.schema import Precision
from muletrain.errors import AdmissionError, MuletrainError
from muletrain.events import Waiting
from muletrain.runs.assemble import RunFacts
from muletrain.runs.corpus import joiners_sharing, own_data
from muletrain.runs.host import place_of
from muletrain.runs.join.limits import check_welcome, told_config
from muletrain.runs.join.lobby import Visitor, find_founder
from muletrain.runs.join.reception import Papers
from muletrain.runs.training import Seat
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Roster

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.compute.base import Compute
    from muletrain.data.tokens import TokenCache
    from muletrain.network.base import Network
    from muletrain.runs.host import Host
    from muletrain.runs.join.lobby import Welcome
    from muletrain.runs.measure.machine import Machine
    from muletrain.runtime.checkpoint.store import CheckpointStore
    from muletrain.runtime.members.roster import Genesis


async def join(host: Host, network: Network) -> Seat:
    """Join a run that waits for its beginning, or goes on already. Raises MuletrainError."""
    visitor = Visitor(network, await find_founder(network, host.ticket.addresses), _says_what_is_missing(host))
    host.hand_out(host.ticket.passed_on(visitor.founder, network.addresses()))
    machine = await host.probe_machine(None)
    welcome = await visitor.join(host.introduction(network, machine))
    try:
        facts = RunFacts.of(told_config(welcome.config))
        check_welcome(facts, welcome, machine.offer)
        tokenizer = await visitor.tokenizer(welcome)
        if host.spec.keeps_ticket:
            host.log.note(f"this peer gets stage {welcome.stage} of 0..{facts.config.fleet.stages - 1} ready")
        cache = await asyncio.to_thread(own_data, host, facts, tokenizer, welcome.data.hex())
    except MuletrainError as e:  # among others: ours is another corpus, or none
        await visitor.decline(str(e))
        raise
    precision = facts.config.compute.precision
    if precision is not Precision.AUTO:  # the run's word; 'auto' is each machine's own measurement
        machine = dataclasses.replace(machine, precision=precision)
    compute = await _compute(host, visitor, welcome, facts, machine)
    place = place_of(facts.config, host.spec, host.log.note)
    sharing = await joiners_sharing(host, facts, welcome, tokenizer, cache)
    if welcome.running:
        genesis = await visitor.genesis()
        roster = Roster(genesis, _member(network, welcome, machine, cache, place))
    else:
        genesis = await _begin(host, network, visitor, facts, machine, cache, place)
        roster = Roster(genesis, network.peer_id)
    _check(genesis, facts, welcome, roster.own.stage)
    papers = Papers(welcome.config, welcome.data, tokenizer, welcome.tokens)
    return Seat(facts, roster, network, compute, machine, cache, papers, place, sharing, joining=welcome.running)


def _says_what_is_missing(host: Host) -> Callable[[tuple[str, ...]], None]:
    """On a machine of its own a joiner says what the run waits for; otherwise the founder does so beside it."""
    said: list[str] = []

    def waiting(missing: tuple[str, ...]) -> None:
        if host.spec.keeps_ticket and missing and list(missing) != said:
            said[:] = missing
            host.log.emit(Waiting(missing=list(missing)))

    return waiting


async def _compute(host: Host, visitor: Visitor, welcome: Welcome, facts: RunFacts, machine: Machine) -> Compute:
    """Of the stage that this peer was given, with what the run begins with."""
    if welcome.part_size:
        with tempfile.TemporaryDirectory(prefix="mule-part-") as folder:
            part = Path(folder) / "part.safetensors"
            await visitor.part(welcome, part)
            return await host.build(facts, welcome.stage, machine, part)
    if welcome.running:  # its weights come from replicas, whatever the run began with
        return await host.build(facts.drawn(), welcome.stage, machine, None)
    if facts.config.model.from_ is not None and host.spec.data != "config":
        raise AdmissionError(
            "the run starts from a folder of another machine, which 'muletrain start' would hand out; begin it so"
        )
    return await host.build(facts, welcome.stage, machine, None)


def _member(
    network: Network, welcome: Welcome, machine: Machine, cache: TokenCache | None, place: CheckpointStore
) -> Member:
    return Member(
        id=network.peer_id,
        name=welcome.name,
        stage=welcome.stage,
        trainer=cache is not None,
        addresses=tuple(network.addresses()),
        device=machine.kind,
        flops=machine.flops,
        place=place.name,
    )


async def _begin(
    host: Host,
    network: Network,
    visitor: Visitor,
    facts: RunFacts,
    machine: Machine,
    cache: TokenCache | None,
    place: CheckpointStore,
) -> Genesis:
    """Wait for the run's beginning; meanwhile the founder may have links measured."""
    known = dict[str, str]()
    host.names = lambda: known
    prober = host.prober(facts, network, host.links(facts, network), visitor.founder, machine, known.update)
    genesis = await visitor.begin(trainer=cache is not None, place=place.name)
    prober.close()
    return genesis


def _check(genesis: Genesis, facts: RunFacts, welcome: Welcome, stage: int) -> None:
    """Raises AdmissionError for another run than we were let into."""
    if (genesis.config, genesis.stages, stage) != (facts.config_digest, len(facts.cut), welcome.stage):
        raise AdmissionError("the run began with another configuration or stage than was sent; start it again")
    if genesis.data != welcome.data:
        raise AdmissionError("the run began with another corpus than was said; ask whoever began it")
