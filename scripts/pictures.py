"""Draws the pictures of the explanations: ``python scripts/pictures.py`` writes ``docs/assets/*.svg``.

One look for all: a file has its own colours for light and dark, and the site replaces them with those of its palette
(``docs/assets/site.css``), so shapes have classes only."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
FOLDER = ASSETS
"""Where pictures are written."""
INKS = {
    "ink": ("#1f2933", "#e6e9ee"),
    "dim": ("#667080", "#9aa5b4"),
    "line": ("#aab4c0", "#566272"),
    "face": ("#ffffff", "#1b222c"),
    "a": ("#2f6fb0", "#6cb0f0"),
    "b": ("#2f8f5b", "#62c893"),
    "c": ("#c86b1f", "#f0a15a"),
    "d": ("#8a55b5", "#c39aea"),
    "bad": ("#c53d3d", "#f08080"),
}
STYLE = """
.box{fill:var(--face);stroke:var(--line);stroke-width:1.4}.zone{fill:none;stroke:var(--line);stroke-dasharray:5 4}
.t{fill:var(--ink)}.s{fill:var(--dim);font-size:12.5px}.h{fill:var(--ink);font-weight:600}
.l{fill:none;stroke:var(--line);stroke-width:1.8}.tip{fill:var(--line)}
.fa{fill:var(--a)}.fb{fill:var(--b)}.fc{fill:var(--c)}.fd{fill:var(--d)}.fbad{fill:var(--bad)}.on{fill:var(--face);font-size:12.5px;font-weight:600}
.la{stroke:var(--a)}.lb{stroke:var(--b)}.lc{stroke:var(--c)}.ld{stroke:var(--d)}.lbad{stroke:var(--bad)}
.gone{opacity:.45}text{font:15px system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif}
"""


class Picture:
    """Shapes of one picture."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.title, self.width, self.height = name, title, width, height
        self.shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, kind: str = "box", more: str = "") -> None:
        self.shapes.append(f'<rect class="{kind} {more}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8"/>')

    def text(self, x: float, y: float, words: str, kind: str = "t", anchor: str = "middle") -> None:
        self.shapes.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def machine(self, x: float, y: float, name: str, below: str = "", w: float = 112, gone: bool = False) -> None:
        """A box with a name, around ``x`` and ``y``."""
        state = "gone" if gone else ""
        self.box(x - w / 2, y - 24, w, 48, more=state + (" lbad" if gone else ""))
        self.text(x, y + (-2 if below else 5), name, f"t {state}")
        if below:
            self.text(x, y + 16, below, f"s {state}")
        if gone:
            self.line(x - w / 2 + 6, y - 18, x + w / 2 - 6, y + 18, "lbad", tip=False)

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        kind: str = "",
        *,
        tip: bool = True,
        dashed: bool = False,
        bend: float = 0,
    ) -> None:
        """A line, perhaps bent to its left by ``bend``, with an arrow's tip at the end."""
        dx, dy = x2 - x1, y2 - y1
        length = (dx * dx + dy * dy) ** 0.5
        cx, cy = (x1 + x2) / 2 + bend * dy / length, (y1 + y2) / 2 - bend * dx / length
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(f'<path class="l {kind}" d="M{x1:.1f} {y1:.1f}Q{cx:.1f} {cy:.1f} {x2:.1f} {y2:.1f}"{dash}/>')
        if tip:
            ux, uy = x2 - cx, y2 - cy
            size = (ux * ux + uy * uy) ** 0.5
            ux, uy = ux / size, uy / size
            bx, by = x2 - 8 * ux, y2 - 8 * uy
            fill = kind.replace("l", "f", 1) if kind else "tip"
            left, right = (f"{bx - k * uy:.1f} {by + k * ux:.1f}" for k in (4.5, -4.5))
            self.shapes.append(f'<path class="{fill}" d="M{x2:.1f} {y2:.1f}L{left}L{right}Z"/>')

    def disc(self, x: float, y: float, number: str, kind: str, r: float = 11, gone: bool = False) -> None:
        state = " gone" if gone else ""
        self.shapes.append(f'<circle class="f{kind}{state}" cx="{x:g}" cy="{y:g}" r="{r:g}"/>')
        self.text(x, y + 4.5, number, "on" + state)

    def write(self) -> None:
        light, dark = (";".join(f"--{name}:{pair[k]}" for name, pair in INKS.items()) for k in (0, 1))
        style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}{STYLE}"
        size = f'viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.title)}">'
        body = "\n".join(self.shapes)
        (FOLDER / f"{self.name}.svg").write_text(f"{head}\n<style>{style}</style>\n{body}\n</svg>\n", encoding="utf-8")


def fleet() -> Picture:
    p = Picture(
        "fleet",
        "Machines of four places serve two stages; one machine is gone, and its work goes to the others",
        520,
        290,
    )
    p.text(106, 28, "stage 0: layers 1 to 16", "h")
    p.text(414, 28, "stage 1: layers 17 to 32", "h")
    left = [(106, 75, "gaming PC", "Lyon"), (106, 145, "lab workstation", "Nairobi"), (106, 215, "spot GPU", "Oregon")]
    right = [(414, 75, "two cards", "Seoul"), (414, 145, "spot GPU", "Oregon"), (414, 215, "laptop", "Lyon")]
    for k, (x, y, *_rest) in enumerate(left):
        for j, (x2, y2, *_more) in enumerate(right):
            if j != 1:
                p.line(x + 70, y, x2 - 70, y2, "la" if k != 1 else "lb", tip=True)
    p.line(176, 145, 344, 145, "lbad", tip=False, dashed=True)
    for x, y, name, place in left:
        p.machine(x, y, name, place, 140)
    for x, y, name, place in right:
        p.machine(x, y, name, place, 140, gone=y == 145)
    p.text(260, 272, "The spot GPU of stage 1 is gone: microbatches take other ways, in the same step.", "s")
    return p


def step() -> Picture:
    p = Picture(
        "step",
        "A step: microbatches go forward and backward through the stages, replicas average, all update",
        640,
        400,
    )
    p.machine(70, 130, "trainer", "has the data", 116)
    for k, x in enumerate((250, 400, 550)):
        p.box(x - 62, 40, 124, 190, "zone")
        p.text(x, 30, f"stage {k}", "h")
        for y in (80, 190):
            p.machine(x, y, f"peer {'ACE'[k] if y == 80 else 'BDF'[k]}", "", 100)
        p.line(x - 20, 106, x - 20, 164, "lc")
        p.line(x + 20, 164, x + 20, 106, "lc")
    p.line(130, 120, 198, 80, "la")
    for (x1, y1), (x2, y2) in (((250, 80), (400, 190)), ((400, 190), (550, 80))):
        p.line(x1 + 50, y1 + (6 if y2 > y1 else -6), x2 - 50, y2 - 8, "la")
        p.line(x2 - 50, y2 + 8, x1 + 50, y1 + (22 if y2 > y1 else 10), "lb")
    for x, y, number, ink in ((158, 92, "1", "a"), (318, 150, "2", "b"), (400, 136, "3", "c")):
        p.disc(x, y, number, ink, 10)
    rows = [
        ("a", "1", "forward: activations; each peer chooses the next one, by measured speed"),
        ("b", "2", "backward: gradients return the same way, and are added up"),
        ("c", "3", "the replicas of a stage average their sums"),
        ("d", "4", "all stages agree on one record of the step, and every peer updates"),
    ]
    p.line(250, 240, 550, 240, "ld", tip=False)
    for x in (250, 400, 550):
        p.line(x, 240, x, 232, "ld")
    p.disc(325, 240, "4", "d", 10)
    for k, (ink, number, words) in enumerate(rows):
        p.disc(44, 282 + 32 * k, number, ink)
        p.text(66, 287 + 32 * k, words, "t", "start")
    return p


def exactly_once() -> Picture:
    p = Picture(
        "exactly-once", "Peer B dies with microbatches 2 and 5; A and C compute them again; each counts once", 640, 330
    )
    p.text(20, 30, "Stage 1 has three replicas and eight microbatches to count.", "s", "start")
    held = {"A": [1, 4, 7], "B": [2, 5], "C": [3, 6, 8]}
    for k, (name, ones) in enumerate(held.items()):
        y = 75 + 62 * k
        p.machine(80, y, f"peer {name}", "killed" if name == "B" else "", 100, gone=name == "B")
        for j, one in enumerate(ones):
            p.disc(160 + 34 * j, y, str(one), "bad" if name == "B" else "a", gone=name == "B")
    p.line(265, 128, 325, 84, "lbad")
    p.line(265, 146, 325, 192, "lbad")
    p.text(296, 141, "again", "s")
    for k, (name, ones, new) in enumerate((("A", [1, 4, 7], [5]), ("C", [3, 6, 8], [2]))):
        y = 75 + 124 * k
        p.machine(390, y, f"peer {name}", "", 100)
        for j, one in enumerate([*ones, *new]):
            p.disc(466 + 34 * j, y, str(one), "c" if one in new else "a")
    p.line(390, 103, 390, 171, "lc", tip=False)
    p.text(404, 142, "agree: whose sums count?", "s", "start")
    p.text(80, 279, "the step", "h")
    for j in range(8):
        p.disc(160 + 34 * j, 274, str(j + 1), "b")
    p.text(440, 279, "each microbatch once", "t", "start")
    p.text(
        320,
        314,
        "Two sums that share a microbatch never both count; gaps are computed again.",
        "s",
    )
    return p


def strategies() -> Picture:
    p = Picture("strategies", "The four strategies: swarm, pipeline, hub and swap", 640, 500)
    for k, (name, words) in enumerate(
        (
            ("swarm", "any peer of the next stage"),
            ("pipeline", "a planned place for each machine"),
            ("hub", "servers, and clients that compute for them"),
            ("swap", "the whole model passes through each device"),
        )
    ):
        x, y = 16 + 312 * (k % 2), 12 + 246 * (k // 2)
        p.box(x, y, 296, 230, "zone")
        p.text(x + 148, y + 28, name, "h")
        p.text(x + 148, y + 216, words, "s")
        if name in ("swarm", "pipeline"):
            for j, ink in enumerate("ab" if name == "pipeline" else "aa"):
                for i in range(2):
                    for to in (0, 1) if name == "swarm" else (j,):
                        p.line(
                            x + 94 + 84 * i - 20, y + 80 + 70 * j, x + 146 + 84 * i - 18, y + 80 + 70 * to, f"l{ink}"
                        )
            for i in range(3):
                for j in range(2):
                    p.disc(x + 58 + 90 * i, y + 80 + 70 * j, str(i), "a" if name == "swarm" or j == 0 else "b", 17)
        elif name == "hub":
            for i, sx in enumerate((x + 92, x + 204)):
                for dx, cy in ((-46, 80), (0, 62), (46, 80)):
                    p.line(sx, y + 130, sx + dx * 0.86, y + cy + 14, "lc", tip=False)
                    p.disc(sx + dx * 0.92, y + cy, "", "c", 9)
                p.disc(sx, y + 146, str(i), "a", 20)
            p.line(x + 112, y + 146, x + 182, y + 146, "la")
            p.text(x + 32, y + 180, "servers", "s", "start")
            p.text(x + 32, y + 52, "clients", "s", "start")
        else:
            for i in range(6):
                on = i in (2, 3)
                p.box(x + 34 + 39 * i, y + 130, 32, 28, "fa" if on else "box")
                p.text(x + 50 + 39 * i, y + 149, str(i), "on" if on else "s")
            p.box(x + 98, y + 56, 100, 40)
            p.text(x + 148, y + 81, "GPU", "t")
            p.line(x + 132, y + 126, x + 132, y + 102, "la")
            p.line(x + 166, y + 102, x + 166, y + 126, "lb")
            p.text(x + 148, y + 182, "blocks in the machine's memory or disk", "s")
    return p


def virtual_world() -> Picture:
    p = Picture(
        "virtual-world", "The same protocol runs over real machines or in one process with a virtual clock", 640, 340
    )
    p.box(110, 24, 420, 76)
    p.text(320, 56, "the code that trains", "h")
    p.text(320, 80, "steps, agreement, averaging, recovery, strategies", "s")
    for k, name in enumerate(("Clock", "Network", "Compute")):
        x = 180 + 140 * k
        p.line(x, 100, x, 128)
        p.box(x - 52, 132, 104, 34, "box")
        p.text(x, 154, name, "t")
        p.line(x - 16, 166, (110, 190, 270)[k], 204, "la")
        p.line(x + 16, 166, (370, 450, 530)[k], 204, "lc")
    p.box(20, 208, 290, 112, "zone")
    p.text(165, 234, "a real run", "h")
    p.text(165, 258, "wall clock", "s")
    p.text(165, 280, "libp2p over the internet", "s")
    p.text(165, 302, "PyTorch on CPUs and GPUs", "s")
    p.box(330, 208, 290, 112, "zone")
    p.text(475, 234, "the virtual world", "h")
    p.text(475, 258, "a clock that jumps to the next event", "s")
    p.text(475, 280, "links of a fleet file, in memory", "s")
    p.text(475, 302, "tiny tensors, or only their times", "s")
    return p


def trust() -> Picture:
    p = Picture("trust", "Strangers, members, the founder, and your machine: what each can do", 640, 330)
    p.box(8, 10, 624, 312, "zone")
    p.text(24, 34, "strangers: see that a node is there, and get no data", "s", "start")
    p.box(36, 52, 568, 252, "zone")
    p.text(52, 76, "members: have the ticket; read what they are sent; every message is checked", "s", "start")
    p.machine(150, 150, "founder", "decides what is trained", 200)
    p.machine(490, 150, "another member", "serves a stage", 170)
    p.box(150, 206, 340, 84)
    p.text(320, 232, "your machine", "h")
    p.text(320, 254, "limits: memory, bandwidth, hours, tokens", "s")
    p.text(320, 274, "runs no code of others, opens none of their paths", "s")
    p.line(200, 176, 240, 202, "la")
    p.line(450, 176, 404, 202, "la")
    p.line(254, 150, 402, 150, "lb")
    p.text(328, 140, "TLS 1.3", "s")
    return p


def sequence() -> Picture:
    """From ``docs/assets/sequence.json`` (``scripts/sequence.py``)."""
    rows: dict[tuple[float, str, str, int | None], list[str]] = {}
    for m in json.loads((ASSETS / "sequence.json").read_text(encoding="utf-8")):
        rows.setdefault((m["s"], m["from"], m["kind"], m["index"]), []).append(m["to"])
    p = Picture("sequence", "The messages of one step, in order of time", 680, 66 + 20 * len(rows))
    at = {"peer-0a": 210, "peer-0b": 340, "peer-1a": 470, "peer-1b": 600}
    for name, x in at.items():
        p.text(x, 22, name, "h")
        p.line(x, 34, x, p.height - 12, tip=False, dashed=True)
    p.text(210, 44, "trains", "s")
    colours = {"forward": "a", "backward": "c", "trainer_done": "c", "seal": "d", "entry": "d"}
    for k, ((s, sender, kind, index), receivers) in enumerate(rows.items()):
        y, ink = 62 + 20 * k, f"l{colours.get(kind, 'b')}"
        p.text(58, y + 4, f"{s:.3f} s", "s", "end")
        p.text(68, y + 4, kind if index is None else f"{kind} {index}", "s", "start")
        for x in {min(at[r] for r in receivers), max(at[r] for r in receivers)}:
            if x != at[sender]:
                p.line(at[sender], y, x, y, ink, tip=False)
        for receiver in receivers:
            p.disc(at[receiver], y, "", ink[1], 4)
    return p


PICTURES = (sequence, fleet, step, exactly_once, strategies, virtual_world, trust)

if __name__ == "__main__":
    for draw in PICTURES:
        draw().write()
