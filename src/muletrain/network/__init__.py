"""Connections between peers.

- ``base`` is the ``Network`` seam. ``delivery``, ``answers``, ``offences`` and ``pacing`` serve every
  implementation.
- ``libp2p`` is the real network over hivemind's ``daemon``: calls, frames over ``streams``, the ``directory``, and
  ``relay`` with ``pipes`` and ``ways`` to peers that cannot be dialled.
- ``gate`` admits peers, ``gated`` guards everything that passes the daemon, ``trust`` judges certificates, ``identity``
  holds keys.
- ``memory`` is the network of virtual worlds; ``shaped`` emulates links on one machine. Both send through ``paced``
  streams over ``roads``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def _import_in_parts(package: str) -> None:
    """Let ``import package.part`` import that part alone, and a name of the package the one part that defines the name.
    The package's ``__init__`` runs only for undefined names. hivemind's ``__init__`` imports the averager, optimizers
    and servers, torch and scipy: seconds in each command that talks to a peer, for nothing that is used here."""
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.loader is None or spec.origin is None:
        return
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    parts = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0
        for alias in node.names
    }

    def load(name: str) -> Any:
        hidden = name.startswith("__") and name != "__version__"
        if hidden or f"{package}.{name}" in sys.modules:  # the import system asks for these
            raise AttributeError(name)
        if name in parts:
            part, own = parts[name]
            value = getattr(importlib.import_module(part), own)
            setattr(module, name, value)
            return value
        del module.__getattr__
        loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = load  # type: ignore[method-assign]
    sys.modules[package] = module
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


for _package in ("hivemind", "hivemind.utils", "hivemind.dht"):
    _import_in_parts(_package)
