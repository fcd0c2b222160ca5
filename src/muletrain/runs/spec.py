"""The work of one peer process, as JSON on its standard input."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from muletrain.config.trusted import trusted


class WorkerSpec(BaseModel):
    """Tells a process what peer it is. It travels by pipe, never by argument or file: the ticket holds a secret."""

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
    """Founder: it is the run's only peer, and none can join, so it needs no network outside its process."""
    client: bool = False
    """Joiner: it becomes a client if the run has any (strategy 'hub'), and is in no roster."""
    stage: int | None = None
    device: str = "auto"
    precision: str | None = None
    memory_gib: float | None = None
    sharing: int = 1
    """Peers that compute on this device."""
    host_memory: int | None = None
    """This peer's share of the machine's memory [bytes], measured before any of its peers used it; default: all that is
    free."""
    threads: int = 1
    data: Literal["config", "none"] | str = "none"
    """Where this peer has the corpus: as in the run's configuration (the founder's machine), nowhere, or at this
    path."""
    factories: tuple[str, ...] = Field(default_factory=trusted)
    """Factories that this machine's owner allows: the peer imports no other, whatever the run says."""
    tokens_gib: float = 1.0
    """Most GiB of shared tokens that this peer may keep in the cache of this machine's owner."""
    place: str | None = None
    """The shared place for checkpoints that this machine's owner allows. This peer opens no other, whatever the run
    says."""
    swap_folder: str | None = None
    """Folder on this machine for a stage that is larger than the peer's device; default: ``folder``."""
    listen: str = "127.0.0.1"
    port: int = 0
    announce: tuple[str, ...] = ()
    """Addresses that others should dial instead of the ones it listens on."""
    private: bool = False
    """No other machine can connect to this one. It dials members, and they relay for it."""
    keeps_ticket: bool = False
    """Joiner on a machine without the founder: it writes a ticket that its owner can pass on."""
    bandwidth_bytes_per_s: float | None = None
    """Most bytes per second that this peer may send, and receive, for the training."""
    probe: bool = False
    """Founder: measure machines and links before training."""
    faults: bool = False
    """Faults may be injected: this peer can be cut off from others."""
    fleet_index: int | None = None
    """Number of the peer in the configuration's fleet profile that this process emulates."""
