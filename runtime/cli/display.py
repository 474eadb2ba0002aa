"""What a person sees while text is generated."""

from __future__ import annotations

import contextlib
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_MIN_COLUMN_WIDTH = 36
_HEADING_WIDTH = 72
_BORDER_LINES = 2
_BORDER_CELLS = 4
#: What a model must not send to a terminal: escape sequences could do anything there.
_CONTROL = dict.fromkeys(each for each in (*range(0x20), *range(0x7F, 0xA0)) if chr(each) not in "\n\t")


class Display(contextlib.AbstractContextManager["Display"]):
    """Shows answers as they come; this one shows nothing."""

    def show(self, index: int, text: str, finish_reason: str | None) -> None:
        """Take the next piece of an answer.

        Args:
            index: the prompt's place.
            text: the piece; may be empty.
            finish_reason: why the answer ended, or None while it goes on.
        """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show what is left to show."""


class Stream(Display):
    """One answer, written as it comes.

    Args:
        out: where to.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._wrote = False

    def show(self, index: int, text: str, finish_reason: str | None) -> None:  # noqa: ARG002 - there is but one
        self._out.write(for_terminal(text) if self._is_terminal else text)
        self._wrote |= bool(text)
        if finish_reason is not None:
            self._end_line()
        self._out.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:  # what comes next there begins a line of its own, even after Ctrl-C
            self._end_line()
            self._out.flush()

    def _end_line(self) -> None:
        if self._wrote:
            self._out.write("\n")
            self._wrote = False


class Sections(Display):
    """Several answers, one after another, each as soon as it and all before it are complete.

    Args:
        out: where to.
        prompts: the prompts, for the headings.
    """

    def __init__(self, out: TextIO, prompts: Sequence[str]) -> None:
        self._out = out
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._complete = [False] * len(prompts)
        self._next = 0

    def show(self, index: int, text: str, finish_reason: str | None) -> None:
        self._texts[index] += text
        self._complete[index] |= finish_reason is not None
        while self._next < len(self._prompts) and self._complete[self._next]:
            blank = "\n" if self._next else ""
            heading = textwrap.shorten(self._prompts[self._next], _HEADING_WIDTH, placeholder="...")
            self._out.write(f"{blank}==> {heading} <==\n{self._texts[self._next]}\n")
            self._out.flush()
            self._next += 1


class Columns(Display):
    """Several answers side by side on a terminal.

    While they grow each shows its last lines, as many as fit; at the end all of them are there in full.

    Args:
        console: the terminal.
        prompts: the prompts, for the headings.
    """

    def __init__(self, console: Console, prompts: Sequence[str]) -> None:
        self._console = console
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._reasons: list[str | None] = [None] * len(prompts)
        self._live = Live(
            console=console,
            get_renderable=lambda: self._grid(fit=True),
            refresh_per_second=10,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> Columns:
        self._live.start()
        return self

    def show(self, index: int, text: str, finish_reason: str | None) -> None:
        self._texts[index] += for_terminal(text)
        self._reasons[index] = finish_reason

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._console.print(self._grid(fit=False))

    def _grid(self, *, fit: bool) -> RenderableType:
        count = len(self._prompts)
        per_row = max(1, min(count, self._console.width // _MIN_COLUMN_WIDTH))
        rows = math.ceil(count / per_row)
        lines = max(1, self._console.height // rows - _BORDER_LINES) if fit else None
        width = self._console.width // per_row - _BORDER_CELLS
        grid = Table.grid(expand=True)
        for _ in range(per_row):
            grid.add_column(ratio=1, overflow="fold")
        panels = [self._panel(index, width, lines) for index in range(count)]
        for first in range(0, count, per_row):
            grid.add_row(*panels[first : first + per_row])
        return grid

    def _panel(self, index: int, width: int, lines: int | None) -> Panel:
        body = Text(self._texts[index])
        if lines is not None:
            body = Text("\n").join(body.wrap(self._console, max(1, width))[-lines:])
        title = Text(textwrap.shorten(for_terminal(self._prompts[index]), _HEADING_WIDTH, placeholder="..."))
        return Panel(body, title=title, title_align="left", subtitle=self._reasons[index], subtitle_align="right")


def choose_display(out: TextIO, prompts: Sequence[str]) -> Display:
    """Return the display that suits where the text goes.

    Args:
        out: where it goes.
        prompts: the prompts.
    """
    if len(prompts) == 1:
        return Stream(out)
    if out.isatty():
        return Columns(Console(file=out), prompts)
    return Sections(out, prompts)


@contextlib.contextmanager
def progress(console: Console | None, text: str, *, moving: bool = True) -> Iterator[None]:
    """Show on a terminal that something goes on.

    Args:
        console: the terminal; None, or one that is no terminal, shows nothing.
        text: what goes on.
        moving: whether to show that it still does, which takes a thread.
    """
    if console is None or not console.is_terminal:
        yield
        return
    if not moving:
        console.print(Text(f"{text} ..."))
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as shown:
        shown.add_task(text, total=None)
        yield


def for_terminal(text: str) -> str:
    """Take out of a text what a terminal would obey instead of showing it.

    Args:
        text: the text.
    """
    return text.translate(_CONTROL)
