"""How a command ends: what the user is told, and the exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from types import TracebackType

from rich.console import Console
from rich.text import Text

from stepcast.bus.errors import ConfigError, StepcastError

#: Exit codes.
FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

_log = logging.getLogger("stepcast.cli")


class Outcome(contextlib.AbstractContextManager["Outcome"]):
    """Ends a command whose body raised, in a line on stderr and an exit code.

    A wrong setting or input exits with 2, any other failure with 1, Ctrl-C with 130. An error that is neither
    stepcast's nor the system's is a bug, and keeps its traceback.

    Args:
        debug: whether to show tracebacks.

    Attributes:
        log_format: how the line is written: "json" makes it a record of the log, so that all of stderr is one kind.
    """

    def __init__(self, *, debug: bool) -> None:
        self._debug = debug
        self.log_format = "console"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._tell("interrupted")
            raise SystemExit(INTERRUPTED) from None
        if isinstance(error, BrokenPipeError):
            # Whoever read stdout has left. Python would complain once more when it flushes it at exit.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(BROKEN_PIPE) from None
        if isinstance(error, StepcastError | OSError):
            line, _, rest = str(error).partition("\n")
            if rest.strip() and not self._debug:
                line += " (--debug shows more)"
            self._tell(f"error: {line}", error)
            raise SystemExit(WRONG_USE if isinstance(error, ConfigError) else FAILED) from None

    def _tell(self, line: str, error: BaseException | None = None) -> None:
        shown = error if self._debug else None
        if self.log_format == "json":
            _log.error("%s", line, exc_info=shown)
            return
        if shown is not None:
            traceback.print_exception(shown)
        Console(stderr=True).print(Text(f"stepcast: {line}", style="red"), soft_wrap=True)
