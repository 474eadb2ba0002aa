"""Records in a store that anybody may write to: genuine, and made for just this place, or refused."""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.bus.errors import ConfigError, ProtocolError
from stepcast.bus.secret import (
    MAX_RECORD_BYTES,
    MIN_SECRET_BYTES,
    SECRET_VARIABLE,
    Secret,
    open_sealed,
    read_secret,
    seal,
)

HUSH = "hush-hush-hush-hush"
SECRET = Secret(HUSH.encode())
CONTEXT = ("run", 0, 3)
PAYLOAD = {"endpoint": "tcp://[::1]:5555", "key": bytes(40), "number": 7}

plain = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(), st.binary())
payloads = st.dictionaries(st.text(), st.one_of(plain, st.lists(plain)), max_size=4)
contexts = st.lists(st.one_of(st.text(), st.integers(0, 2**32)), max_size=4)


@given(role=st.text(), context=contexts, payload=payloads)
def test_what_was_sealed_can_be_opened(role: str, context: list[str | int], payload: dict[str, Any]) -> None:
    """As it was."""
    assert open_sealed(SECRET, role, context, seal(SECRET, role, context, payload)) == payload


@given(data=st.data(), payload=payloads)
def test_any_changed_byte_is_refused(data: st.DataObject, payload: dict[str, Any]) -> None:
    """One, anywhere, into any other; one too many; one too few."""
    record = bytearray(seal(SECRET, "driver", CONTEXT, payload))
    place = data.draw(st.integers(0, len(record) - 1))
    how = data.draw(st.sampled_from(["change", "drop", "insert", "cut"]))
    if how == "change":
        record[place] ^= data.draw(st.integers(1, 255))
    elif how == "drop":
        del record[place]
    elif how == "insert":
        record.insert(place, data.draw(st.integers(0, 255)))
    else:
        del record[place:]
    if bytes(record) == seal(SECRET, "driver", CONTEXT, payload):
        return  # a byte was inserted beside its like, and the same one dropped
    with pytest.raises(ProtocolError) as refused:
        open_sealed(SECRET, "driver", CONTEXT, bytes(record))
    assert HUSH not in str(refused.value)


@given(record=st.binary(max_size=200))
def test_whatever_lies_in_the_store_is_refused_in_words(record: bytes) -> None:
    """Nothing but a ProtocolError comes of it, which says for whom the record was to be."""
    with pytest.raises(ProtocolError, match="the record of driver for run/0/3 is not"):
        open_sealed(SECRET, "driver", CONTEXT, record)


def test_a_record_of_another_secret_is_refused() -> None:
    """And the error says what to do, and tells neither secret."""
    record = seal(Secret(b"another secret of some length"), "driver", CONTEXT, PAYLOAD)
    with pytest.raises(
        ProtocolError, match=f"give every host the same one, by file or by {SECRET_VARIABLE}"
    ) as refused:
        open_sealed(SECRET, "driver", CONTEXT, record)
    assert HUSH not in repr(refused.value)


@pytest.mark.parametrize(
    ("role", "context"),
    [("rank", CONTEXT), ("driver", ("other", 0, 3)), ("driver", ("run", 1, 3)), ("driver", ("run", 0))],
)
def test_a_record_can_not_be_passed_off_for_another(role: str, context: tuple[str | int, ...]) -> None:
    """A rank's for the driver's, or one of the run before: genuine, and yet refused."""
    record = seal(SECRET, role, context, PAYLOAD)
    with pytest.raises(ProtocolError, match=f"sealed as something else: {role} for ") as refused:
        open_sealed(SECRET, "driver", CONTEXT, record)
    assert (refused.value.expected, refused.value.got) == (
        "driver for run/0/3, version 1",
        f"{role} for {'/'.join(map(str, context))}, version 1",
    )


def test_a_record_without_end_is_refused() -> None:
    """However much somebody has written to the store."""
    with pytest.raises(ProtocolError):
        open_sealed(SECRET, "driver", CONTEXT, seal(SECRET, "driver", CONTEXT, {"x": bytes(MAX_RECORD_BYTES)}))
    with pytest.raises(ProtocolError):
        open_sealed(SECRET, "driver", CONTEXT, b"\x91" * 1_000_000)


def test_a_genuine_record_of_another_form_is_refused() -> None:
    """Who knows the secret, and runs another version."""
    for said in ([], [2, "driver", list(CONTEXT), {}, "more"], {"a": 1}, 5):
        body = msgpack.packb(said)

        record = msgpack.packb([body, hmac.digest(SECRET.value, body, "sha256")])
        with pytest.raises(ProtocolError, match="not one of stepcast's"):
            open_sealed(SECRET, "driver", CONTEXT, record)


# --- Where the secret comes from ------------------------------------------------------------------------------------


def write(path: Path, content: str, mode: int = 0o600) -> Path:
    path.write_text(content, encoding="utf-8")
    path.chmod(mode)
    return path


def test_the_secret_comes_from_a_private_file(tmp_path: Path) -> None:
    """Without the line's end; the file goes before the variable."""
    path = write(tmp_path / "secret", HUSH + "\n")
    assert read_secret(path, {SECRET_VARIABLE: "something else of some length"}) == SECRET


def test_the_secret_comes_from_the_environment() -> None:
    """Where there is no file; and where neither is there, there is none."""
    assert read_secret(None, {SECRET_VARIABLE: f" {HUSH} "}) == SECRET
    assert read_secret(None, {}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    """The error names the file, its mode, and the way out."""
    path = write(tmp_path / "secret", HUSH, mode)
    with pytest.raises(ConfigError, match=f"{path} .* has mode {mode:04o}: .*; chmod 600 {path}"):
        read_secret(path)


@pytest.mark.parametrize("content", ["", "\n", "x" * (MIN_SECRET_BYTES - 1) + "\n"])
def test_a_short_secret_is_refused(tmp_path: Path, content: str) -> None:
    """From either place, with its length and the way to make one."""
    path = write(tmp_path / "secret", content)
    told = rf"has {len(content.strip())} bytes, and needs at least {MIN_SECRET_BYTES}; make one with"
    with pytest.raises(ConfigError, match=f"{path} {told}"):
        read_secret(path)
    with pytest.raises(ConfigError, match=f"{SECRET_VARIABLE} {told}"):
        read_secret(None, {SECRET_VARIABLE: content})


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    """Missing, or no file."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=f"can't be read from {path}: "):
            read_secret(path)


def test_the_secret_never_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In no repr, of what was read from this process's own environment."""
    monkeypatch.setenv(SECRET_VARIABLE, HUSH)
    secret = read_secret()
    assert secret == SECRET
    assert HUSH not in repr(secret)
    assert os.environ[SECRET_VARIABLE] == HUSH
