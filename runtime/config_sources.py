"""Where settings come from beside arguments: a TOML file, and the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepcast.bus.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "STEPCAST_"


def from_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read settings from a TOML file: those at its top level, or in its table ``[stepcast]``.

    Args:
        path: the file.

    Returns:
        The settings by their names, not yet checked.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ConfigError(f"the configuration file {os.fspath(path)} can't be read: {problem}") from None
    table = document.get("stepcast", document)
    if not isinstance(table, dict):
        raise ConfigError(f"{os.fspath(path)}: [stepcast] must be a table")
    return dict(table)


def from_environment(environ: Mapping[str, str], types: Mapping[str, str]) -> dict[str, Any]:
    """Read settings from ``STEPCAST_*`` variables.

    Args:
        environ: the variables.
        types: the type of each setting, as it is annotated.

    Returns:
        The settings by their names, parsed.

    Raises:
        ConfigError: a variable can't be parsed, or names a setting that has no place in one.
    """
    settings: dict[str, Any] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        # Other STEPCAST_ variables belong to the embedder, or to other parts.
        if not variable.startswith(ENVIRONMENT_PREFIX) or name not in types:
            continue
        if "Mapping" in types[name]:
            raise ConfigError(f"{variable}: {name} can't be given by the environment; use a file or an argument")
        settings[name] = _parse(variable, types[name], text)
    return settings


def _parse(variable: str, type_name: str, text: str) -> Any:
    converters: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _parse_bool}
    try:
        return converters.get(type_name.removesuffix(" | None"), str)(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r}: must be of type {type_name}") from None


def _parse_bool(text: str) -> bool:
    value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if value is None:
        raise ValueError(text)
    return value
