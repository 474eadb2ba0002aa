"""Logging for stepcast's own command line. The library itself never configures logging: that is the embedder's."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

#: The driver's record of a worker's line; see `stepcast.runtime.output`.
_WORKER_LOGGER = "stepcast.worker"
_PLACE = ("rank", "epoch", "step")


def configure_logging(format: str, level: str) -> None:
    """Send everything that is logged in this process to stderr, through structlog.

    Warnings of Python's `warnings` module are logged too, on the logger "py.warnings".

    Args:
        format: "console" for people, or "json": an object a line, with "timestamp", "level", "logger", "event", what a
            record brings along (on a worker's lines "rank", "epoch" and "step"), and "exception" where there is one.
        level: the name of the lowest level that is shown.
    """
    handler = _StderrHandler()
    handler.setFormatter(_json() if format == "json" else _console())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at that moment: rich replaces it while it shows something that moves."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler of logging's own
            self.handleError(record)


def _json() -> logging.Formatter:
    return _formatter(
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    )


def _console() -> logging.Formatter:
    return _formatter(
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        _drop_place,
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_level=False
        ),
    )


def _formatter(*processors: Processor) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *processors,
        ],
    )


def _drop_place(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Leave out what a worker's line says in its text already."""
    if event.get("logger") == _WORKER_LOGGER:
        for name in _PLACE:
            event.pop(name, None)
    return event
