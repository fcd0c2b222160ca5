"""A run that is planned or simulated, not trained: its configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from muletrain.config.load import load_config
from muletrain.model.hf_hub import is_hub_name
from muletrain.model.make import make_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model

USUAL = ("train.batch=1024", "train.microbatch=1")
"""Settings of a run without a configuration file, which the user may override."""


def load_run(config: Path | None, overrides: Sequence[str], *defaults: str) -> tuple[RunConfig, Model]:
    """The run of ``config``, or without a file a usual large run with ``defaults``; ``overrides`` win. Raises
    ConfigError."""
    named = any(text.startswith(("model.", "model =")) for text in overrides)
    base = [] if config is not None else [*USUAL, *([] if named else ["model.preset=gpt3-xl"]), *defaults]
    run = load_config(config, [*base, *overrides])
    if run.model.given is not None:
        from muletrain.runs.assemble import resolve_start

        run = resolve_start(run, weights=False)
    return run, make_model(run.model)


def model_setting(name: str) -> str:
    """The setting that ``--model`` stands for: a folder or a name on the Hub, else a preset."""
    return f"model.from={name}" if os.path.isdir(name) or is_hub_name(name) else f"model.preset={name}"
