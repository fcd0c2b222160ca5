"""The model of a step's agreement: its promises hold within bounds, and each rule is needed (``proofs/README.md``)."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from muletrain.errors import ConfigError
from proofs.__main__ import app
from proofs.model.bounds import BOUNDS, NEEDED, execute, without
from proofs.model.command import show_all, show_without
from proofs.model.executions import EXECUTIONS
from proofs.model.rules import ALL, Reducing, Round, Row, Run, decide
from proofs.model.search import explore
from proofs.model.space import Space

QUICK = ("two replicas, a freeze", "two replicas, a cut", "two replicas, a one-way link", "three replicas, a death")
A, B, X = 0, 1, 2
FIRST, SECOND, OTHER = Round(0, ((A, 0, 0, 1), (B, 0, 0, 0)), 3), Round(1, ((A, 0, 0, 1),), 1), Round(0, (), 0)


@pytest.mark.parametrize("bounds", QUICK)
def test_every_state_within_bounds_keeps_the_promises(bounds: str) -> None:
    found = explore(Space(BOUNDS[bounds]))
    assert (found.broken, found.complete) == ("", True)
    assert found.states > 1000
    assert found.ends > 10


@pytest.mark.parametrize("number", EXECUTIONS)
def test_every_way_to_go_on_from_a_hard_moment_keeps_the_promises(number: int) -> None:
    found = execute(number)
    assert (found.broken, found.complete) == ("", True)


@pytest.mark.parametrize("rule", NEEDED)
def test_without_a_rule_a_promise_breaks(rule: str) -> None:
    found = without(rule)
    assert found.broken
    print(f"without {rule}: {found.broken}", *found.trace, sep="\n    ")


def test_each_rule_is_seen_failing_by_a_search_or_by_a_table() -> None:
    assert ALL - NEEDED.keys() == {"held by most"}  # the test below


def _tie(rules: frozenset[str]) -> tuple[Run, tuple[Row, ...]]:
    """B holds the preferred round, A another one; X judges."""
    a = Row((0, 0), 0b110, 1, seal=(0, 1), holds=(SECOND,), vote=SECOND)
    b = Row((0, 0), 0b101, 0, seal=(0, 0), holds=(FIRST,), vote=FIRST)
    return Run((0, 0, 1), 1, rules), (a, b, Row((0, 0), 0b011, 0, holds=(OTHER,), vote=OTHER))


def test_after_a_tie_a_peer_that_lacks_the_preferred_round_takes_it_before_it_counts() -> None:
    """Otherwise the death of its only holder would lose a gradient that the other stage has applied."""
    run, rows = _tie(ALL)
    assert decide(run, rows, A, Reducing(), patient=False).kind == "wait"
    assert decide(run, rows, A, Reducing(), patient=True)[:2] == ("take", FIRST)
    assert decide(run, rows, X, Reducing(), patient=True).kind == "wait"
    both = (rows[A]._replace(holds=(FIRST, SECOND)), *rows[1:])
    assert decide(run, both, X, Reducing(), patient=True)[:2] == ("apply", (FIRST, OTHER))
    run, rows = _tie(ALL - {"held by most"})
    assert decide(run, rows, X, Reducing(), patient=True)[:2] == ("apply", (FIRST, OTHER))


def test_the_command_prints_states_and_shortest_ways_to_broken_promises(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["model", "--without", "majority", "--json"])
    told = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 1
    assert "makes the record" in told["broken"]
    assert told["trace"][0].startswith("A reduce")
    capsys.readouterr()
    assert show_all("two replicas, a one-way link", None, large=False, json=True) == 0
    assert json.loads(capsys.readouterr().out)["broken"] == ""


def test_names_that_do_not_exist_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="one-way link"):
        show_all("three mules", None, large=False, json=False)
    with pytest.raises(ConfigError, match="no such rule; there are: reach"):
        show_without("hope", json=False)
