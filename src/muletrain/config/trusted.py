"""A process imports only the factories that the local user named, in a configuration or as an option.

A run's configuration also comes from other machines, and names a function and arguments. That alone imports nothing
here.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_named: set[str] = set()


def trust(*names: str | None) -> None:
    """Allow this process to import ``names``, which the local user gave ('package.module:function'; None: nothing)."""
    _named.update(name for name in names if name is not None)


def trusted() -> tuple[str, ...]:
    """All names that this process may import."""
    return tuple(sorted(_named))


def imported(field: str, name: str) -> Callable[..., Any]:
    """The function ``name`` that ``field`` of the configuration gives. Raises ConfigError if the user of this machine
    did not name the function, and if importing or calling fails."""
    if name not in _named:
        others = f" (named here: {', '.join(trusted())})" if _named else ""
        raise ConfigError(
            f"{field}: the run needs '{name}', which is code that this machine would execute. If you installed it and "
            f"trust it, add --factory {name}, or in Python factory=['{name}']{others}"
        )
    module, _, function = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last: nothing there stands in for a module of the library or of a package
    try:
        holder = importlib.import_module(module)
    except (Exception, SystemExit) as e:  # whatever the module's own code raises
        raise ConfigError(
            f"{field}: '{name}' cannot be imported ({type(e).__name__}: {e}); install its package in this Python, or run "
            f"from the folder that contains it"
        ) from e
    if (found := getattr(holder, function, None)) is None:
        raise ConfigError(
            f"{field}: '{name}' cannot be imported: {module} ({getattr(holder, '__file__', None)}) has no {function}; name the "
            f"function that builds"
        )
    if not callable(found):
        raise ConfigError(f"{field}: '{name}' is {type(found).__name__}, not a function; name the function that builds")
    return found  # type: ignore[no-any-return]
