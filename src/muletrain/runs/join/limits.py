"""Limits on a run's use of a joiner's machine. The joiner computes the limits from the configuration, and checks the
sizes in the welcome before loading anything.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from pydantic import ValidationError

from muletrain.config.schema import RunConfig
from muletrain.errors import AdmissionError, CapacityError, ConfigError
from muletrain.runtime.checkpoint.messages import largest_part
from muletrain.runtime.core.disk import check_room
from muletrain.units import format_memory

if TYPE_CHECKING:
    from muletrain.compute.estimate import Offer
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.join.messages import Welcome

TOKENIZER_BYTES, TOKENIZER_BYTES_PER_TOKEN = 4 << 20, 1 << 10
"""Most bytes of a tokenizer.json: the sum of both, the second for each token of the vocabulary. Published models have
70 to 140 a token."""


def told_config(text: str) -> RunConfig:
    """Parse the run's configuration from another member. Raises AdmissionError."""
    try:
        return RunConfig.model_validate_json(text, strict=True)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise AdmissionError(
            f"the run's configuration cannot be run: {where!r}: {first['msg'][:200]}; {_ASK}"
        ) from None


def largest_tokenizer(facts: RunFacts) -> int:
    """Most bytes that a run's tokenizer may have."""
    return TOKENIZER_BYTES + TOKENIZER_BYTES_PER_TOKEN * facts.spec.vocab


def check_tokenizer(facts: RunFacts, size: int) -> None:
    """Raises ConfigError if joining machines would refuse a tokenizer of ``size`` bytes."""
    if size > largest_tokenizer(facts):
        raise ConfigError(
            f"data.tokenizer: {format_memory(size)} for model.vocab = {facts.spec.vocab}: machines that join take at "
            f"most {format_memory(largest_tokenizer(facts))}; use another tokenizer"
        )


def check_stage(facts: RunFacts, stage: int, offer: Offer, *, client: bool = False) -> None:
    """Raises CapacityError if ``stage`` needs more memory than this machine's owner offers. ``client``: of a client."""
    need = (facts.client_needs() if client else facts.needs())[stage]
    if not need.fits(offer):
        does = "compute for" if client else "serve"
        raise CapacityError(
            f"stage {stage} needs {need.need(offer)} ({need}), and this machine may use {offer}: it does not {does} it"
            f"{need.swapping(offer)}. Give more (--memory or compute.memory says how much it may use), or begin the run with more stages"
        )


def check_welcome(facts: RunFacts, welcome: Welcome, offer: Offer) -> None:
    """Check a welcome against our own limits. Raises AdmissionError, or CapacityError if this machine lacks the
    room."""
    stages = len(facts.cut)
    if welcome.stage >= stages:
        raise AdmissionError(
            f"this peer is to serve stage {welcome.stage} of a run with stages 0..{stages - 1}; {_ASK}"
        )
    if welcome.client and not facts.strategy.pooled:
        raise AdmissionError(f"this peer is to be a client in a run that has none; {_ASK}")
    check_stage(facts, welcome.stage, offer, client=welcome.client)
    most = largest_tokenizer(facts)
    if welcome.tokenizer_size > most:
        raise AdmissionError(
            f"a tokenizer of {format_memory(welcome.tokenizer_size)}, and the run's vocabulary takes at most "
            f"{format_memory(most)}; {_ASK}"
        )
    most = largest_part(facts.plan().state_bytes[welcome.stage])
    if welcome.part_size > most:
        raise AdmissionError(
            f"a checkpoint's part of {format_memory(welcome.part_size)}, and stage {welcome.stage} has at most "
            f"{format_memory(most)}; {_ASK}"
        )
    if welcome.part_size:
        check_room(tempfile.gettempdir(), welcome.part_size, "set TMPDIR to another folder")


_ASK = "nothing was taken; ask the person who began the run"
