"""The command for one card (benchmarks/gpu): a part that fails or hangs costs no other part its figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import run, tables

FINE = 'print("words"); print(\'{"tokens_per_s": 90.0, "params": 1000}\')'
SCRIPTS = {  # by module
    "peer": FINE,
    "loop": FINE.replace("90.0", "100.0"),
    "memory": "import no_such_module",
    "fleets": "import time; print('begun', flush=True); time.sleep(60)",
}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of figures; parts are ``SCRIPTS``, and those of processes have two seconds."""

    def command(part: run.Part, *, tiny: bool, limit_s: float) -> list[str]:
        return [sys.executable, "-c", SCRIPTS[part.module]]

    parts = tuple(run.Part(p.name, 2 if p.module == "fleets" else 60, p.module) for p in run.PARTS)
    monkeypatch.setattr(run, "command", command)
    monkeypatch.setattr(run, "PARTS", parts)
    monkeypatch.setattr(run, "PATIENCE", 1)
    return tmp_path / "found.json"


def called(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", "--out", str(out), *arguments])
    run.main()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_part_that_fails_or_hangs_leaves_the_others(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("memory", "pipeline", "compiled-small", "peer-small")
    found = called(monkeypatch, out, *(word for name in names for word in ("--only", name)))
    assert set(found) == set(names)
    assert "No module named 'no_such_module'" in found["memory"]["error"]
    assert found["pipeline"]["error"] == "over its limit of 2 s; last words: begun"
    assert found["pipeline"]["seconds"] < 30
    rows = {row[0]: row for row in tables.parts(found)}
    assert rows["peer-small"][3:6] == ["90", "0.90", "0.90"]
    assert rows["memory"][3].startswith("failed: exit code 1: ModuleNotFoundError")
    assert rows["hub"][3] == "not measured"


def test_a_part_without_time_is_left_out_and_keeps_its_figures(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called(monkeypatch, out, "--only", "peer-small")
    found = called(monkeypatch, out, "--only", "peer", "--deadline", "1")
    assert found["peer-small"]["tokens_per_s"] == 90
    assert "left out" in found["peer-large"]
    assert "tokens_per_s" in called(monkeypatch, out, "--only", "peer-large")["peer-large"], "a later run measures it"


def test_the_last_line_of_pytest_is_counted() -> None:
    assert run.tested("58 deselected in 3.1s", 5) == {"counts": {"deselected": 58}}
    found = run.tested("FAILED tests/test_cuda.py::test_x - E\n1 failed, 57 passed in 9s", 1)
    assert (found["counts"], found["failed"]) == ({"failed": 1, "passed": 57}, ["tests/test_cuda.py::test_x"])
    assert "error" in found
    assert "error" in run.tested("ERROR: usage", 4)


def test_only_names_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [part.name for part in run.wanted(["loop"])] == ["loop-small", "loop-large"]
    assert run.wanted([]) == list(run.PARTS)
    with pytest.raises(SystemExit, match="no part 'loops'"):
        run.wanted(["loops"])


def test_tables_hold_all_parts() -> None:
    assert list(tables.PARTS) == [part.name for part in run.PARTS]
    assert (
        tables.share(
            {"loop-small": {"tokens_per_s": 50, "params": 1}}, {"tokens_per_s": 45, "params": 1}, "compiled-small"
        )
        == "0.90 (not compiled)"
    )
    assert tables.gib({"peak_bytes": 3 << 29, "estimate_bytes": 2 << 30}) == ("1.50 GiB", "2.00 GiB", "0.75")
