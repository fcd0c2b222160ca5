"""Tests marked ``cuda`` need a GPU, and those marked ``browser`` Chromium: where there is none they are deselected and
counted as such, never passed."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile("no deadline", deadline=None)  # a busy machine is slow now and then; pytest ends what hangs
settings.load_profile("no deadline")

FULL = {line for line in (Path(__file__).parent / "full.txt").read_text().splitlines() if not line.startswith("#")}
"""Files, tests and single cases, for ``scripts/check --full``."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LACKS = {
    "cuda": "no CUDA device here: the tests marked 'cuda' are deselected",
    "browser": "no Chromium here, or no playwright: the tests marked 'browser' are deselected",
}
"""Marks of tests that need something of the machine, and the sentence where it is missing."""


def pytest_configure() -> None:
    """A process that is started in the background ignores Ctrl-C (``&`` in a script) or the end of its terminal
    (``nohup``), and so would all that tests start."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if FULL & {name, name.partition("[")[0], name.partition("::")[0]}:
            item.add_marker("full")
    there = {"cuda": torch.cuda.is_available(), "browser": CHROMIUM is not None and find_spec("playwright") is not None}
    for mark in (mark for mark in LACKS if not there[mark]):
        without = [item for item in items if item.get_closest_marker(mark)]
        if without:
            config.hook.pytest_deselected(items=without)
            items[:] = [item for item in items if item not in without]
            config.stash.setdefault(LEFT_OUT, {})[mark] = len(without)


def pytest_collection_finish() -> None:
    """The garbage collector need not look again and again at what was imported: a tenth of the tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that each test begins with. The user's cache stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(autouse=True)
def _own_environment(environment: dict[str, str]) -> None:
    """A command that ran in this process, for a test or a module's fixture, set variables for its peers."""
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """More would only spin: the tensors are tiny, and other tests run beside this one."""
    torch.set_num_threads(1)


LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for mark, left_out in config.stash.get(LEFT_OUT, {}).items():
        terminalreporter.write_line(f"{LACKS[mark]} ({left_out})")
