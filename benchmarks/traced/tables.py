"""The table of README.md from architectures.json."""

from typing import Any


def architectures(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for kind, of in sorted(found.items()):
        if "refused" in of:
            rows.append([kind, "", "refused", of["refused"].split(";")[0].removeprefix("model.from: ")])
        else:
            rows.append([kind, of["stored_buffers"] or "", f"{of['in']:.0e}", f"{of['out']:.0e}"])
    return rows
