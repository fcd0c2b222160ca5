"""Writes the table of docs/timing.md: what the runtime's timing constants bound, by their docstrings. ``python
scripts/timings.py``."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNTIME, PAGE = ROOT / "src" / "muletrain" / "runtime", ROOT / "docs" / "timing.md"
BEGIN, END = "<!-- made by scripts/timings.py -->", "<!-- end -->"


def constants(module: Path) -> list[tuple[str, str, str]]:
    """(names, values, docstring) of each assignment to names that end in ``_S``."""
    body = ast.parse(module.read_text(encoding="utf-8")).body
    found = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        each = list(zip(target.elts, value.elts, strict=True)) if isinstance(target, ast.Tuple) else [(target, value)]  # type: ignore[attr-defined]
        timed = [(ast.unparse(n), ast.unparse(v)) for n, v in each if ast.unparse(n).endswith("_S")]
        if timed:
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and str(after.value.value)
            names, values = zip(*timed, strict=True)
            found.append(("`, `".join(names), ", ".join(values), " ".join((said or "").split())))
    return found


def table() -> str:
    lines = ["| constant | s | what it bounds |", "|---|---|---|"]
    for room in sorted(p.parent.name for p in RUNTIME.glob("*/__init__.py")):
        for module in sorted((RUNTIME / room).glob("*.py")):
            lines += [
                f"| `{names}` ({room}/{module.stem}) | {values} | {said} |" for names, values, said in constants(module)
            ]
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` with the table as it is now."""
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n{table()}\n{END}{text.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
