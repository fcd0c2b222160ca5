"""What a joiner lets a run have of its machine. The joiner checks it itself, from the configuration alone, before it
takes anything: what a founder or another member says of sizes is only compared with it.
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
"""A tokenizer.json has at most so many, and for each token of the vocabulary (those of published models have 70 to
140)."""


def told_config(text: str) -> RunConfig:
    """The run's, as another member sent it. Raises AdmissionError."""
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise AdmissionError(
            f"the run's configuration cannot be run: {where!r}: {first['msg'][:200]}; {_ASK}"
        ) from None


def largest_tokenizer(facts: RunFacts) -> int:
    """Bytes that a run's tokenizer may have."""
    return TOKENIZER_BYTES + TOKENIZER_BYTES_PER_TOKEN * facts.spec.vocab


def check_tokenizer(facts: RunFacts, size: int) -> None:
    """Raises ConfigError for a tokenizer of ``size`` bytes that no machine would take when it joins."""
    if size > largest_tokenizer(facts):
        raise ConfigError(
            f"data.tokenizer: {format_memory(size)} for model.vocab = {facts.spec.vocab}: machines that join take at most "
            f"{format_memory(largest_tokenizer(facts))}; use another tokenizer"
        )


def check_stage(facts: RunFacts, stage: int, offer: Offer) -> None:
    """Raises CapacityError for a stage that takes more than this machine's owner allows."""
    need = facts.needs()[stage]
    if not need.fits(offer):
        raise CapacityError(
            f"stage {stage} needs {need.need(offer)} ({need}), and this machine may use {offer}: it does not serve it. Give more (--memory "
            f"or compute.memory says how much it may use), or begin the run with more stages"
        )


def check_welcome(facts: RunFacts, welcome: Welcome, offer: Offer) -> None:
    """Of the member that took us in. Raises AdmissionError, and CapacityError for what this machine has no room for."""
    stages = len(facts.cut)
    if welcome.stage >= stages:
        raise AdmissionError(
            f"this peer is to serve stage {welcome.stage} of a run with stages 0..{stages - 1}; {_ASK}"
        )
    check_stage(facts, welcome.stage, offer)
    most = largest_tokenizer(facts)
    if welcome.tokenizer_size > most:
        raise AdmissionError(
            f"a tokenizer of {format_memory(welcome.tokenizer_size)}, and the run's vocabulary takes at most {format_memory(most)}; "
            f"{_ASK}"
        )
    most = largest_part(facts.plan().state_bytes[welcome.stage])
    if welcome.part_size > most:
        raise AdmissionError(
            f"a checkpoint's part of {format_memory(welcome.part_size)}, and stage {welcome.stage} has at most {format_memory(most)}; "
            f"{_ASK}"
        )
    if welcome.part_size:
        check_room(tempfile.gettempdir(), welcome.part_size, "set TMPDIR to another folder")


_ASK = "nothing was taken; ask whoever began the run"
