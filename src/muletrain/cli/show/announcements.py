"""The announcements of a run's members as events, for a page of a run that this machine takes no part in."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from muletrain import events as ev
from muletrain.cli.show.status import furthest, gone, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muletrain.cli.show.status import Announced, Down


class Announcements:
    """Tells looks at the announcements apart. Steps between two looks are one event, with their mean figures."""

    def __init__(self) -> None:
        self._serving: dict[str, Announced] = {}
        """Members by id, as of the last look."""
        self._silent: set[str] = set()
        self._step, self._step_s = 0, 0.0
        """Steps done at the last news, and the wall time of that look [s]."""
        self._started = False

    def events(
        self, look: tuple[Sequence[Announced], Sequence[Down], tuple[str, ...]], now: float
    ) -> Iterator[ev.Event]:
        """What changed since the last look, at the wall time ``now`` [s]."""
        peers, _, missing = look
        for event in self._changes(peers, missing, now):
            yield dataclasses.replace(event, t=now)

    def _changes(self, peers: Sequence[Announced], missing: tuple[str, ...], now: float) -> Iterator[ev.Event]:
        if missing or not peers:
            yield ev.Waiting(missing=list(missing))
            return
        at = furthest(peers)
        if not self._started:
            self._started, self._step, self._step_s = True, at.step, now
            yield _started(at, len(peers))
        yield from self._members(peers)
        silent = {p.id: p for p in peers if state_of(p, peers) == "suspected"} | {d.id: d for d in gone(peers)}
        for who in silent.keys() - self._silent:
            yield ev.PeerDown(peer_id=who, reason="no recent announcement", name=silent[who].name)
        self._silent = set(silent)
        if at.step < self._step:
            yield ev.SteppedBack(step=self._step, to=at.step, lost=[], moves=[], lineage=f"{now}")
            self._step, self._step_s = at.step, now
        elif at.step > self._step and now > self._step_s:
            yield self._done(at, now)
            self._step, self._step_s = at.step, now

    def _members(self, peers: Sequence[Announced]) -> Iterator[ev.Event]:
        for p in peers:
            known = self._serving.get(p.id)
            back = p.id in self._silent and state_of(p, peers) != "suspected"
            if known is None or known.stage != p.stage or back:
                yield _joined(p)
        for p in self._serving.values():
            if p.id not in {q.id for q in peers} | {d.id for d in gone(peers)}:
                yield ev.PeerLeft(peer_id=p.id, name=p.name, step=p.step)
        self._serving = {p.id: p for p in peers}

    def _done(self, at: Announced, now: float) -> ev.StepDone:
        seconds, steps = now - self._step_s, at.step - self._step
        tokens = round((at.tokens_per_s or 0.0) * seconds / steps)
        return ev.StepDone(
            step=at.step,
            loss=float("nan") if at.loss is None else at.loss,
            grad_norm=0.0,
            lr=float("nan"),
            tokens=tokens,
            duration_s=seconds / steps,
            lineage=f"{at.step}@{now}",
        )


def _started(at: Announced, peers: int) -> ev.RunStarted:
    unknown = {"run_id": "", "config_digest": "", "microbatches": 0, "tokens_per_step": 0}
    return ev.RunStarted(
        versions={},
        steps=at.steps,
        stages=at.stages,
        peers=peers,
        first_step=at.step,
        **unknown,  # type: ignore[arg-type]
    )


def _joined(p: Announced) -> ev.PeerJoined:
    about = {"device": "", "precision": "", "params": 0, "threads": 0}
    return ev.PeerJoined(
        peer_id=p.id,
        name=p.name,
        peer=p.id,
        stage=p.stage,
        trainer=p.trainer,
        swapped=p.parts or 0,
        **about,  # type: ignore[arg-type]
    )
