"""Finding the worker's class in a worker process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from stepcast.bus.errors import ConfigError

from .base import Worker

#: The name under which a user's script is loaded: not "__main__", so that what a guard protects does not run again.
SCRIPT_MODULE = "__stepcast_main__"

_loading_script = False
_reached_executor = False


class ScriptReachedExecutorError(BaseException):
    """The user's script, loaded for its worker class, has come to the line that builds the executor.

    A script needs no ``__main__`` guard: the worker's class stands above that line, and nothing below it is wanted. Not
    an `Exception`, so that no handler in the script takes it for one of its own.
    """


def stop_if_loading_script() -> None:
    """Called where an executor is built: ends the loading of a script in a worker process.

    Raises:
        ScriptReachedExecutorError: this process is a worker that loads the script for its class.
    """
    global _reached_executor  # noqa: PLW0603 - one script, once in the life of the process
    if _loading_script:
        _reached_executor = True
        raise ScriptReachedExecutorError


def load_worker_class(spec: str) -> type[Worker]:
    """Import the worker's class.

    Args:
        spec: ``module:Class`` or ``path/to/script.py:Class``.

    Returns:
        The class.

    Raises:
        ConfigError: the module has no such class, or it is not a `Worker`.
        Exception: whatever importing the module raises.
    """
    source, _, name = spec.rpartition(":")
    module = _load_script(source) if source.endswith(".py") else importlib.import_module(source)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        where = " above the line that builds the executor" if source.endswith(".py") else ""
        raise ConfigError(f"{source} has no {name}: the worker's class must be defined there{where}")
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError(f"{spec} is not a subclass of stepcast.Worker")
    return found


def _load_script(path: str) -> Any:
    global _loading_script  # noqa: PLW0603 - one script, once in the life of the process
    spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} can't be loaded as a Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT_MODULE] = module
    _loading_script = True
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Once it has come that far, whatever the script makes of being stopped there does not matter.
        if not _reached_executor:
            raise
    finally:
        _loading_script = False
    return module
