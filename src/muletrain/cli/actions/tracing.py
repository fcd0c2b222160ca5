"""``muletrain trace``: a model's blocks as Python, and a table of them."""

from __future__ import annotations

import json as jsonlib
import re
import sys
from pathlib import Path
from typing import Any

from muletrain.cli.show.console import make_console
from muletrain.cli.show.tables import new_table
from muletrain.config.load import load_config
from muletrain.config.model_sections import FACTORY
from muletrain.errors import MuletrainError
from muletrain.model.traced.chain import TracedModel
from muletrain.units import format_count, format_memory

SOURCE, TABLE = "blocks.py", "blocks.json"


def trace_model(name: str, out: Path, *, context: int | None, json: bool) -> None:
    """Trace the model of the folder or the Hub's ``name``, and write its blocks to ``out``. Raises MuletrainError."""
    from muletrain.model.hf_hub import local_folder
    from muletrain.model.traced.folder import traced_in
    from muletrain.model.traced.source import source_of, table_rows

    if re.fullmatch(FACTORY, name):
        raise MuletrainError(
            f"{name}: of a factory, 'trace' needs its arguments and its data, too; write them into a configuration, as for "
            f"'muletrain run', and give that file: muletrain trace FILE.toml"
        )
    console = make_console(sys.stderr)
    with console.status("tracing the model"):
        if name.endswith(".toml"):
            model = _configured(Path(name), context)
        else:
            model = traced_in(local_folder(name, weights=False), context=context)
        rows = list(table_rows(model))
        source = source_of(model)
    about = {"context": model.context, "parameters": model.params, "chain": model.chain_name, "parts": rows}
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / SOURCE).write_text(source, encoding="utf-8")
        (out / TABLE).write_text(jsonlib.dumps(about, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise MuletrainError(f"--out: cannot write {out}: {e.strerror or e}; choose another folder") from e
    if json:
        print(jsonlib.dumps(about))
        return
    _show(rows)
    print(f"wrote {out / SOURCE} and {out / TABLE}: {format_count(model.params)} parameters, context {model.context}")


def _configured(file: Path, context: int | None) -> TracedModel:
    """The model of a run's configuration. Raises MuletrainError."""
    from muletrain.runs.assemble import RunFacts, resolve_start

    settings = [] if context is None else [f"model.context={context}"]
    model = RunFacts.of(resolve_start(load_config(file, settings))).spec
    if not isinstance(model, TracedModel):
        raise MuletrainError(
            f"{file}: it trains muletrain's own decoder, which is not traced; give one with model.factory or model.from"
        )
    return model


def _show(rows: list[dict[str, Any]]) -> None:
    table = new_table("", ["part", "class"], ["parameters", "FLOP/token", "activations/token", "lines"])
    for row in rows:
        table.add_row(
            row["part"],
            row["class"],
            format_count(row["parameters"]),
            format_count(row["flops_per_token"]),
            format_memory(int(row["kept_bytes_per_token"])),
            str(row["lines"]),
        )
    make_console(sys.stdout).print(table)
