"""A newcomer to a run: asks for admission, builds the stage, and gets the list of members."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.schema import Precision
from muletrain.errors import AdmissionError, MuletrainError, Refused
from muletrain.events import Waiting
from muletrain.runs.assemble import RunFacts
from muletrain.runs.client import Help, admitted
from muletrain.runs.corpus import joiners_sharing, own_data
from muletrain.runs.host import place_of
from muletrain.runs.join.admission import RunInfo, member_of
from muletrain.runs.join.client import JoinClient, find_admitter
from muletrain.runs.join.limits import check_welcome, told_config
from muletrain.runs.join.messages import AGAIN, Ready
from muletrain.runs.join.patience import patiently
from muletrain.runs.join.trial import Trial
from muletrain.runs.training import Seat
from muletrain.runtime.members.roster import Roster

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.compute.base import Compute
    from muletrain.network.base import Network
    from muletrain.runs.host import Host
    from muletrain.runs.join.messages import JoinRequest, Welcome
    from muletrain.runs.measure.machine import Machine
    from muletrain.runtime.members.roster import Genesis


AGAIN_TRIES, AGAIN_S = 5, 5.0
"""Most tries of a newcomer to join, repeated after temporary refusals, and the pause between two tries [s]."""


async def join(host: Host, network: Network) -> Seat | Help:
    """Join a run, before or after the beginning, as a member or as a client. Raises MuletrainError."""
    for tries in itertools.count(1):
        try:
            return await _join(host, network)
        except Refused as e:
            if AGAIN not in e.why or tries == AGAIN_TRIES:
                raise
            host.log.note(f"joining again: {e.why}")
        await host.clock.sleep(AGAIN_S)
    raise AssertionError  # itertools.count does not end


async def _join(host: Host, network: Network) -> Seat | Help:
    admitter = await patiently(lambda: find_admitter(network, host.ticket.addresses), host.log.note)
    client = JoinClient(network, admitter, host.log.note)
    host.hand_out(host.ticket.passed_on(client.admitter, network.addresses()))
    trial = None if host.spec.data == "config" else Trial()  # the founder's machine has already built everything
    try:
        machine = await host.probe_machine(None)
        if trial is not None:
            trial.bound(machine.offer)
        request = host.introduction(machine)
        welcome = await client.join(request)
        if welcome.name not in ("", request.name):
            host.log.note(f"the run has a peer '{request.name}' already: this one is '{welcome.name}'", "info")
        return await _prepared(host, network, client, machine, request, welcome, trial)
    finally:
        if trial is not None:
            await trial.close()


async def _prepared(
    host: Host,
    network: Network,
    client: JoinClient,
    machine: Machine,
    request: JoinRequest,
    welcome: Welcome,
    trial: Trial | None,
) -> Seat | Help:
    """Prepare the seat, or the help, of ``welcome``. ``trial``: first builds everything that came over the network.
    Raises MuletrainError."""
    try:
        if trial is not None:
            await trial.build(welcome.config, welcome.stage)
        facts = RunFacts.of(told_config(welcome.config))
        check_welcome(facts, welcome, machine.offer)
        host.open_base(facts, network)
        if welcome.running:
            host.genesis = await client.begin(None)
        machine = _as_the_run_computes(facts, machine)
        if welcome.client:
            return await _help(host, network, client, welcome, facts, machine)
        tokenizer = await client.tokenizer(welcome)
        if host.spec.keeps_ticket:
            host.log.note(f"this peer prepares stage {welcome.stage} (stages are 0 to {facts.config.fleet.stages - 1})")
        if trial is not None and host.spec.data != "none":
            await trial.tokens(welcome.config, tokenizer, host.spec.data, welcome.data.hex())
        cache = await asyncio.to_thread(own_data, host, facts, tokenizer, welcome.data.hex())
    except MuletrainError as e:  # for example: our corpus is not the run's
        await client.decline(str(e))
        raise
    if trial is not None:
        await trial.close()  # the weights beside an adapter may take hours
    compute = await _compute(host, client, welcome, facts, machine)
    try:
        place = place_of(facts.config, host.spec, host.log.note)
        sharing = await joiners_sharing(host, facts, welcome, tokenizer, cache)
        ready = Ready(trainer=cache is not None, place=place.name)
        if (genesis := host.genesis) is not None:
            roster = Roster(genesis, member_of(network.peer_id, request, welcome, ready), client.contacts)
        else:
            prober = host.prober(
                facts, network, client.admitter, machine
            )  # the founder may have links measured meanwhile
            try:
                genesis = await client.begin(ready, _says_what_is_missing(host))
            finally:
                prober.close()
            roster = Roster(genesis, network.peer_id)
        _check(genesis, facts, welcome, roster.own.stage)
    except BaseException:
        compute.close()
        raise
    info = RunInfo(welcome.config, welcome.data, tokenizer, welcome.tokens)
    return Seat(facts, roster, network, compute, machine, cache, info, place, sharing, joining=welcome.running)


def _as_the_run_computes(facts: RunFacts, machine: Machine) -> Machine:
    """``machine`` with the run's precision; with 'auto', the precision that was measured here."""
    precision = facts.config.compute.precision
    return machine if precision is Precision.AUTO else dataclasses.replace(machine, precision=precision)


async def _help(
    host: Host, network: Network, client: JoinClient, welcome: Welcome, facts: RunFacts, machine: Machine
) -> Help:
    """Become a client. Raises MuletrainError."""
    if not host.spec.client:
        raise AdmissionError(
            f"the run's plan has '{host.spec.name}' for a client; join without --reliable, or under another --name"
        )
    if host.spec.keeps_ticket:
        host.log.note("this run has servers and clients, and this machine becomes a client (--reliable: a server)")
    return await admitted(host, network, client, welcome, facts, machine, _says_what_is_missing(host))


def _says_what_is_missing(host: Host) -> Callable[[tuple[str, ...]], None]:
    """Report the conditions that the run waits for, on a machine without the founder. On the founder's machine, the
    founder reports them."""
    said: list[str] = []

    def waiting(missing: tuple[str, ...]) -> None:
        if host.spec.keeps_ticket and missing and list(missing) != said:
            said[:] = missing
            host.log.emit(Waiting(missing=list(missing)))

    return waiting


async def _compute(host: Host, client: JoinClient, welcome: Welcome, facts: RunFacts, machine: Machine) -> Compute:
    """Our stage's compute, with the state before the first step unless the run has begun."""
    if welcome.part_size:
        with tempfile.TemporaryDirectory(prefix="mule-part-") as folder:
            part = Path(folder) / "part.safetensors"
            await client.part(welcome, part)
            return await host.build(facts, welcome.stage, machine, part)
    if welcome.running:  # replicas give the weights, so first weights may come from the seed
        return await host.build(facts.drawn(), welcome.stage, machine, None)
    if (given := facts.config.model.given) is not None and host.spec.data != "config":
        raise AdmissionError(
            f"the run starts from weights of another machine ({given}), and its founder does not send them; begin it by "
            f"'muletrain start', which does"
        )
    return await host.build(facts, welcome.stage, machine, None)


def _check(genesis: Genesis, facts: RunFacts, welcome: Welcome, stage: int) -> None:
    """Raises AdmissionError unless ``genesis`` belongs to the run that admitted us."""
    if (genesis.config, genesis.stages, stage) != (facts.config_digest, len(facts.cut), welcome.stage):
        raise AdmissionError("the run began with another configuration or stage than was sent; start it again")
    if genesis.data != welcome.data:
        raise AdmissionError("the run began with another corpus than was said; ask its founder")
