"""In a notebook's kernel: progress is HTML, and a kernel that is killed leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jupyter_client import BlockingKernelClient, KernelManager

from muletrain.cli.show.notebook import NotebookConsole, in_notebook
from muletrain.events import Note
from muletrain.runs.view import RunView

from .processes import wait_for_none_in, working_in

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore")  # of jupyter

CELL = """
import muletrain
run = muletrain.train(model={"width": 16, "heads": 2, "layers": 2, "context": 16, "vocab": 300}, train={"steps": 50000},
    fleet={"peers": 2}, compute={"threads": 1, "precision": "fp32"}, wait=False)
next(event for event in run.events() if event.kind == "step_done")
"""

WAITS = "import time; run.wait()"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelManager]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    yield manager
    manager.shutdown_kernel(now=True)


def answer(client: BlockingKernelClient, code: str) -> list[dict[str, str]]:
    """What the cell shows, by type; also what it replaces."""
    shown = list[dict[str, str]]()

    def heard(message: dict) -> None:  # type: ignore[type-arg]
        if "data" in message["content"]:
            shown.append(message["content"]["data"])

    reply = client.execute_interactive(code, timeout=240, output_hook=heard)
    assert reply["content"]["status"] == "ok", reply
    return shown


def test_a_killed_kernel_leaves_no_process(kernel: KernelManager, tmp_path: Path) -> None:
    client = kernel.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    shown = answer(client, CELL)
    assert any("<progress" in data.get("text/html", "") for data in shown)
    assert len(working_in(tmp_path)) >= 4, "kernel, command, two peers"
    kernel.signal_kernel(signal.SIGKILL)
    client.stop_channels()
    wait_for_none_in(tmp_path, 60)


def test_the_stop_button_ends_the_run_in_order(kernel: KernelManager, tmp_path: Path) -> None:
    """With a checkpoint; the kernel goes on."""
    client = kernel.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    answer(client, CELL)
    client.execute(WAITS, stop_on_error=False)
    while client.get_iopub_msg(timeout=60)["content"].get("code") != WAITS:
        pass  # an interrupt before that is nobody's
    kernel.interrupt_kernel()
    assert client.get_shell_msg(timeout=240)["content"]["ename"] == "KeyboardInterrupt"
    shown = answer(client, "run.wait().checkpoint.step == run.step > 0")
    assert [data["text/plain"] for data in shown if "text/plain" in data][-1] == "True"
    kernel.signal_kernel(signal.SIGKILL)
    client.stop_channels()
    wait_for_none_in(tmp_path, 60)


def test_this_is_no_notebook() -> None:
    assert not in_notebook()


def test_the_messages_of_others_are_escaped() -> None:
    console = NotebookConsole(RunView())
    console(Note("warning", "<script>"))
    assert "&lt;script&gt;" in console.drawn()
    assert "<script>" not in console.drawn()
