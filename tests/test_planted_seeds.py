"""For each promise of a run: a bug that breaks it is found by worlds that seeds draw, not only by those made for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from proofs import draws
from proofs.play import play
from tests.planted import PROMISES

if TYPE_CHECKING:
    from collections.abc import Callable

torch.set_num_threads(1)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SEEDS = 300
PLANTED = [
    pytest.param(bug, text, id=f"{promise}: {bug.__name__}")
    for promise, bugs in PROMISES.items()
    for bug, text in bugs.items()
]


@pytest.mark.parametrize(("bug", "text"), PLANTED)
def test_seeds_find_it(
    bug: Callable[[pytest.MonkeyPatch], None],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    bug(monkeypatch)
    found = next((seed for seed in range(SEEDS) if any(text in v for v in play(draws.draw(seed)).violations)), None)
    record_property("seed", found)
    assert found is not None
