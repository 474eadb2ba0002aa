"""What two hosts tell each other through a store that anybody may read and write, such as torchrun's.

A record is not hidden, but sealed: whoever doesn't know the shared secret can neither make one nor change one, nor pass
off one that was made for another place. The secret comes to each host by a file or by the environment.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from .errors import ConfigError, ProtocolError

SECRET_VARIABLE = "STEPCAST_SECRET"  # noqa: S105 - where it is, not what it is
MIN_SECRET_BYTES = 16
#: No record is larger, and no more of one is read.
MAX_RECORD_BYTES = 1 << 16

_VERSION = 1
_DIGEST = "sha256"
_HOW_TO_MAKE = "make one with `umask 077; openssl rand -hex 32 > FILE`, the same on every host"


@dataclass(frozen=True)
class Secret:
    """A shared secret, which never shows in a `repr`.

    Attributes:
        value: its bytes.
    """

    value: bytes = field(repr=False)


def read_secret(
    path: str | os.PathLike[str] | None = None, environment: Mapping[str, str] = os.environ
) -> Secret | None:
    """Read the shared secret.

    Args:
        path: a file that its owner alone may read; None to look in the environment variable STEPCAST_SECRET.
        environment: where the variable is looked up.

    Returns:
        The secret, without white space around it; None where there is no path, and no variable.

    Raises:
        ConfigError: it can't be read, others may read it, or it is shorter than `MIN_SECRET_BYTES`.
    """
    if path is not None:
        return _checked(_read_private(path), f"the file {os.fspath(path)}")
    value = environment.get(SECRET_VARIABLE)
    return None if value is None else _checked(os.fsencode(value), f"the variable {SECRET_VARIABLE}")


def seal(secret: Secret, role: str, context: Sequence[str | int], payload: Mapping[str, Any]) -> bytes:
    """Make a record that only who knows the secret can have made.

    Args:
        secret: the shared secret.
        role: what the record is, such as "driver".
        context: for what it holds, such as run id, restart count and rank: it is of no use for any other.
        payload: what it tells: names and plain values.

    Returns:
        The record.
    """
    said = [_VERSION, role, list(context), dict(payload)]
    return _record(secret, said)


def open_sealed(secret: Secret, role: str, context: Sequence[str | int], record: bytes) -> dict[str, Any]:
    """Open a record, which must be genuine, and made for just this.

    Args:
        secret: the shared secret.
        role, context: as they were given to `seal`.
        record: what was found.

    Returns:
        The payload.

    Raises:
        ProtocolError: it is malformed, not sealed with this secret, or sealed as something else.
    """
    what = f"the record of {role} for {_spell(context)}"
    try:
        body, _ = msgpack.unpackb(record[:MAX_RECORD_BYTES])
        said = msgpack.unpackb(body)
        version, of_role, of_context, payload = said
        genuine = hmac.compare_digest(_record(secret, said), record)
    except Exception:  # noqa: BLE001 - whatever a stranger's bytes make msgpack raise
        raise ProtocolError(
            f"{what} is not one of stepcast's: something else has written to the store under its name",
            expected="a sealed record",
            got=f"{len(record)} bytes that can't be read",
        ) from None
    if not genuine:
        raise ProtocolError(
            f"{what} is not sealed with this host's secret: give every host the same one, by file or by "
            f"{SECRET_VARIABLE}; if they have, somebody else has written to the store"
        )
    if [version, of_role, of_context] != [_VERSION, role, list(context)]:
        raise ProtocolError(
            f"{what} was sealed as something else: {of_role} for {_spell(of_context)}, version {version}",
            expected=f"{role} for {_spell(context)}, version {_VERSION}",
            got=f"{of_role} for {_spell(of_context)}, version {version}",
        )
    return dict(payload)


def _record(secret: Secret, said: Sequence[Any]) -> bytes:
    # MessagePack tells where each part ends, so that no two lists have the same bytes.
    body = msgpack.packb(said)
    record: bytes = msgpack.packb([body, hmac.digest(secret.value, body, _DIGEST)])
    return record


def _spell(context: Sequence[object]) -> str:
    return "/".join(map(str, context))


def _read_private(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the mode is asked of what is open, not of what has the name
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_RECORD_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the shared secret can't be read from {os.fspath(path)}: {error.strerror}; {_HOW_TO_MAKE}"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the file {os.fspath(path)} with the shared secret has mode {mode:04o}: others may read it or write to "
            f"it; chmod 600 {os.fspath(path)}"
        )
    return content


def _checked(value: bytes, where: str) -> Secret:
    value = value.strip()
    if len(value) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the shared secret in {where} has {len(value)} bytes, and needs at least {MIN_SECRET_BYTES}; "
            f"{_HOW_TO_MAKE}"
        )
    return Secret(value)
