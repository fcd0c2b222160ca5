"""What the process of one peer is told, as JSON on its standard input: the only way a face talks to a peer process."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class WorkerSpec(BaseModel):
    """One peer process. The secret in the ticket is why this travels by pipe, never by argument or file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["found", "join"]
    name: str
    folder: str
    """Where this process writes its events (and the founder the checkpoints)."""
    ticket: str
    config: str | None = None
    """Founder: the run's configuration as JSON."""
    resume: str | None = None
    """Founder: the checkpoint folder to go on from."""
    stage: int | None = None
    device: str = "auto"
    precision: str | None = None
    memory_gib: float | None = None
    sharing: int = 1
    """Peers that compute on this device."""
    host_memory: int | None = None
    """This peer's share of the machine's memory, measured before any of its peers took any [bytes]; default: what is
    free."""
    threads: int = 1
    data: Literal["config", "none"] | str = "none"
    """Where this peer has the corpus: as the run's configuration says (the founder's machine), nowhere, or at this
    path."""
    tokens_gib: float = 1.0
    """What this peer may keep of the tokens of runs that share them, in the cache of this machine's owner; 0:
    nothing."""
    place: str | None = None
    """The shared place for checkpoints that the owner of this machine lets this peer use; another one that the run
    names is not opened."""
    listen: str = "127.0.0.1"
    port: int = 0
    announce: tuple[str, ...] = ()
    """Addresses that others should dial instead of those it listens on."""
    private: bool = False
    """No other machine can connect to this one: it connects to them, and they lead others to it."""
    keeps_ticket: bool = False
    """A joiner on a machine of its own writes a ticket it can pass on."""
    bandwidth_bytes_per_s: float | None = None
    """What this peer may send, and take in, for the training."""
    probe: bool = False
    """Founder: measure machines and links before training."""
    faults: bool = False
    """Faults will be injected: this peer can be cut off from others."""
    fleet_index: int | None = None
    """Which peer of the configuration's fleet profile this process emulates."""
