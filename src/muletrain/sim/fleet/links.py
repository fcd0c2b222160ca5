"""The links of a virtual fleet: frames carry tiny tensors, but take the time of the run's real frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.network.memory import Conditions
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.core.blocks import Block
from muletrain.runtime.microbatch.messages import Backward, Forward
from muletrain.runtime.pool.messages import Give, Result
from muletrain.sim.fleet.hollow import PARAMS
from muletrain.wire.codec import IDS
from muletrain.wire.frame import frame_size

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from muletrain.config.fleet_file import Link
    from muletrain.planning.cost import StageCost
    from muletrain.sim.setting import Setting
    from muletrain.wire.frame import Frame


class FleetLinks(Conditions):
    """The setting's paths, with frames as heavy as the run's real frames. ``kind_of``, ``stage_of``: of each peer and
    client by id, as filled by the caller; ``clients``: by id, those that are there. Blocks of a client are of an
    accumulator, and blocks of a peer that has clients are of weights."""

    def __init__(
        self,
        setting: Setting,
        kind_of: Mapping[str, int],
        stage_of: Mapping[str, int],
        clients: Collection[str],
    ) -> None:
        self._setting, self._kind_of, self._stage_of, self._clients = setting, kind_of, stage_of, clients

    def _link(self, sender: str, receiver: str) -> Link:
        return self._setting.links[self._kind_of[sender]][self._kind_of[receiver]]

    def path_bytes_per_s(self, sender: str, receiver: str) -> float:
        return self._link(sender, receiver).bandwidth_bytes_per_s

    def delay_s(self, sender: str, receiver: str) -> float:
        return self._link(sender, receiver).delay_s

    def weight(self, sender: str, frame: Frame) -> int:
        message, cost = frame.message, self._setting.cost
        match message:
            case Forward():
                return cost.forward_bytes[message.stage]
            case Backward() if frame.tensors:
                return cost.backward_bytes[message.stage]
            case Give() | Result():
                return (
                    sum(
                        tensor.shape[0] * (cost.ids_bytes if tensor.codec in IDS else cost.backward_bytes[-1])
                        for tensor in frame.tensors
                    )
                    // cost.sequences
                )
            case Shard() | Reduced():
                return self._stage(sender).averaged_bytes * frame.tensors[0].shape[0] // PARAMS
            case Block() if sender in self._clients:
                return self._stage(sender).averaged_bytes * frame.tensors[0].shape[0] // (4 * PARAMS)
            case Block() if self._clients:
                return self._stage(sender).weight_bytes * frame.tensors[0].shape[0] // (4 * PARAMS)
        return frame_size(frame)

    def _stage(self, peer: str) -> StageCost:
        return self._setting.cost.stages[self._stage_of[peer]]
