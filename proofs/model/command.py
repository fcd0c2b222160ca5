"""``python -m proofs model``: explores all bounds and plays all executions, or shows what breaks without a rule."""

from __future__ import annotations

import json as jsonlib
from math import inf
from typing import TYPE_CHECKING

from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.errors import ConfigError
from proofs.model.bounds import BOUNDS, LARGE, execute, without
from proofs.model.executions import EXECUTIONS
from proofs.model.rules import RULES
from proofs.model.search import explore
from proofs.model.space import Space

if TYPE_CHECKING:
    from muletrain.cli.show.doing import Doing
    from proofs.model.search import Found


def show_all(words: str, seconds: float | None, *, large: bool, json: bool) -> int:
    """Explore the bounds, and play the executions, whose title contains ``words``; each for ``seconds`` at most.
    Returns the number of broken promises. Raises ConfigError if nothing has such a title."""
    bounds = BOUNDS | LARGE if large else BOUNDS
    executions = {f"{number}. {execution.title}": number for number, execution in EXECUTIONS.items()}
    chosen = [title for title in (*bounds, *executions) if words in title]
    if not chosen:
        raise ConfigError(f"--only {words}: no title has these words; there are: {'; '.join((*bounds, *executions))}")
    broken = 0
    for title in chosen:
        with doing(title) as told:

            def tell(states: int, told: Doing = told, title: str = title) -> None:
                told(None, f"{title}: {states} states")

            if title in executions:
                found = execute(executions[title], tell=tell)
            else:
                found = explore(Space(bounds[title]), seconds=seconds or inf, tell=tell)
        _show(title, found, json=json)
        broken += bool(found.broken)
    return broken


def show_without(rule: str, *, json: bool) -> int:
    """Show the shortest way to a broken promise without ``rule``. Returns 1 if there is one. Raises ConfigError."""
    if rule not in RULES:
        raise ConfigError(f"--without {rule}: no such rule; there are: {', '.join(RULES)}")
    with doing(f"looking for a broken promise without the rule: {RULES[rule]}"):
        found = without(rule)
    _show(f"without the rule: {RULES[rule]}", found, json=json)
    return int(bool(found.broken))


def _show(title: str, found: Found, *, json: bool) -> None:
    if json:
        print(jsonlib.dumps({"title": title, **vars(found)}))
        return
    told = "holds" if found.complete else "holds so far"
    print_ = make_console().print
    print_(f"{found.states:9d} states {found.seconds:7.1f} s  {title}: {found.broken or told}", soft_wrap=True)
    for line in found.trace:
        print_(f"          {line}", soft_wrap=True)
