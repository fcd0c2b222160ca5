"""Make the pictures in docs/dashboard: each scene is a command whose page Chromium shows.

    python scripts/dashboard_pictures.py                     # all, about 20 minutes
    python scripts/dashboard_pictures.py chaos phone         # some
    python scripts/dashboard_pictures.py sim=http://...      # of a page that is served already

Needs the extra 'dev', Chromium, and Pillow (which matplotlib brings)."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from playwright.sync_api import sync_playwright

from muletrain.dashboard.page import RunPage
from muletrain.dashboard.server import Dashboard
from tests.played_events import played

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "dashboard"
RUN = (sys.executable, "-m", "muletrain")
STEP = "Number((document.querySelector('.tile .value')?.textContent ?? '').replaceAll(',', ''))"
REGIONS = """name = "three-regions"
[[machines]]
name = "ohio"
count = 14
region = "ohio"
device = "T4"
up_mbps = 1000.0
down_mbps = 1000.0
[[machines]]
name = "virginia"
count = 14
region = "virginia"
device = "T4"
up_mbps = 1000.0
down_mbps = 1000.0
[[machines]]
name = "oregon"
count = 12
region = "oregon"
device = "A100 40GB"
up_mbps = 1000.0
down_mbps = 1000.0
[matrix]
preset = "regional-4"
"""


@dataclasses.dataclass(frozen=True)
class Scene:
    """A command, and the moment at which its page is shown."""

    words: tuple[str, ...]
    moment: str
    """Condition in the page."""
    scheme: str = "light"
    width: int = 1440
    height: int = 1500
    patience_s: float = 600
    before: tuple[tuple[str, ...], ...] = ()
    """Commands to run first."""


def sim(*more: str) -> tuple[str, ...]:
    """A fleet of 40 machines in three regions."""
    sets = ("model.preset=gpt3-125m", "fleet.stages=4", "train.batch=64", *more)
    return ("dashboard", "--sim", "fleet.toml", "--hours", "0.1", *(w for s in sets for w in ("--set", s)))


def short(*sets: str) -> tuple[str, ...]:
    """A run of a minute."""
    return ("run", *(w for s in ("train.steps=60", *sets) for w in ("--set", s)))


SCENES = {
    "first-run": Scene(("run", "--dashboard", "0"), f"{STEP} >= 180"),
    "chaos": Scene(
        (
            "run",
            "--dashboard",
            "0",
            "--chaos",
            "kill stage1@step30; freeze any@step50 for 9s; join@step60; kill any@step100",
        ),
        f"{STEP} >= 103",
        scheme="dark",
    ),
    "hub": Scene(("run", "--strategy", "hub", "--dashboard", "0"), f"{STEP} >= 60"),
    "waits": Scene(
        ("start", "--dashboard", "0", "--listen", "127.0.0.1", "--set", "fleet.stages=3"),
        "document.querySelector('.word')?.textContent === 'waiting' && /stage 2/.test(document.body.innerText)",
        scheme="dark",
        height=900,
    ),
    "sim": Scene(sim(), f"{STEP} >= 8", scheme="dark", patience_s=1800),
    "thousand": Scene((), f"{STEP} >= 30", height=1300),
    "compare": Scene(
        ("dashboard", "--port", "0", "runs/*"),
        "document.querySelectorAll('#compare tr').length > 9",
        height=1000,
        before=(short("optimizer.lr=0.001"), short("optimizer.lr=0.004", "fleet.stages=1")),
    ),
    "phone": Scene(
        ("run", "--dashboard", "0", "--chaos", "kill stage1@step20"),
        f"{STEP} >= 30",
        scheme="dark",
        width=390,
        height=1900,
    ),
}


@contextmanager
def served(scene: Scene, folder: Path) -> Iterator[str]:
    """The address of the scene's page."""
    for words in scene.before:
        subprocess.run([*RUN, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    if scene.words:
        found = (sorted(str(p) for p in folder.glob(w)) if "*" in w else [w] for w in scene.words)
        with command(tuple(itertools.chain(*found)), folder) as url:
            yield url
        return
    with Dashboard(0) as board:
        board.pages.extend(pages())
        yield board.url


def pages() -> list[RunPage]:
    """A page of played events: a thousand peers take hours to simulate message by message."""
    return [filled(RunPage("thousand-peers"), peers=1000, stages=16, steps=34, losses=25, microbatches=1024)]


def filled(page: RunPage, **run: float) -> RunPage:
    """``page`` with the events of a played run."""
    page.loading, now = True, [0.0]
    for event in played(planned=400, checkpoint=15, **run):  # type: ignore[arg-type]
        page(event)
        now[0] = event.t
    page.clock, page.loading = lambda: now[0], False
    return page


@contextmanager
def command(words: tuple[str, ...], folder: Path) -> Iterator[str]:
    """Start a command and yield the address that it prints; end it in order afterwards."""
    process = subprocess.Popen([*RUN, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        url = None
        for line in process.stdout:
            if found := re.search(r"dashboard: (\S+)", line):
                url = found[1]
                break
            print(line, end="")
        if url is None:
            raise SystemExit(f"{' '.join(words)}: no page")
        threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True).start()
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def picture(browser: Browser, url: str, scene: Scene, path: Path) -> None:
    """Write the page at the scene's moment."""
    size = {"width": scene.width, "height": scene.height}
    page = browser.new_context(viewport=size, color_scheme=scene.scheme).new_page()  # type: ignore[arg-type]
    page.goto(url)
    page.wait_for_function(f"() => {scene.moment}", timeout=1000 * scene.patience_s)
    page.wait_for_timeout(700)
    image = Image.open(io.BytesIO(page.screenshot()))
    image.convert("RGB").save(path, "WEBP", quality=82, method=6)
    page.context.close()
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main(asked: list[str]) -> None:
    given = dict(word.split("=", 1) for word in asked if "=" in word)
    names = [word.partition("=")[0] for word in asked] or list(SCENES)
    OUT.mkdir(exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    with sync_playwright() as started, tempfile.TemporaryDirectory() as work:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name in names:
            begun, folder = time.monotonic(), Path(work) / name
            folder.mkdir()
            (folder / "fleet.toml").write_text(REGIONS, encoding="utf-8")
            if name in given:
                picture(browser, given[name], SCENES[name], OUT / f"{name}.webp")
            else:
                with served(SCENES[name], folder) as url:
                    picture(browser, url, SCENES[name], OUT / f"{name}.webp")
            print(f"{name}: {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
