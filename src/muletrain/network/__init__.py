"""Connections between peers.

- ``base`` is the ``Network`` seam. ``delivery``, ``answers``, ``offences`` and ``pacing`` serve every
  implementation.
- ``libp2p`` is the real network over hivemind's ``daemon``: ``calls``, ``traffic`` (frames, over ``streams`` and
  ``intake``), the ``directory``, and ``relay`` with ``pipes`` and ``ways`` to peers that cannot be dialled.
- ``gate`` admits peers, ``gated`` applies it to everything that passes the daemon, ``trust`` judges certificates,
  ``identity`` holds keys, ``entry`` joins a run.
- ``memory`` is the network of virtual worlds (``barriers``, ``conditions``, ``inbox``, ``memory_streams``); ``shaped``
  emulates links on one machine. Both send through ``paced`` streams over ``roads``.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def _import_in_parts(package: str) -> None:
    """Let ``import package.part`` import that part alone; the package's ``__init__`` runs when one of its own names is
    used. hivemind's ``__init__`` imports its averager, optimizers and servers, and scipy: 0.7 s of CPU and 42 MiB in
    each peer, and in each command that talks to one, for nothing that is used here."""
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.loader is None:
        return
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def load(name: str) -> Any:
        hidden = name.startswith("__") and name != "__version__"
        if hidden or f"{package}.{name}" in sys.modules:  # the import system asks for these
            raise AttributeError(name)
        del module.__getattr__
        loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = load  # type: ignore[method-assign]
    sys.modules[package] = module


_import_in_parts("hivemind")
