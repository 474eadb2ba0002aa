"""The workers' stdout and stderr, line by line into the embedder's log."""

from __future__ import annotations

import json
import logging
import os
import selectors
import threading
import traceback
from collections import deque
from typing import IO

from stepcast.workers.log import RECORD_SEPARATOR

from .launch.process import WorkerProcess

_log = logging.getLogger("stepcast.worker")
_READ_BYTES = 65536
#: A line longer than this is cut, so that a worker that never ends its line takes no memory here.
_MAX_LINE_BYTES = 16384
#: Enough for the stacks of a crash, whose first line tells what it was.
_TAIL_LINES = 60


class OutputRelay(threading.Thread):
    """Reads the pipes of all workers, so that none of them can fill up and hold a worker.

    A worker's own log records keep their level; its other stdout lines are logged as INFO and stderr lines as WARNING,
    on the logger "stepcast.worker", with the rank in front.
    """

    def __init__(self) -> None:
        super().__init__(name="stepcast-output", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._new: list[tuple[IO[bytes], _Stream]] = []
        self._tails: dict[int, deque[str]] = {}
        self._open: dict[int, int] = {}
        self._ended = threading.Condition(self._lock)
        self._stopping = False

    def add(self, process: WorkerProcess) -> None:
        """Read a process's output from now on. The relay closes the pipes."""
        with self._lock:
            tail = self._tails.setdefault(process.rank, deque(maxlen=_TAIL_LINES))
            self._open[process.rank] = len(process.outputs)
            for pipe, kept in zip(process.outputs, (None, tail), strict=False):
                self._new.append((pipe, _Stream(process.rank, kept)))
            self._wake_thread()

    def stderr_tail(self, rank: int, timeout_s: float) -> str:
        """The last lines that a rank wrote to stderr, log records apart.

        Args:
            rank: the rank.
            timeout_s: how long to wait for the end of its output, which comes when its process has ended.
        """
        with self._ended:
            self._ended.wait_for(lambda: not self._open.get(rank), timeout_s)
            return "\n".join(self._tails.get(rank, ()))

    def stop(self, timeout_s: float) -> None:
        """End the thread; what is in the pipes is still read.

        Args:
            timeout_s: the longest to wait for it, since the embedder's log handlers may block.
        """
        self._stopping = True
        with self._lock:
            self._wake_thread()
        self.join(timeout_s)

    def run(self) -> None:
        """Read until `stop`, then what is left."""
        while not self._stopping:
            self._turn(None)
        while self._turn(0):
            pass
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.fileobj, key.data)  # type: ignore[arg-type]
        self._selector.close()
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _wake_thread(self) -> None:
        if self._wake >= 0:  # else it has ended, and the number may be another file's by now
            os.eventfd_write(self._wake, 1)

    def _turn(self, timeout_s: float | None) -> bool:
        progress = False
        for key, _ in self._selector.select(timeout_s):
            progress = True
            if key.data is None:
                os.eventfd_read(self._wake)
                self._register_new()
            else:
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        return progress

    def _register_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for pipe, stream in new:
            self._selector.register(pipe, selectors.EVENT_READ, stream)

    def _read(self, pipe: IO[bytes], stream: _Stream) -> None:
        data = os.read(pipe.fileno(), _READ_BYTES)
        lines = stream.feed(data)
        for line in lines:
            try:
                _emit(stream, line)
            except Exception:  # noqa: BLE001 - from a handler of the embedder's; the pipes must be read all the same
                if logging.raiseExceptions:  # as logging itself does
                    traceback.print_exc()
        if not data:
            self._end(pipe, stream)

    def _end(self, pipe: IO[bytes], stream: _Stream) -> None:
        self._selector.unregister(pipe)
        pipe.close()
        with self._ended:
            self._open[stream.rank] -= 1
            self._ended.notify_all()


class _Stream:
    """Cuts one pipe's bytes into lines."""

    def __init__(self, rank: int, tail: deque[str] | None) -> None:
        self.rank = rank
        self.tail = tail
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take bytes, or b"" at the end, and return the lines that are complete."""
        *lines, rest = (self._rest + data).split(b"\n")
        if rest and (not data or len(rest) > _MAX_LINE_BYTES):
            lines.append(rest[:_MAX_LINE_BYTES])
            rest = b""
        self._rest = rest
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]


def _emit(stream: _Stream, line: str) -> None:
    # What stands before a record is a line that was not ended, such as a progress bar's.
    text, separator, rest = line.partition(RECORD_SEPARATOR)
    record = _parse_record(rest) if separator else None
    if record is None:
        _emit_line(stream, line)
        return
    if text:
        _emit_line(stream, text)
    _emit_record(record)


def _emit_line(stream: _Stream, line: str) -> None:
    if stream.tail is not None:
        stream.tail.append(line)
    level = logging.INFO if stream.tail is None else logging.WARNING
    _log.log(level, "[rank %d] %s", stream.rank, line, extra={"rank": stream.rank})


def _parse_record(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _emit_record(record: dict[str, object]) -> None:
    level = logging.getLevelName(str(record.get("level", "info")).upper())
    text = str(record.get("event", ""))
    if "exception" in record:
        text = f"{text}\n{record['exception']}"
    rank, epoch, step = (record.get(name, "?") for name in ("rank", "epoch", "step"))
    place = {"rank": rank, "epoch": epoch, "step": step}
    _log.log(
        level if isinstance(level, int) else logging.INFO,
        "[rank %s epoch %s step %s] %s: %s",
        rank,
        epoch,
        step,
        record.get("logger", ""),
        text,
        extra=place,
    )
