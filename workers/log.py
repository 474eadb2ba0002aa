"""A worker's own logging: structured lines on stderr, which the driver puts into its log.

Each record is one line of JSON behind a record separator, as in RFC 7464, so that the driver can tell it from whatever
else the process writes to stderr.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from .board import Board

RECORD_SEPARATOR = "\x1e"


def configure_logging(level: str, *, rank: int, epoch: int, board: Board) -> None:
    """Set up the root logger of a worker process, which is stepcast's own process.

    Args:
        level: the level's name.
        rank: this rank, put on every line.
        epoch: the life of the group, put on every line.
        board: tells the step that every line carries.
    """

    def add_place(_logger: Any, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.update(rank=rank, epoch=epoch, step=board.status.step)
        return event

    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            add_place,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Framed(formatter))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class _Framed(logging.Formatter):
    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return RECORD_SEPARATOR + self._inner.format(record)
