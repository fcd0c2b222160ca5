"""What the package says of itself in several places is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_supported_pythons_are_named_alike() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, tools = settings["project"], settings["tool"]
    pythons = [
        c.rsplit(" ", 1)[1] for c in project["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    minors = [int(version.partition(".")[2]) for version in pythons]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert project["requires-python"] == f">={pythons[0]},<3.{minors[-1] + 1}"
    assert tools["ruff"]["target-version"] == f"py3{minors[0]}"
    assert tools["mypy"]["python_version"] == pythons[0]
    assert f"Python {pythons[0]} to {pythons[-1]}" in re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
