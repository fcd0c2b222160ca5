"""Imports run downwards only, and in no circle; ``policy``, ``strategies``, ``planning`` and the base know neither
torch nor sockets; nothing can execute what it reads; nobody but the strategies asks which strategy runs."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SOURCE = Path(__file__).parents[1] / "src" / "muletrain"
BESIDE = ("proofs", "reproduction", "tests", "benchmarks")
"""Stands beside the package and is not installed with it."""

# top to bottom; names of one row may import each other
LAYERS: list[set[str]] = [
    {"cli", "api", "given", "__main__"},
    {"dashboard"},
    {"runs"},
    {"sim"},
    {"runtime"},
    {"network", "compute"},
    {"wire"},
    {"model", "data", "optim", "script"},
    {"planning"},
    {"strategies"},
    {"policy"},
    {"config", "events", "timeline", "units", "errors", "clock", "cgroups", "locks", "__init__"},
]
# inside a part, top to bottom; what stands in none of these is for all of them
ROOMS: dict[str, list[str]] = {
    "runtime": [
        "peer",
        "recovery",
        "checkpoint",
        "step",
        "averaging",
        "transfer",
        "microbatch",
        "members",
        "pool",
        "core",
    ],
    "sim": ["plan", "fleet", "steps"],
    "cli": ["commands", "actions", "show"],
}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = {"torch", "hivemind", "socket", "ssl", "transformers", "safetensors", "tokenizers"}
EXECUTES = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "torch.load",
    "torch.jit.load",
    "eval",
    "exec",
    "__import__",
}
"""Modules and functions that run code found in data."""
READS_THE_SCRIPT = Path("script.py")
"""Reads files that this user's own script wrote, after it compared owner, mode and a digest with this user's key
(``tests/test_script.py``)."""
PURE = LAYERS[-1] | {"planning", "strategies", "policy"}


def test_imports_run_downwards_only() -> None:
    assert violations(SOURCE) == []


def test_the_package_imports_nothing_that_stands_beside_it() -> None:
    found = {
        (str(path.relative_to(SOURCE)), name) for path in SOURCE.rglob("*.py") for _, name in _imports(path, SOURCE)
    }
    assert {(path, name) for path, name in found if name.split(".")[0] in BESIDE} == set()


def test_no_module_leads_back_to_itself() -> None:
    assert circles(SOURCE) == []


def test_of_hivemind_a_peer_loads_the_network_alone_and_others_still_find_all_of_it() -> None:
    code = """
import sys, muletrain.runs.worker
assert "hivemind.dht.node" in sys.modules
print(sorted({"scipy", "hivemind.averaging", "hivemind.moe"} & sys.modules.keys()))
import hivemind
print(hivemind.__version__, hivemind.DecentralizedAverager.__module__, hivemind.DHT is hivemind.dht.DHT)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[]", f"{version('hivemind')} hivemind.averaging.averager True"], done.stderr


def test_a_circle_is_found(tmp_path: Path) -> None:
    for module, imports in ("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"):
        (tmp_path / f"{module}.py").write_text(f"if False:\n    from muletrain.{imports} import X")
    assert circles(tmp_path) == ["a", "b", "c"]


def test_every_folder_has_a_layer() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__pycache__"}
    assert found <= set(RANK), "a new part of the package needs its place in LAYERS"
    rooms = {path.name for path in (SOURCE / "runtime").iterdir() if path.is_dir()} - {"__pycache__"}
    assert rooms == set(ROOMS["runtime"]), "a new room of the runtime needs its place in ROOMS"


def test_a_room_of_the_runtime_has_a_dozen_files_at_most_and_says_what_lives_there() -> None:
    for room in ROOMS["runtime"]:
        files = {path.name for path in (SOURCE / "runtime" / room).glob("*.py")}
        assert len(files - {"__init__.py", "messages.py"}) <= 12, room
        assert ast.get_docstring(ast.parse((SOURCE / "runtime" / room / "__init__.py").read_text())), room


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("policy/a.py", "import torch.nn", "policy/a.py:1: policy may not import torch"),
        ("policy/a.py", "def f():\n    import socket", "policy/a.py:2: policy may not import socket"),
        ("config/a.py", "from hivemind.p2p import P2P", "config/a.py:1: config may not import hivemind"),
        (
            "model/a.py",
            "from muletrain.runtime.peer.peer import X",
            "model/a.py:1: model may not import runtime, a layer above it",
        ),
        (
            "runtime/core/a.py",
            "from muletrain.runtime.members import roster",
            "runtime/core/a.py:1: runtime.core may not import runtime.members, a room above it",
        ),
        ("wire/a.py", "import muletrain.runs.local", "wire/a.py:1: wire may not import runs, a layer above it"),
        ("data/a.py", "from muletrain import cli", "data/a.py:1: data may not import cli, a layer above it"),
        ("optim/a.py", "from ..network import base", "optim/a.py:1: optim may not import network, a layer above it"),
        (
            "units.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from muletrain.policy import cover",
            "units.py:3: units may not import policy, a layer above it",
        ),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, code: str, complaint: str) -> None:
    path = tmp_path / "muletrain" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    assert violations(tmp_path / "muletrain") == [complaint]


@pytest.mark.parametrize(
    "code",
    ["from muletrain.events import Note", "from muletrain import __version__", "from . import b", "import numpy"],
)
def test_downward_and_sibling_imports_are_fine(tmp_path: Path, code: str) -> None:
    path = tmp_path / "muletrain" / "policy" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert violations(tmp_path / "muletrain") == []


def test_nobody_but_the_strategies_asks_which_strategy_runs() -> None:
    assert asking(SOURCE) == []


@pytest.mark.parametrize(
    "code",
    [
        "x = plan.seats is None",
        "x = config.pipeline.seats",
        "x = isinstance(ctx.plan.strategy, Pipeline)",
        "x = type(plan.strategy) is Swarm",
        "match plan.strategy:\n    case Swarm():\n        pass",
        "x = plan.strategy is SWARM",
        "x = p.strategy == 'pipeline'",
        "x = 'swarm' != p.strategy",
        "x = p.strategy in ('swarm', 'pipeline')",
        "x = strategy.schedule == 'gpipe'",
    ],
)
def test_who_asks_which_strategy_runs_is_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "a.py").write_text(code)
    assert asking(tmp_path) == ["a.py:1: asks which strategy it is"]


def test_the_runtime_knows_only_the_interface_of_strategies() -> None:
    found = {
        name
        for path in (SOURCE / "runtime").rglob("*.py")
        for _, name in _imports(path, SOURCE)
        if name.startswith("muletrain.strategies")
    }
    assert {name.rpartition(".")[0] for name in found} == {"muletrain.strategies.base"}


def test_nothing_can_execute_what_it_reads() -> None:
    assert executing(SOURCE) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", "pickle"),
        ("from marshal import loads", "marshal"),
        ("def f():\n    import shelve as s", "shelve"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import torch as t\nread = t.load", "torch.load"),
        ("from torch import load", "torch.load"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
    ],
)
def test_what_could_execute_is_found(tmp_path: Path, code: str, found: str) -> None:
    (tmp_path / "a.py").write_text(code)
    assert executing(tmp_path) == [f"a.py:{code.count(chr(10)) + 1}: {found} executes what it reads"]


def test_what_only_looks_like_executing_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import re, safetensors.torch\nmodel.eval()\nsafetensors.torch.load_file('x')\nre.compile('x')"
    )
    assert executing(tmp_path) == []


SEES_SEATS = {"config/effects.py", "config/peer_sections.py"}
"""What reads, checks and writes a planned layout."""


def asking(source: Path) -> list[str]:
    """Every place of the package at ``source``, outside ``strategies``, that asks which strategy it is."""
    return [
        f"{path.relative_to(source)}:{node.lineno}: asks which strategy it is"
        for path in sorted(source.rglob("*.py"))
        if path.parent.name != "strategies"
        for node in _nodes(path, {"strategy", "seats", "schedule"})
        if _asks(node, seats=str(path.relative_to(source)) in SEES_SEATS)
    ]


def _nodes(path: Path, words: set[str]) -> list[ast.AST]:
    """All nodes of a file with one of these ``words``, which most files lack: to parse and to walk takes seconds."""
    text = path.read_text(encoding="utf-8")
    return list(ast.walk(ast.parse(text))) if re.search(rf"\b({'|'.join(words)})\b", text) else []


def _asks(node: ast.AST, *, seats: bool) -> bool:
    """``seats``: those of a layout may be looked at."""
    if isinstance(node, ast.Attribute) and node.attr == "seats":
        return not seats
    if isinstance(node, ast.Match):
        return _is_strategy(node.subject)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return _is_strategy(node.args[0])
    return isinstance(node, ast.Compare) and any(_is_strategy(side) for side in (node.left, *node.comparators))


def _is_strategy(node: ast.expr) -> bool:
    """A strategy, its type, or its schedule."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
        return _is_strategy(node.args[0])
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if name == "schedule" and isinstance(node, ast.Attribute):
        return _is_strategy(node.value)
    return name == "strategy"


def executing(source: Path) -> list[str]:
    """Every use in the package at ``source`` of what executes data."""
    return [
        f"{path.relative_to(source)}:{line}: {danger} executes what it reads"
        for path in sorted(source.rglob("*.py"))
        if path.relative_to(source) != READS_THE_SCRIPT
        for line, name in sorted({*_imports(path, source), *_names(path)})
        for danger in EXECUTES
        if f"{name}.".startswith(f"{danger}.")
    ]


def _names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each name that is used, modules by their own name."""
    nodes = _nodes(path, {name.rpartition(".")[2] for name in EXECUTES})
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname: alias.name for alias in imports if alias.asname}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and (dotted := _dotted(node)):
            base, *rest = dotted
            yield node.lineno, ".".join([modules.get(base, base), *rest])


def _dotted(node: ast.expr) -> list[str]:
    """The parts of a dotted name; of an attribute of anything else, none."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def violations(source: Path) -> list[str]:
    """Every import of the package at ``source`` that goes up, or out of a pure layer into a heavy library."""
    return [
        f"{path.relative_to(source)}:{line}: {complaint}"
        for path in sorted(source.rglob("*.py"))
        for line, name in _imports(path, source)
        if (complaint := _complaint(_parts(path, source), name))
    ]


def circles(source: Path) -> list[str]:
    """Modules that lead back to themselves by imports, those for type checkers included, and what lies between two such
    circles."""
    modules = {".".join(_parts(path, source)): path for path in source.rglob("*.py") if path.stem != "__init__"}
    imported = {
        module: _modules(modules, {name for _, name in _imports(path, source)}) - {module}
        for module, path in modules.items()
    }
    left = set(modules)
    while ends := {m for m in left if not imported[m] & left} | (left - set().union(*(imported[m] for m in left))):
        left -= ends
    return sorted(left)


def _modules(modules: Iterable[str], names: set[str]) -> set[str]:
    """Those that are imported where these ``names`` are: modules, or what stands in them."""
    own = {name.removeprefix("muletrain.") for name in names if name.startswith("muletrain.")}
    return {name for name in own | {name.rpartition(".")[0] for name in own} if name in modules}


def _complaint(parts: tuple[str, ...], name: str) -> str | None:
    part = parts[0]
    top, *rest = name.split(".")
    if top in HEAVY and part in PURE:
        return f"{part} may not import {top}"
    if top != "muletrain" or not rest or rest[0] not in RANK:
        return None
    if RANK[rest[0]] < RANK[part]:
        return f"{part} may not import {rest[0]}, a layer above it"
    rooms = ROOMS.get(part, [])
    if rest[0] == part and {*parts[1:2], *rest[1:2]} <= set(rooms) and rooms.index(rest[1]) < rooms.index(parts[1]):
        return f"{part}.{parts[1]} may not import {part}.{rest[1]}, a room above it"
    return None


@functools.cache
def _imports(path: Path, source: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of each import, wherever in the file it stands."""
    package, found = ("muletrain", *path.relative_to(source).parent.parts), list[tuple[int, str]]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{start}.{alias.name}") for alias in node.names]
    return found


def _parts(path: Path, source: Path) -> tuple[str, ...]:
    return path.relative_to(source).with_suffix("").parts


def test_names_that_are_imported_beside_the_package_exist() -> None:
    """Nobody runs a benchmark for months; two of them imported what had moved."""
    root = SOURCE.parents[1]
    defined = {"muletrain": SOURCE, **{name: root / name for name in BESIDE}}
    missing = []
    for path in (path for folder in (*BESIDE, "scripts") for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and (top := node.module.split(".")[0]) in defined:
                known = _known(defined[top].joinpath(*node.module.split(".")[1:]))
                missing += [f"{path.relative_to(root)}: {a.name}" for a in node.names if a.name not in known]
    assert not missing


@functools.cache
def _known(module: Path) -> set[str]:
    """Names that can be imported from a module or a package."""
    inner = {path.stem for path in module.glob("*")} if module.is_dir() else set[str]()
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return inner | (set(_bound(ast.parse(file.read_text()))) if file.is_file() else set())


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module binds, wherever in its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
