"""Tensors come to a device beside the computation: the same bits, the same refusals, and a bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from muletrain.compute import torch_compute
from muletrain.compute.arrivals import AHEAD, Arrivals, Coming, arrivals_for
from muletrain.compute.base import Microbatch
from muletrain.compute.threads import InlineExecutor, Threads
from muletrain.errors import ProtocolError

from .small_stages import IDS, MB, SEQUENCES, SPEC, Fleet, X, data, fleet, run, train, weights

__all__ = ["fleet"]


class Observed(Arrivals):
    """Without a device. It copies while ``open`` is set."""

    begun: int = 0
    open = threading.Event()

    def _copy(
        self, values: torch.Tensor, check: Callable[[torch.Tensor], None] | None
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        type(self).begun += 1
        self.open.wait(20)
        return super()._copy(values, check)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Observed]]:
    """Stages made from now on use them, as if they computed on a device."""
    monkeypatch.setattr(torch_compute, "arrivals_for", lambda device, thread: Observed(device, thread))
    Observed.begun = 0
    Observed.open.set()
    yield Observed
    Observed.open.set()


def test_training_through_arrivals_gives_the_same_bits(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    direct = fleet(2)
    arrivals = request.getfixturevalue("arrivals")
    copied = fleet(2)
    assert run(train(copied)) == run(train(direct))
    assert arrivals.begun > 0
    expected = run(weights(direct))
    assert all(torch.equal(value, expected[name]) for name, value in run(weights(copied)).items())


@pytest.mark.usefixtures("arrivals")
def test_what_no_correct_peer_sends_is_refused_as_before(fleet: Fleet) -> None:
    first, last = fleet(2)
    with pytest.raises(ProtocolError, match="token ids"):
        run(first.forward(MB, IDS + SPEC.vocab))
    with pytest.raises(ProtocolError, match="targets: token ids"):
        run(last.loss_backward(MB, X, IDS + SPEC.vocab, accumulate=True))
    run(first.forward(MB, IDS))
    begun = Observed.begun
    with pytest.raises(ProtocolError, match="gradient"):
        run(first.backward(MB, torch.zeros(1, 1, 1), accumulate=True))
    with pytest.raises(KeyError):
        run(first.backward(Microbatch(0, 7), X, accumulate=True))
    assert Observed.begun == begun, "it took no memory of the device"
    run(first.backward(MB, X, accumulate=True))


def test_the_next_inputs_come_while_the_device_computes(fleet: Fleet, arrivals: type[Observed]) -> None:
    """A call whose inputs are late waits in the compute's thread, not in the event loop; cancelled calls leave nothing."""
    (only,) = fleet(1)

    async def scenario() -> None:
        arrivals.open.clear()
        calls = [
            asyncio.create_task(only.loss_backward(Microbatch(0, k), *data(Microbatch(0, k)), accumulate=True))
            for k in range(4)
        ]
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        assert only._arrivals is not None
        assert len(only._arrivals._open) == AHEAD, "the others are copied when they begin"
        for call in calls[2:]:
            call.cancel()
        arrivals.open.set()
        await asyncio.gather(*calls[:2])
        await asyncio.gather(*calls[2:], return_exceptions=True)
        assert only._arrivals._open == set()

    run(scenario())


def test_only_devices_with_streams_have_them() -> None:
    threads = Threads(0, delayed=False, inline=False)
    assert arrivals_for(torch.device("cpu"), threads.arrivals) is None
    assert arrivals_for(torch.device("mps"), threads.arrivals) is None
    assert arrivals_for(torch.device("cuda"), InlineExecutor()) is None
    coming = Arrivals(torch.device("cpu"), threads.arrivals).bring(torch.ones(SEQUENCES))
    assert isinstance(coming, Coming)
    assert torch.equal(coming.take(), torch.ones(SEQUENCES))
    threads.close()
