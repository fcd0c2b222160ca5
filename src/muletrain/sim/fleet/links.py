"""The links of a virtual fleet: frames carry tiny tensors, but take the time of the run's real frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.network.memory import Conditions
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.microbatch.messages import Backward, Forward
from muletrain.runtime.pool.messages import Chunk, Give, Result
from muletrain.sim.fleet.hollow import PARAMS
from muletrain.wire.codec import IDS
from muletrain.wire.frame import frame_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.config.fleet_file import Link
    from muletrain.planning.cost import StageCost
    from muletrain.sim.setting import Setting
    from muletrain.wire.frame import Frame


class FleetLinks(Conditions):
    """The setting's paths, with frames as heavy as the run's real frames. ``kind_of``, ``stage_of``: of each peer and
    client by id, as filled by the caller."""

    def __init__(self, setting: Setting, kind_of: Mapping[str, int], stage_of: Mapping[str, int]) -> None:
        self._setting, self._kind_of, self._stage_of = setting, kind_of, stage_of

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
            case Backward():
                return cost.backward_bytes[message.stage]
            case Give() | Result():
                return (
                    sum(
                        tensor.shape[0] * (cost.ids_bytes if tensor.codec in IDS else cost.backward_bytes[-1])
                        for tensor in frame.tensors
                    )
                    // cost.sequences
                )
            case Shard() | Reduced() | Chunk(weights=None):
                return self._stage(sender).averaged_bytes * frame.tensors[0].shape[0] // PARAMS
            case Chunk():
                return self._stage(sender).weight_bytes * frame.tensors[0].shape[0] // PARAMS
        return frame_size(frame)

    def _stage(self, peer: str) -> StageCost:
        return self._setting.cost.stages[self._stage_of[peer]]
