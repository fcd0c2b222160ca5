"""``muletrain trace``: a model's blocks as Python, and as a table."""

from __future__ import annotations

import json as jsonlib
import sys
from typing import TYPE_CHECKING, Any

from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.cli.show.tables import new_table
from muletrain.errors import MuletrainError
from muletrain.model.traced.chain import TracedModel
from muletrain.units import format_count, format_memory

if TYPE_CHECKING:
    from pathlib import Path

SOURCE, TABLE = "blocks.py", "blocks.json"


def trace_model(name: str, out: Path, *, context: int | None, json: bool) -> None:
    """Trace the model of the folder or the Hub's ``name``, and write the blocks to ``out``. Raises MuletrainError."""
    from muletrain.model.hf_hub import local_folder
    from muletrain.model.traced.folder import traced_in
    from muletrain.model.traced.source import source_of, table_rows
    from muletrain.runs.measure.profile import configured_model

    with doing("tracing the model"):
        model = configured_model(name, "trace", context=context)
        if model is None:
            model = traced_in(local_folder(name, weights=False), context=context)
        if not isinstance(model, TracedModel):
            raise MuletrainError(
                f"{name}: it trains muletrain's own decoder, which is not traced; give one with model.factory or model.from"
            )
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
