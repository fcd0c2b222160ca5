"""Clients and servers of a hub that lie: the weights are those of a single process, and nobody waits long."""

from __future__ import annotations

import pytest
import torch

from proofs.hub_lies import CLIENT_LIES, SERVER_LIES
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(800)
CLIENTS = tuple(f"client-{stage}{letter}" for stage in (0, 1) for letter in "abcd")


def world(*faults: Fault, steps: int = 6, verify: float = 0.0) -> Scenario:
    overrides = (f"hub.verify={verify}",) if verify else ()
    return Scenario(1, (2, 2), 2, steps, 6, 0.01, faults, clients=CLIENTS, sequences=4, overrides=overrides, trace=True)


def lie(how: str, *who: str) -> tuple[Fault, ...]:
    return tuple(Fault(0.0, "lie", (w,), FOR_EVER_S, how=how) for w in who)


@pytest.mark.parametrize("how", CLIENT_LIES)
def test_two_of_four_clients_that_lie_cost_no_number_and_little_time(how: str) -> None:
    lies = lie(how, "client-0a", "client-0b", "client-1a")
    honest, lied = (play(world(*faults, verify=1.0 if how == "hurry" else 0.0)) for faults in ((), lies))
    assert lied.violations == []
    assert lied.difference < 1e-5
    print(how, honest.virtual_s, lied.virtual_s)


@pytest.mark.parametrize("how", SERVER_LIES)
def test_a_server_that_lies_to_its_clients_costs_no_number_and_little_time(how: str) -> None:
    honest, lied = play(world()), play(world(*lie(how, "peer-0a")))
    assert lied.violations == []
    assert lied.difference < 1e-5
    print(how, honest.virtual_s, lied.virtual_s)
