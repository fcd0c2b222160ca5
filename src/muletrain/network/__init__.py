"""Connections between peers: libp2p by way of hivemind's daemon, the DHT, relays, links in memory and shaped ones."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def _import_in_parts(package: str) -> None:
    """Have ``import package.part`` import that part alone: the package's own ``__init__`` waits until somebody asks for
    what it defines. hivemind's imports its averager, optimizers and servers, and scipy for them: 0.7 s of CPU and 42
    MiB of each peer, and of each command that talks to one, for nothing that is used here."""
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.loader is None:
        return
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def load(name: str) -> Any:
        hidden = name.startswith("__") and name != "__version__"
        if hidden or f"{package}.{name}" in sys.modules:  # there import looks for itself
            raise AttributeError(name)
        del module.__getattr__
        loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = load  # type: ignore[method-assign]
    sys.modules[package] = module


_import_in_parts("hivemind")
