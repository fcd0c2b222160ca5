"""Files of the user's working folder never stand in for modules of Python's library, of ours or of a package."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import muletrain
from muletrain.config.load import load_config
from muletrain.config.trusted import imported, trust
from muletrain.runs.doctor.examination import PARTS, Question, examine
from muletrain.runs.fleet import COMMON, LocalFleet
from muletrain.runs.join import trial

NAMES = {name for name in sys.stdlib_module_names if not name.startswith("_")} - {"this", "antigravity"}
"""Modules of the library, each of which may be the name of somebody's script."""
PACKAGES = {"torch", "numpy", "tokenizers", "hivemind", "pydantic", "typer", "safetensors", "muletrain", "p2pd"}
EARLY = set(
    [
        "collections",
        "contextlib",
        "functools",
        "importlib",
        "keyword",
        "operator",
        "reprlib",
        "runpy",
        "types",
        "warnings",
        "muletrain",
    ]
)
"""Imported by ``python -m muletrain`` before anything of ours; ``muletrain`` and ``python -P -m`` do not."""
SOURCE = str(Path(muletrain.__file__).parents[1])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of scripts that leave a mark if they are executed."""
    for name in NAMES | PACKAGES:
        script = (
            f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\nraise RuntimeError('a script of the user')\n"
        )
        (tmp_path / f"{name}.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"PYTHONPATH": SOURCE} | more
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_no_process_of_ours_executes_a_script_of_the_working_folder(here: Path) -> None:
    """A peer, the processes of doctor, and processes that a pool spawns."""
    spawned = (
        "import multiprocessing as m, operator\n"
        "with m.get_context('spawn').Pool(1) as pool: print(pool.map(operator.neg, [3]))"
    )
    with LocalFleet(here, 1) as fleet:
        fleet.spawn(["peer"])
        pool = start(here, "-P", "-c", spawned, **COMMON)
        assert "[-3]" in pool.communicate(timeout=60)[0]
        stdin = fleet._running["peer"].stdin
        assert stdin is not None
        stdin.close()  # it ends without work, after it has imported everything
        assert fleet._running["peer"].wait(120) == 2
    assert (here / "peer.log").read_text() == ""
    assert not (here / "executed").exists()


TELLS = """
import json, os, sys
with open({path!r}, "a") as file:
    print(json.dumps([sys.orig_argv[-1], "-P" in sys.orig_argv, os.environ.get("PYTHONSAFEPATH")]), file=file)
os._exit(0)
"""


def test_each_process_is_told_so_by_itself_and_a_peer_tells_those_that_it_spawns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer, a joiner's trial and the parts of doctor, which say at their start how they were started, and end."""
    (tmp_path / "sitecustomize.py").write_text(TELLS.format(path=str(tmp_path / "told")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{SOURCE}")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with LocalFleet(tmp_path, 1) as fleet:
        fleet.spawn(["peer"])
        fleet._running["peer"].wait(60)

    async def tried() -> None:
        await (await trial._begun()).wait()

    asyncio.run(tried())
    list(
        examine(
            Question(config=load_config().model_dump_json(by_alias=True), ticket=None, listen="", port=0, announce=())
        )
    )
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert told == [
        ["muletrain.runs.worker", True, "1"],
        ["muletrain.runs.join.trial", True, None],
        *([part.name, True, None] for part in PARTS),
    ]


def test_python_m_muletrain_does_not_either(here: Path) -> None:
    for name in EARLY:
        (here / f"{name}.py").unlink()
    said, _ = (process := start(here, "-m", "muletrain", "--version")).communicate(timeout=60)
    assert (process.returncode, said) == (0, f"muletrain {muletrain.__version__}\n")
    assert not (here / "executed").exists()


def test_a_factory_is_found_in_the_working_folder_and_hides_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the library that nothing has imported before the factory does."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (here / "shapes_of_mine.py").write_text("import colorsys, random\nbuild = random.random\n")
    trust("shapes_of_mine:build")
    before = list(sys.path)
    try:
        assert 0 <= imported("model.factory", "shapes_of_mine:build")() < 1
    finally:
        sys.path[:] = before
        sys.modules.pop("shapes_of_mine", None)
    assert not (here / "executed").exists()
