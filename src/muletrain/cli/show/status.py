"""The output of ``muletrain status``: the members' announcements, checked."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from rich.console import Group, RenderableType
from rich.text import Text

from muletrain.cli.show.tables import new_table
from muletrain.runtime.peer.messages import HOLDS_S, LOADING, SHOWN_DOWN
from muletrain.units import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from muletrain.network.base import PeerId
    from muletrain.runs.view import RunView


LISTED = 16
"""Most peers that are listed one by one without being asked to."""
SHOWN_WAITS = 3
"""Most waits that are shown."""
FRESH_S = 15.0
"""Age from which an announcement is stale: members announce every 10 s (``runtime.peer.messages.ANNOUNCE_S``), and clocks
differ by some seconds."""


def furthest(peers: Sequence[Announced]) -> Announced:
    """The member that stands for the run: the furthest fresh one. A stale one may have died before a step back."""
    return max([p for p in peers if p.age_s <= FRESH_S] or peers, key=lambda p: p.step)


def status_of(
    peers: Sequence[Announced], missing: Sequence[str], unheard: Sequence[Down] = (), *, verbose: bool = False
) -> RenderableType:
    """The run as a line, and its peers: one by one if ``verbose``, or up to ``LISTED``; else a line for each stage.
    ``unheard``: serving members without an announcement here."""
    if unheard:
        names = ", ".join(f"{m.name} (stage {m.stage})" for m in unheard)
        hint = Text(
            f"in the run, but without an announcement that counts: {names}; such a machine's clock, or this one's, may be off by more "
            f"than {HOLDS_S:.0f} s",
            style="yellow",
        )
        return Group(hint, status_of(peers, missing, verbose=verbose)) if peers else hint
    if not peers:
        waits = f"training has not started: {'; '.join(missing)}"
        return Text(waits if missing else "no peer has announced itself: the run has just started or ended; try again")
    at = furthest(peers)
    old = f", {at.age_s:.0f} s ago" if round(at.age_s) else ""
    figures = [f"step {at.step} of {at.steps}{old}"]
    if at.loss is not None:
        figures.append(f"loss {at.loss:.3f}")
    if at.tokens_per_s is not None:
        figures.append(f"{at.tokens_per_s:,.0f} tokens/s")
    measured = [(p.heldout_step, p.heldout_loss) for p in peers if p.heldout_loss is not None]
    if measured:
        step, loss = max(measured)
        figures.append(f"held-out loss {loss:.3f} at step {step}")
    waiting = sorted((p for p in peers if p.waits), key=lambda p: p.step)[:SHOWN_WAITS]
    table = (_table if verbose or len(peers) <= LISTED else _stages)(peers, at)
    return Group(
        Text("  ".join(figures), style="bold"), table, *(Text(f"{p.name} {p.waits}", style="yellow") for p in waiting)
    )


def gone(peers: Sequence[Announced]) -> list[Down]:
    """Peers that do not answer the furthest member and no longer announce themselves."""
    announced = {p.id for p in peers}
    return [d for d in furthest(peers).down if d.id not in announced] if peers else []


def state_of(peer: Announced, peers: Sequence[Announced]) -> str:
    """'suspected': the furthest member gets no answer, or the announcement is stale; else the peer's own word."""
    silent = peer.age_s > FRESH_S or peer.id in {d.id for d in furthest(peers).down}
    return "suspected" if silent else peer.state


def _table(peers: Sequence[Announced], at: Announced) -> Table:
    """The peers by stage; with ids only if two share a name."""
    lost = gone(peers)
    names = [*(p.name for p in peers), *(d.name for d in lost)]
    alike = len(set(names)) < len(names)
    table = new_table("", ())
    pooled = any(p.clients is not None for p in peers)
    for header in (
        "stage",
        "peer",
        "state",
        "step",
        "seen",
        *(["clients"] if pooled else []),
        *(["id"] if alike else []),
    ):
        table.add_column(header, justify="right" if header in ("step", "seen", "clients") else "left")

    def row(stage: int, peer: Text, who: str, *cells: str, clients: str = "") -> None:
        table.add_row(str(stage), peer, *cells, *([clients] if pooled else []), *([who[-8:]] if alike else []))

    for stage in range(at.stages):
        for p in (of_stage := [p for p in peers if p.stage == stage]):
            roles = [*(["trainer"] if p.trainer else []), *(["swapped"] if p.parts else [])]
            role, seen = f" ({', '.join(roles)})" if roles else "", f"{p.age_s:.0f} s ago"
            clients = "" if p.clients is None else str(p.clients)
            state = state_of(p, peers)
            row(
                stage, Text(p.name + role), p.id, state, "-" if state == LOADING else str(p.step), seen, clients=clients
            )
        if not of_stage:
            row(stage, Text("no recent announcement", style="bold red"), "", "", "", "")
        for d in lost:
            if d.stage == stage:
                row(stage, Text(d.name), d.id, "gone", "-", "-")
    return table


def announced_by(view: RunView, now: float) -> list[Announced]:
    """The state of a run whose events are here, at the wall time ``now`` [s], as its members would announce it."""
    measured = view.validated[max(view.validated)] if view.validated else None
    heldout = math.nan if measured is None else measured.loss
    figures = {"loss": view.pace.loss, "tokens_per_s": view.pace.tokens_per_s(now), "heldout_loss": heldout}
    run: dict[str, Any] = {key: value for key, value in figures.items() if math.isfinite(value)}
    run |= {"step": view.step, "steps": view.steps, "stages": max(1, len(view.stages()))}
    run |= {} if measured is None else {"heldout_step": measured.step}
    lost = [p for p in view.peers.values() if p.lost and p.state != "replaced"]
    run["down"] = [{"id": p.peer_id or p.name, "name": p.name, "stage": max(0, p.stage)} for p in lost[-SHOWN_DOWN:]]
    read = list[Announced | None]()
    for peer in (p for of_stage in view.stages(present=True).values() for p in of_stage):
        own = {"name": peer.name, "stage": peer.stage, "trainer": peer.trainer, "state": peer.state}
        own |= {"parts": peer.parts} if peer.parts else {}
        own |= {"waits": peer.waits.reason()} if peer.waits is not None else {}
        read.append(Announced.read(peer.peer_id or peer.name, json.dumps({**run, **own}).encode()))
    return [p for p in read if p is not None]


def _stages(peers: Sequence[Announced], at: Announced) -> Table:
    """A line for each stage."""
    lost = Counter(d.stage for d in gone(peers))
    table = new_table("", ("stage",), ("peers",))
    table.add_column("states")
    table.add_column("step", justify="right")
    for stage in range(at.stages):
        of_stage = [p for p in peers if p.stage == stage]
        states = Counter(state_of(p, peers) for p in of_stage) + Counter({"gone": lost[stage]})
        words = Text(", ".join(f"{n} {state}" for state, n in states.most_common()))
        none = Text("no recent announcement", style="bold red")
        last = max((p.step for p in of_stage), default=0)
        table.add_row(str(stage), str(len(of_stage)), words if of_stage else none, str(last) if of_stage else "-")
    table.caption = "--verbose lists each peer"
    table.caption_justify = "left"
    return table


Name = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(printable)]


class Down(BaseModel):
    """A peer that does not answer another one."""

    id: Annotated[str, Field(max_length=128), AfterValidator(printable)]
    name: Name
    stage: Annotated[int, Field(ge=0)]


class Announced(BaseModel):
    """The announcement of a member in the directory (``runtime.peer.peer``), checked."""

    model_config = ConfigDict(allow_inf_nan=False)

    id: str
    age_s: float
    """Age of the announcement [s]."""
    name: Name
    stage: Annotated[int, Field(ge=0)]
    stages: Annotated[int, Field(ge=1, le=4096)]
    trainer: bool
    step: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=0)]
    loss: float | None = None
    tokens_per_s: float | None = None
    """``loss`` and ``tokens_per_s`` are of the run, as this member counts them."""
    heldout_loss: float | None = None
    heldout_step: Annotated[int, Field(ge=0)] = 0
    """The held-out loss that this member measured last, and the updates in the measured weights."""
    clients: Annotated[int, Field(ge=0)] | None = None
    """Clients that compute for this member; None: the run has none."""
    parts: Annotated[int, Field(ge=2)] | None = None
    """Parts of the stage that take turns on the device; None: the stage stays there."""
    left: bool = False
    """Whether the member left in order."""
    state: Annotated[str, Field(min_length=1, max_length=32), AfterValidator(printable)] = "training"
    """The member's own word for its state."""
    waits: Annotated[str, Field(max_length=2048), AfterValidator(printable)] = ""
    """What the member has waited for, for how long, and what it does next; empty: nothing takes long."""
    collects: bool = False
    """Whether the member collects the run's checkpoints."""
    down: Annotated[tuple[Down, ...], Field(max_length=64)] = ()
    """Peers that do not answer this member."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.stage >= self.stages or self.step > self.steps:
            raise ValueError("beyond the run")
        return self

    @classmethod
    def read(cls, peer: PeerId, value: bytes, age_s: float = 0.0) -> Announced | None:
        """The announcement in ``value``; None if malformed."""
        try:
            return cls.model_validate({**json.loads(value), "id": peer, "age_s": max(0.0, age_s)})
        except (ValueError, TypeError, RecursionError):  # a malformed announcement does not hide the rest
            return None
