"""Finding the worker's class in a worker process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextvars import ContextVar
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import Any

from stepcast.bus.errors import ConfigError

from .base import Worker

#: The name under which a user's script is loaded: not "__main__", so that what a guard protects does not run again.
SCRIPT_MODULE = "__stepcast_main__"


class _Load:
    """One loading of a script or module.

    Attributes:
        reached_executor: whether it has come to the line that builds the executor.
    """

    reached_executor = False


#: What this context loads: in the embedder's own process, other threads may well build executors meanwhile.
_load: ContextVar[_Load | None] = ContextVar("stepcast_load", default=None)
#: What this process loads, where it is a worker's: none of its threads may build one.
_process_load: _Load | None = None


class ScriptReachedExecutorError(BaseException):
    """The user's script or module, loaded for its worker class, has come to the line that builds the executor.

    A script needs no ``__main__`` guard: the worker's class stands above that line, and nothing below it is wanted. Not
    an `Exception`, so that no handler in the script takes it for one of its own.
    """


def stop_if_loading_script() -> None:
    """Called where an executor is built: ends the loading of a script for its worker class.

    Raises:
        ScriptReachedExecutorError: it is the script that builds the executor.
    """
    load = _load.get() or _process_load
    if load is not None:
        load.reached_executor = True
        raise ScriptReachedExecutorError


def load_worker_class(spec: str, *, own_process: bool = False) -> type[Worker]:
    """Import the worker's class.

    Args:
        spec: ``module:Class`` or ``path/to/script.py:Class``.
        own_process: whether this process is the worker's own, and not the embedder's.

    Returns:
        The class.

    Raises:
        ConfigError: the module has no such class, or it is not a `Worker`.
        Exception: whatever importing the module raises.
    """
    global _process_load  # noqa: PLW0603 - one class, once in the life of a worker's process
    source, _, name = spec.rpartition(":")
    load = _Load()
    token = _load.set(load)
    if own_process:
        _process_load = load
    try:
        found: Any = _load_script(source, load) if source.endswith(".py") else _load_module(source, load)
    finally:
        _process_load = None
        _load.reset(token)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        where = " above the line that builds the executor" if load.reached_executor else ""
        raise ConfigError(f"{source} has no {name}: the worker's class must be defined there{where}")
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError(f"{spec} is not a subclass of stepcast.Worker")
    return found


def _load_script(path: str, load: _Load) -> Any:
    spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} can't be loaded as a Python script")
    return _execute(spec, spec.loader, load)


def _load_module(name: str, load: _Load) -> Any:
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return importlib.import_module(name)
    _execute(spec, spec.loader, load)
    module = sys.modules[name]  # it may have put something else in its own place
    package, _, child = name.rpartition(".")
    if package:
        setattr(sys.modules[package], child, module)
    return module


def _execute(spec: ModuleSpec, loader: Loader, load: _Load) -> Any:
    """Import a module, and keep what is there of it when it comes to the line that builds the executor."""
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        # Once it has come that far, whatever the script makes of being stopped there does not matter.
        if not load.reached_executor:
            sys.modules.pop(spec.name, None)
            raise
    return module
