"""The event that describes a run before the first step."""

from __future__ import annotations

from muletrain.events.event import Event, Number


class RunPrepared(Event):
    """A command has prepared a run, before the first step: model, data, method and place."""

    data: str
    """Path of the text, or factory of the samples."""
    documents: dict[str, int]
    """Of a text: fields of ``data.tokens.TokenStats`` that count documents and changes."""
    changes: list[str]
    """Omissions and changes in the text, a line each, with the count."""
    unit: str
    """Unit of ``train``, ``heldout`` and ``taken``: 'tokens' or 'samples'."""
    train: int
    heldout: int
    steps: int
    first_step: int
    """Steps done before, in a resumed run."""
    taken: int
    """Tokens or samples of all steps."""
    epochs: Number
    """Average number of times that the steps take each one."""
    model: str
    start: str
    """Where the first weights come from."""
    params: int
    """Parameters of the model, each counted once."""
    trained_params: int
    batch: int
    """Sequences or samples of a step."""
    microbatch: int
    context: int
    """Longest sequence [tokens]; 0: samples have none."""
    optimizer: str
    lr: Number
    """Peak learning rate."""
    warmup: int
    """Steps until the peak."""
    schedule: str
    final_lr: Number
    """Learning rate at the end, as a share of the peak."""
    precision: str
    """'auto': each peer measures the fastest choice on the device."""
    strategy: str
    stages: int
    peers: int
    """Peers that the run waits for; 0: as many as come."""
