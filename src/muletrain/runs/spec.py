"""The work of one peer process, as JSON on standard input."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from muletrain.config.trusted import trusted


class WorkerSpec(BaseModel):
    """Describes the peer of a process. A spec travels by pipe, never by argument or file: the ticket holds a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["found", "join"]
    name: str
    folder: str
    """Folder for this process' events, and for the founder's checkpoints."""
    ticket: str
    config: str | None = None
    """Founder: the run's configuration as JSON."""
    resume: str | None = None
    """Founder: the checkpoint folder of a resumed run."""
    alone: bool = False
    """Founder: the only peer of a run that cannot be joined; needs no network outside the process."""
    client: bool = False
    """Joiner: becomes a client if the run has clients (strategy 'hub'), and is in no roster."""
    stage: int | None = None
    device: str = "auto"
    precision: str | None = None
    memory_gib: float | None = None
    sharing: int = 1
    """Peers that compute on this device."""
    host_memory: int | None = None
    """This peer's share of the machine's memory [bytes], measured before any peer used memory; default: all free
    memory."""
    threads: int = 1
    data: Literal["config", "none"] | str = "none"
    """Place of this peer's corpus: as in the run's configuration (the founder's machine), nowhere, or at this path."""
    factories: tuple[str, ...] = Field(default_factory=trusted)
    """Factories that this machine's owner allows: the peer imports no other factory, even if the run names one."""
    model: str | None = None
    """Folder on this machine that may have the model that a run trains an adapter for."""
    tokens_gib: float = 1.0
    """Most GiB of shared tokens that this peer may keep in the cache of this machine's owner."""
    place: str | None = None
    """The shared place for checkpoints that this machine's owner allows. The peer opens no other place, even if the run
    names one."""
    swap_folder: str | None = None
    """Folder on this machine for a stage that is larger than the peer's device; default: ``folder``."""
    listen: str = "127.0.0.1"
    port: int = 0
    announce: tuple[str, ...] = ()
    """Addresses to dial instead of the listening addresses."""
    private: bool = False
    """No other machine can connect to this machine; the peer dials members, which relay its traffic."""
    keeps_ticket: bool = False
    """Joiner on a machine without the founder: writes a ticket that the machine's owner can pass on."""
    bandwidth_bytes_per_s: float | None = None
    """Most bytes per second that this peer may send, and receive, for the training."""
    probe: bool = False
    """Founder: measure machines and links before training."""
    faults: bool = False
    """Faults may be injected: this peer can be cut off from other peers."""
    fleet_index: int | None = None
    """Number of the peer in the configuration's fleet profile that this process emulates."""
