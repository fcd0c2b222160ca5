"""The dashboard's page in a real browser: it shows what the events say, and is usable without a mouse."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from muletrain import events as ev
from muletrain.dashboard.page import RunPage
from muletrain.dashboard.server import Dashboard
from muletrain.dashboard.sources import FolderSource
from tests.conftest import CHROMIUM
from tests.played_events import played, written

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
WAIT_MS = 10_000
"""Longest wait for what must come [ms]; the machine may be busy."""
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


class Scene:
    """A board with one page of a played run, and browsers that look at it."""

    def __init__(self, board: Dashboard, browser: Browser) -> None:
        self.board, self.browser = board, browser
        self.requests: list[str] = []
        self.errors: list[str] = []

    def open(self, *, url: str = "", **context: Any) -> Page:
        page = self.browser.new_context(**context).new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.goto(url or self.board.url)
        return page

    @property
    def run(self) -> RunPage:
        return self.board.pages[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def scene(browser: Browser) -> Iterator[Scene]:
    with Dashboard(0) as board:
        board.pages.append(page_of(*played(peers=6, stages=3, steps=20, planned=90, checkpoint=10)))
        scene = Scene(board, browser)
        yield scene
        for context in browser.contexts:
            context.close()


def page_of(*events: ev.Event) -> RunPage:
    now = [0.0]
    page = RunPage("played", "runs/played", clock=lambda: now[0])
    page.loading = True
    for event in events:
        page(event)
        now[0] = event.t
    page.loading = False
    return page


def shown(page: Page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def test_the_page_shows_what_the_events_say_and_asks_no_other_host(scene: Scene) -> None:
    page = scene.open()
    page.wait_for_selector(".card >> nth=5")
    state, peers = scene.run.sections(), scene.run.peers()
    tiles = dict(zip(shown(page, ".tile .name"), shown(page, ".tile .value"), strict=True))
    assert tiles["step"] == "20"
    assert tiles["loss"] == f"{state['head']['loss']:.3f}"
    assert tiles["peers"] == "6"
    assert shown(page, ".word") == [state["health"]["word"]]
    assert sorted(shown(page, ".card .name .clip")) == sorted(p["name"] for p in peers.values())
    for card in page.locator(".card").all():
        name = card.locator(".name .clip").inner_text()
        assert f"{int(100 * peers[name]['busy'] + 0.5)} %" in card.inner_text()
        assert "2.10 GB" in card.inner_text()
    rows = page.locator("#peers tbody tr").all_inner_texts()
    assert {row.split("\t")[1]: int(row.split("\t")[8]) for row in rows} == {
        p["name"]: p["microbatches"] for p in peers.values()
    }
    assert len(shown(page, ".checkpoints li")) == 2
    assert "joined\n6" in [text.replace(" ", "\n") for text in shown(page, ".kind")] or "joined6" in shown(
        page, ".kind"
    )
    assert page.locator("#loss canvas").count() == 1
    assert "at step 20" in str(page.locator("#loss [role=img]").get_attribute("aria-label"))
    page.wait_for_timeout(600)
    own = f"http://127.0.0.1:{scene.board.gate.port}/"
    assert [url for url in scene.requests if not url.startswith(own)] == []
    assert scene.errors == []


@pytest.mark.alone
def test_a_peer_that_dies_is_grey_within_two_seconds(scene: Scene) -> None:
    page = scene.open()
    card = page.locator(".card", has_text="tokyo-2")
    card.wait_for()
    assert card.get_attribute("data-state") == "training"
    died_s = time.monotonic()
    t = scene.run.sections()["head"]["t"] + 1
    scene.run(ev.PeerDown(t=t, peer="frankfurt-0", peer_id="id-tokyo-2", name="tokyo-2", reason="no answer"))
    page.wait_for_selector(".card[data-state=silent]")
    took_s = time.monotonic() - died_s
    assert "suspected" in card.inner_text()
    assert took_s < 2.0
    light = card.evaluate("node => getComputedStyle(node).borderLeftColor")
    red, green, blue = map(int, re.findall(r"\d+", light)[:3])
    assert max(red, green, blue) - min(red, green, blue) < 24, "grey"


def test_it_reconnects_and_misses_nothing(scene: Scene) -> None:
    page = scene.open()
    page.wait_for_selector(".link[data-tone=good]")
    for queue in list(scene.board.publisher._viewers):  # as for a slow viewer
        scene.board.publisher._viewers.discard(queue)
        queue.put_nowait(None)
    for k in range(3):
        scene.run(ev.Note(level="warning", message=f"while away {k}", t=1.9e9 + k))
    page.wait_for_selector("text=while away 2")
    assert len(page.locator(".events .text", has_text="while away").all()) == 3


def test_it_comes_back_after_the_command_began_again(scene: Scene) -> None:
    page = scene.open()
    page.wait_for_selector(".link[data-tone=good]")
    port = scene.board.gate.port
    scene.board.__exit__()
    page.wait_for_selector(".link[data-tone=bad]")
    with Dashboard(port) as again:
        again.pages.append(page_of(*played(peers=2, stages=1, steps=3, planned=9)))
        page.wait_for_selector(".link[data-tone=good]")
        page.wait_for_function("() => document.querySelectorAll('.card').length === 2")
    scene.board.__enter__()


def test_two_viewers_see_the_same_and_a_wrong_token_sees_nothing_but_the_reason(scene: Scene) -> None:
    first, second = scene.open(), scene.open()
    for page in (first, second):
        page.wait_for_selector(".card")
    scene.run(ev.Note(level="warning", message="news for all", t=1.9e9))
    for page in (first, second):
        page.wait_for_selector("text=news for all")
    wrong = scene.open(url=scene.board.url[:-3] + "xyz")
    assert "wrong token" in wrong.inner_text("body")


def test_text_from_the_network_is_text(scene: Scene) -> None:
    scene.run(ev.JoinRefused(remote="x", reason=EVIL, name=EVIL, t=1.9e9))
    scene.run(
        replace(next(e for e in played() if isinstance(e, ev.PeerJoined)), name=EVIL, peer=EVIL, peer_id="id-evil")
    )
    scene.run(ev.Sampled(step=20, texts=[EVIL], t=1.9e9))
    page = scene.open()
    alerts: list[str] = []
    page.on("dialog", lambda dialog: alerts.append(dialog.message))
    page.wait_for_selector("blockquote")
    assert EVIL in page.inner_text("blockquote")
    assert EVIL in shown(page, ".card .name .clip")
    assert page.locator("main img, main script").count() == 0
    assert alerts == []


def test_an_earlier_time_is_shown_and_left_by_the_keyboard_alone(scene: Scene) -> None:
    page = scene.open()
    page.wait_for_selector(".card")
    page.focus("#scrub")
    for _ in range(400):
        page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#past:not([hidden])")
    page.wait_for_function("() => !document.querySelector('.tile .value').textContent.startsWith('20')")
    step = int(page.locator(".tile .value").first.inner_text())
    assert 0 < step < 20
    assert page.locator("#scrub").get_attribute("aria-valuetext") is not None
    frames = [found[1] for at in scene.run.frames.times if (found := scene.run.frames.at(at)) is not None]
    frame = next(f for f in map(json.loads, frames) if f["head"]["step"] == step)
    assert sorted(shown(page, ".card .name .clip")) == sorted(p["name"] for p in frame["peers"].values())
    page.keyboard.press("End")
    page.wait_for_selector("#past", state="hidden")
    assert page.locator(".tile .value").first.inner_text() == "20"


def test_everything_can_be_reached_by_the_keyboard(scene: Scene) -> None:
    page = scene.open()
    page.wait_for_selector(".card")
    reached = set[str]()
    for _ in range(140):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(document.activeElement.id || document.activeElement.className || document.activeElement.tagName)"
            )
        )
    assert {
        "theme",
        "scrub",
        "pipe",
        "card",
        "find-peer",
        "find-event",
        "events",
        "checkpoints",
        "sort",
        "kind",
    } <= reached
    page.focus(".card")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    assert page.evaluate("document.activeElement.textContent") == "Close"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    page.fill("#find-peer", "stage1")
    page.wait_for_function("() => document.querySelectorAll('#peers tbody tr').length === 2")


def test_stop_and_remove_are_for_the_owner_after_a_question(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    async def steer(folder: Path, action: str, peer_id: str) -> Any:
        from muletrain.dashboard.steering import Done

        asked.append((action, peer_id))
        return Done(True, "the run ends after the current step")

    monkeypatch.setattr("muletrain.dashboard.site.steer", steer)
    page = scene.open()
    page.wait_for_selector(".card")
    assert page.locator("#stop").is_hidden()
    scene.run.owned = scene.run.stops = lambda: True
    scene.run.version += 1
    page.click("#stop")
    page.click("dialog >> text=Cancel")
    assert asked == []
    page.click("#stop")
    page.click("dialog .danger")
    page.wait_for_selector("dialog >> text=the run ends")
    page.click("dialog >> text=Close")
    page.click(".card >> nth=0")
    page.click("dialog >> text=Remove from the run")
    page.click("dialog .danger")
    page.wait_for_selector("dialog >> text=Done")
    assert [action for action, _ in asked] == ["stop", "kick"]
    stranger = scene.open(url=f"http://127.0.0.1:{scene.board.gate.port}/")
    stranger.wait_for_selector(".card")
    assert stranger.locator("#stop").is_hidden(), "without the token of the link"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing(scene: Scene, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    scene.run(ev.PeerDown(t=1.9e9, peer="frankfurt-0", peer_id="id-tokyo-2", name="tokyo-2", reason="no answer"))
    scene.run(ev.ClientEnlisted(peer_id="c", name="client-1", stage=0, t=1.9e9))
    scene.run(ev.Sampled(step=20, texts=["Once upon a time"], t=1.9e9))
    page = scene.open(color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)
    page.wait_for_selector(".card")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    found = Axe().run(page).response["violations"]
    assert [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found] == []


def test_runs_side_by_side(browser: Browser) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with Dashboard(0) as board:
        for k, lr in enumerate(("0.001", "0.003")):
            run = page_of(*played(peers=2, stages=1, steps=9, seed=k))
            run.name, run.config = f"run-{k}", {"optimizer.lr": lr, "train.steps": "9"}
            board.pages.append(run)
        scene = Scene(board, browser)
        page = scene.open(bypass_csp=True)
        page.wait_for_selector("#compare table")
        assert page.locator("#compare table").nth(1).locator("tbody").inner_text().split() == [
            "optimizer.lr",
            "0.001",
            "0.003",
        ]
        losses = page.locator("#compare tbody tr", has_text="loss [nats/token]").first.inner_text().split("\t")[1:]
        assert losses == [f"{r.sections()['head']['loss']:.3f}" for r in board.pages]
        assert Axe().run(page).response["violations"] == []
        page.click("text=run-1")
        page.wait_for_selector(".card")
        assert scene.errors == []


def test_a_thousand_peers_are_grouped(browser: Browser) -> None:
    with Dashboard(0) as board:
        board.pages.append(page_of(*played(1000, 16, 6, losses=3, planned=90, microbatches=1024)))
        page = Scene(board, browser).open()
        page.wait_for_selector(".dots")
        assert page.locator(".card").count() == 0
        assert page.locator(".dots i").count() == 1000
        assert page.locator("#peers tbody tr").count() == 100
        assert "silent" not in shown(page, ".states li")
        page.fill("#find-peer", "tokyo-11 ")
        page.wait_for_function("() => document.querySelectorAll('#peers tbody tr').length < 100")
        page.click(".entry >> nth=0")
        page.wait_for_selector("dialog[open]")


@pytest.mark.alone
def test_a_day_of_events_is_on_the_page_in_two_seconds(browser: Browser, tmp_path: Path) -> None:
    """A page that is opened beside a run of 24 hours; reading the files is measured in ``test_dashboard``."""
    folder = written(played(8, 4, 8640, losses=40, checkpoint=200), tmp_path / "day")
    with Dashboard(0) as board:
        source = FolderSource(folder, board.publisher.watched)
        source.page.loading = True
        source.look()
        board.pages.append(source.page)
        Scene(board, browser).open().wait_for_selector(".card >> nth=7")  # the browser's own start
        took_s = list[float]()
        for _ in range(3):  # the machine may be busy
            begun = time.monotonic()
            page = Scene(board, browser).open()
            page.wait_for_selector(".card >> nth=7")
            page.wait_for_function("() => document.querySelector('.tile .value').textContent === '8,640'")
            took_s.append(time.monotonic() - begun)
        assert min(took_s) < 2.0
