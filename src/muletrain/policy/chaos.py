"""``muletrain run --chaos`` follows a plan of faults, read from text or drawn from a seed. Pure: which peer is hit is
decided at the fault's time.

    plan      = fault { ";" fault }
    fault     = ("kill" | "corrupt") target exactly | "freeze" target exactly "for" time | "join" when
              | "move" target "to" "stage" number when | "partition" count { "|" count } when "for" time
    target    = "any" | "trainer" | "newcomer" | "stage" number | the name of a peer; of a hub also "server" | "client"
    when      = "@step" number | "@" time           once that step is done, or that long after training began
    exactly   = when | "@step" number ":" phase     ... or when the target reaches that point of that step (or a later one)
    phase     = "forward" | "backward"              about to compute a microbatch
              | "sealing"                           its accumulator is closed, and no other peer knows its content
              | "averaging"                         others have the part of the gradient that it reduced; it may lack theirs
              | "applying"                          the step's record is whole, the weights are still those before
    time      = "10s", "1m30s", "250ms"
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from muletrain.config.problems import closest
from muletrain.errors import ConfigError
from muletrain.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["kill", "freeze", "corrupt", "partition", "join", "move"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Phase = Literal["forward", "backward", "sealing", "averaging", "applying"]
PHASES: tuple[Phase, ...] = get_args(Phase)
EXACT = ("kill", "freeze", "corrupt")
LASTING = ("freeze", "partition")
LONGEST_S = 864_000.0
HELP = (
    "Faults to inject, e.g. 'kill stage1@step5; freeze any@20s for 10s; join@30s; partition 3|1@40s for 15s; corrupt any@50s; "
    "move any to stage1@step9'. Targets: any, newcomer (joined later), trainer, stage0, peer-1, and of a hub server, client, "
    "client-1; kills of 'any', 'newcomer', 'trainer' and 'server' spare a stage's last sound peer and the coordinator. '@step5': "
    "once step 5 is done; '@step5:averaging': in the middle of it (also forward, backward, sealing, applying); '@20s': that long "
    "after training began. 'random' draws a plan by --seed."
)


@dataclass(frozen=True)
class Fault:
    """One fault. ``for_s``: how long a freeze or a partition lasts. Exactly one of ``step`` (done) and ``at_s`` (after
    training began) is set."""

    kind: Kind
    step: int | None = None
    at_s: float | None = None
    target: str = ""
    """'any', 'trainer', 'newcomer', 'server', 'client', 'stageK' or a peer's name; empty for join and partition."""
    phase: Phase | None = None
    """In the middle of ``step``, when the target reaches this point."""
    stage: int | None = None
    """Destination of a move."""
    sides: tuple[int, ...] = ()
    """Sizes of the sides of a partition, in the order of the peers' names."""
    for_s: float = 0.0

    def __str__(self) -> str:
        what = "|".join(map(str, self.sides)) or self.target
        what += f" to stage{self.stage}" if self.stage is not None else ""
        when = f"step{self.step}" if self.at_s is None else _time(self.at_s)
        when += f":{self.phase}" if self.phase is not None else ""
        lasting = f" for {_time(self.for_s)}" if self.kind in LASTING else ""
        return f"{self.kind}{' ' if what else ''}{what}@{when}{lasting}"


@dataclass(frozen=True)
class Bounds:
    """Limits of the faults: the local fleet's peers by name, stages, and the run's steps."""

    names: tuple[str, ...]
    stages: int
    steps: int
    clients: tuple[str, ...] = ()
    """Names of the processes that compute for ``peers`` (strategy ``hub``)."""


def parse(text: str, bounds: Bounds) -> tuple[Fault, ...]:
    """Returns the faults of ``text``. Raises ConfigError with the error, the alternatives, and a caret under the
    place."""
    faults, begin, text = [], 0, re.sub(r"\s", " ", text)  # the caret must stand where the word does
    for part in text.split(";"):
        if part.strip():
            faults.append(_Reader(text, begin, begin + len(part), bounds).fault())
        begin += len(part) + 1
    if not faults:
        raise ConfigError(f"--chaos: no fault in {text!r}; give one, e.g. 'kill any@step5', or 'random'")
    return tuple(faults)


def readable(faults: Sequence[Fault]) -> str:
    """Returns the text that ``parse`` takes."""
    return "; ".join(map(str, faults))


def draw(seed: int, bounds: Bounds) -> tuple[Fault, ...]:
    """Returns three to six faults that the run survives; kills at most all peers beyond one per stage."""
    rng = random.Random(f"chaos/{seed}")
    spare = len(bounds.names) - bounds.stages
    kinds: list[Kind] = ["kill"] * rng.randint(min(1, spare), max(0, min(2, spare)))
    gentle: list[Kind] = ["freeze", "corrupt", "join", "partition"]
    kinds += [rng.choice(gentle[: 4 if len(bounds.names) > 1 else 3]) for _ in range(rng.randint(2, 4))]
    faults = []
    for kind in rng.sample(kinds, len(kinds)):
        target = "any" if kind in ("kill", "freeze", "corrupt") else ""
        fault = Fault(kind, step=rng.randint(1, max(1, bounds.steps * 4 // 5)), target=target)
        if kind == "partition":
            fault = replace(fault, sides=(len(bounds.names) - 1, 1))
        if kind in LASTING:
            fault = replace(fault, for_s=float(rng.randint(2, 10)))
        faults.append(fault)
    return tuple(sorted(faults, key=lambda f: f.step or 0))


class _Reader:
    """Reads one fault, from ``begin`` to ``end`` of the text."""

    def __init__(self, text: str, begin: int, end: int, bounds: Bounds) -> None:
        self._text, self._at, self._end, self._bounds = text, begin, end, bounds
        self._last = begin  # where the word read last begins

    def fault(self) -> Fault:
        word = self._take(r"[^\s@;]+", "a fault")
        if word not in KINDS:
            self._wrong(f"unknown fault '{word}'", sorted(KINDS), word)
        target = ""
        sides: tuple[int, ...] = ()
        if word == "partition":
            sides = self._sides()
        elif word != "join":
            target = self._target()
            self._check_client(word, target, exact=False)
        stage = self._destination() if word == "move" else None
        self._take("@", "'@' and a time ('@step5' or '@20s')")
        step, at_s = self._when()
        phase = self._phase() if step is not None and word in EXACT and re.match(r"\s*:", self._rest()) else None
        self._check_client(word, target, exact=phase is not None)
        for_s = 0.0
        if word in LASTING:
            self._take(r"for\b", "'for' and how long (e.g. 'for 10s')")
            for_s = self._time("how long it lasts, e.g. '10s'")
        if self._rest().strip():
            self._take(r"\S.*", "")
            self._wrong("the fault ends before this; faults are separated by ';'")
        return Fault(word, step=step, at_s=at_s, target=target, phase=phase, stage=stage, sides=sides, for_s=for_s)

    def _target(self) -> str:
        target = self._take(r"[^\s@;]+", "a target")
        stages = [f"stage{k}" for k in range(self._bounds.stages)]
        clients = self._bounds.clients
        known = ["any", "trainer", "newcomer", *stages, *self._bounds.names]
        known += ["server", "client", *clients] if clients else []
        if target not in known:
            self._wrong(f"unknown target '{target}'", known, target)
        return target

    def _check_client(self, word: str, target: str, *, exact: bool) -> None:
        """Raises ConfigError for a fault that no client can have."""
        if target in ("client", *self._bounds.clients) and (word == "move" or exact):
            what = "no point of a step" if exact else "no stage to move from"
            self._wrong(
                f"'{target}' has {what}; kill, freeze or corrupt it at a step or a time, e.g. 'kill client@step5'"
            )

    def _destination(self) -> int:
        self._take(r"to\b", "'to' and a stage, e.g. 'to stage1'")
        word = self._take(r"[^\s@;]+", "a stage, e.g. 'stage1'")
        stages = [f"stage{k}" for k in range(self._bounds.stages)]
        if word not in stages:
            self._wrong(f"unknown stage '{word}'", stages, word)
        return stages.index(word)

    def _phase(self) -> Phase:
        self._take(":", "':'")
        word = self._take(r"[^\s@;]+", "a point of the step, e.g. ':averaging'")
        if word not in PHASES:
            self._wrong(f"unknown point '{word}'", PHASES, word)
        return word

    def _sides(self) -> tuple[int, ...]:
        text = self._take(r"\d{1,9}(?:\s*\|\s*\d{1,9})*", "the sizes of the sides, e.g. '2|2'")
        peers = len(self._bounds.names)
        sides = tuple(int(part) for part in text.split("|"))
        if len(sides) < 2 or 0 in sides or sum(sides) != peers:
            self._wrong(f"the sides must be two or more, none empty, and add up to the fleet's {peers} peers")
        return sides

    def _when(self) -> tuple[int | None, float | None]:
        if not re.match(r"\s*step", self._rest()):
            return None, self._time("a time: '@step5' (once step 5 is done) or '@20s' (after training began)")
        step = int(self._take(r"step\d{1,9}", "the number of a step, e.g. 'step5'").removeprefix("step"))
        if not 1 <= step < self._bounds.steps:
            self._wrong(
                f"the run takes {self._bounds.steps} steps: a fault can come after steps 1 to {self._bounds.steps - 1}"
            )
        return step, None

    def _time(self, expected: str) -> float:
        unit = r"\s*(?!for\b)[a-z]+"
        text = self._take(rf"[\d.]+(?:{unit})?(?:\s*\d[\d.]*{unit})*", expected)
        try:
            seconds = round(parse_duration(text), 3)
        except ValueError as e:
            self._wrong(str(e))
        if seconds > LONGEST_S:
            self._wrong("a time of more than ten days")
        return seconds

    def _rest(self) -> str:
        return self._text[self._at : self._end]

    def _take(self, pattern: str, expected: str) -> str:
        match = re.compile(rf"\s*({pattern})").match(self._text, self._at, self._end)
        if match is None:
            blank = re.compile(r"\s*").match(self._text, self._at, self._end)
            self._last = self._at if blank is None else blank.end()
            self._at = min(self._end, self._last + 1)
            self._wrong(f"expected {expected}")
        self._last, self._at = match.start(1), match.end(1)
        return match[1]

    def _wrong(self, problem: str, known: Sequence[str] = (), given: str = "") -> NoReturn:
        if known:
            guess = closest(given, list(known))
            hint = f"did you mean '{guess}'? " if guess else ""
            problem += f"; {hint}known are {', '.join(known)}"
        carets = " " * self._last + "^" * max(1, self._at - self._last)
        raise ConfigError(f"--chaos: {problem}\n  {self._text}\n  {carets}")


def _time(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
