"""muletrain: train large transformer models on whatever machines you can get, over ordinary internet.

The package reads top-down; imports run downwards only (enforced by ``tests/test_imports.py``):

=============================  =====================================================================
``cli`` ``api`` ``given``      the commands a person types; the same from Python
``dashboard``                  a local page that shows runs
``runs``                       builds a run from a config: processes, tickets, progress, reports
``sim``                        the virtual world, fleets played, plans
``runtime``                    the step protocol: microbatches, agreement, checkpoints, recovery
``network`` ``compute`` ``wire``  the seams and their implementations; frames and tensor codecs
``model`` ``data`` ``optim``   decoder and stages; corpora and microbatches; AdamW and LAMB
``script``                     modules and datasets of the user's script, by file
``planning``                   decisions before a run: placement, partition (no torch, no sockets)
``strategies``                 differences between the systems: swarm, pipeline, swap, hub (likewise)
``policy``                     decisions of a running peer: wiring, claims, cover (likewise)
``config`` ``events`` ``clock`` ``units`` ``errors``  the common base
=============================  =====================================================================
"""

__version__: str

_API = ("Run", "doctor", "evaluate", "generate", "join", "load", "plan", "simulate", "start", "train")


def __getattr__(name: str) -> object:
    """The Python interface (``muletrain.api``) is imported when it is used: commands and peers do without."""
    from importlib import import_module

    if name in _API:
        return getattr(import_module("muletrain.api"), name)
    if name == "events":
        return import_module("muletrain.events")
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("muletrain")
        except PackageNotFoundError:  # a source tree that is not installed
            return "0+source"
    raise AttributeError(f"module 'muletrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_API, "__version__"]
