"""Writes the tables of docs/timing.md from the docstrings of the runtime: the timing constants, and who ends each wait.
``python scripts/timings.py``.

The docstring of a function that waits says "Ends after ``room/module.function``", for a wait of this or of another peer
that must end first; "Ends within ...", for a limit of its own; or "Ends when cancelled", for work beside the steps.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RUNTIME, PAGE = ROOT / "src" / "muletrain" / "runtime", ROOT / "docs" / "timing.md"
BEGIN, END = "<!-- made by scripts/timings.py: {} -->", "<!-- end -->"
NOT_READ = "pool", "core/waiting"
"""Clients of a hub wait for their server alone, and ``core.waiting`` holds the waits of the rest."""
TIMED = "sleep", "_pause", "deadline", "wait"
"""Calls that make a loop a wait."""


class Wait(NamedTuple):
    """``says``: the sentence of the docstring; empty: there is none. ``after``: the waits that must end first."""

    where: str
    says: str

    @property
    def after(self) -> tuple[str, ...]:
        """Empty if a limit, or its owner, ends the wait in any case."""
        own = re.search(r"\bwithin\b|\bcancelled\b", self.says)
        return () if own else tuple(re.findall(r"``(\w+/\w+\.\w+)``", self.says))


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    """The runtime's modules by room and name."""
    found = sorted(RUNTIME.glob("*/*.py"))
    return [(f"{p.parent.name}/{p.stem}", ast.parse(p.read_text(encoding="utf-8"))) for p in found]


def constants(body: list[ast.stmt]) -> list[tuple[str, str, str]]:
    """(names, values, docstring) of each assignment to names that end in ``_S``."""
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


def waits(where: str, tree: ast.AST) -> list[Wait]:
    """The waits of a module whose end does not follow from a call's own limit: for a task, a future, an event or a
    condition, or in a loop of questions."""
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.AsyncFunctionDef)]
    return [
        Wait(f"{where}.{f.name}", sentence(ast.get_docstring(f) or "")) for f in functions if any(map(_waits, _own(f)))
    ]


def sentence(docstring: str) -> str:
    """The sentence of ``docstring`` that says when the wait ends."""
    found = re.search(r"\bEnds (?:after|within|when)\b.*?(?=\.(?:\s|$))", " ".join(docstring.split()))
    return found.group() if found else ""


def _own(function: ast.AsyncFunctionDef) -> list[ast.AST]:
    """All nodes of ``function``, without the functions defined in it."""
    nodes: list[ast.AST] = [*function.body]
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return nodes


def _waits(node: ast.AST) -> bool:
    if isinstance(node, ast.While) or (isinstance(node, ast.For) and "count(" in ast.unparse(node.iter)):
        return any(_called(n.value) in TIMED for n in ast.walk(node) if isinstance(n, ast.Await))
    if not isinstance(node, ast.Await):
        return False
    value = node.value
    if isinstance(value, ast.Name | ast.Attribute):  # a future or a task
        return True
    limited = isinstance(value, ast.Call) and any(k.arg == "timeout" for k in value.keywords)
    return not limited and _called(value) in ("until", "wait", "shield")


def _called(value: ast.expr) -> str:
    return ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""


def all_waits() -> list[Wait]:
    """The waits of the runtime."""
    return [w for where, tree in modules() if not where.startswith(NOT_READ) for w in waits(where, tree)]


def cycle(found: list[Wait]) -> list[str]:
    """Returns waits of which each ends only after the next, and the last only after the first; empty: there are none."""
    after = {w.where: w.after for w in found}

    def back(path: list[str]) -> list[str]:
        for nxt in after.get(path[-1], ()):
            if nxt in path:
                return path[path.index(nxt) :]
            if circle := back([*path, nxt]):
                return circle
        return []

    return next(filter(None, (back([where]) for where in after)), [])


def table_of_constants() -> str:
    rows = [
        f"| `{names}` ({where}) | {values} | {said} |"
        for where, tree in modules()
        for names, values, said in constants(tree.body)
    ]
    return "\n".join(["| constant | s | what it bounds |", "|---|---|---|", *rows])


def table_of_waits() -> str:
    rows = [f"| `{w.where}` | {w.says.removeprefix('Ends ').replace('``', '`')} |" for w in all_waits()]
    return "\n".join(["| wait | ends |", "|---|---|", *rows])


def page(text: str) -> str:
    """``text`` with the tables as they are now."""
    for name, table in ("constants", table_of_constants()), ("waits", table_of_waits()):
        before, begin, rest = text.partition(BEGIN.format(name))
        text = f"{before}{begin}\n{table}\n{END}{rest.partition(END)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
