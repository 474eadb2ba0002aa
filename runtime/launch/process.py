"""A worker's process as the driver sees it, whichever way it was started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from typing import IO

#: What `WorkerProcess.exit_code` gives where somebody else has reaped the process: the embedder, or the kernel where
#: the embedder ignores SIGCHLD.
EXIT_CODE_UNKNOWN = 256
#: How long a fork server may take to tell the exit code of a child that has ended.
_EXIT_CODE_WAIT_S = 0.3
#: What multiprocessing tells where it could not.
_EXIT_CODE_MADE_UP = 255


class WorkerProcess:
    """One rank's process.

    Attributes:
        is_local: whether it is on this host.
        rank: the rank.
        pid: its process id, on its own host.
        sentinel: a descriptor that becomes readable when the process has ended; None where the kernel has none.
        outputs: the read ends of its stdout and stderr; empty where somebody else reads them.
    """

    is_local = True

    def __init__(self, rank: int, pid: int, sentinel: int | None, outputs: Sequence[IO[bytes]]) -> None:
        self.rank = rank
        self.pid = pid
        self.sentinel = sentinel
        self.outputs = outputs

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"pid {self.pid}"

    def exit_code(self) -> int | None:
        """Reap the process where it has ended.

        Returns:
            Its exit code, negative for a signal; `EXIT_CODE_UNKNOWN`; None while it runs.
        """
        raise NotImplementedError

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def circumstances(self) -> str:
        """Tell what else is known of the end of a process that was not to end, as a clause; "" for nothing."""
        return ""

    def said_bye(self) -> None:
        """Note that the rank has left its loop in good order. Its process is to end: it still is waited for."""

    def wait(self) -> None:
        """Wait for the end of a process that was killed, and reap it."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the descriptors. The process must have been reaped."""
        raise NotImplementedError


class SpawnedProcess(WorkerProcess):
    """A process started by `subprocess`.

    Args:
        rank: the rank.
        popen: the process; its stdout and stderr are pipes.
    """

    def __init__(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None  # noqa: S101 - the launcher asks for pipes
        assert popen.stderr is not None  # noqa: S101
        sentinel = None
        with contextlib.suppress(OSError):
            sentinel = os.pidfd_open(popen.pid)
        super().__init__(rank, popen.pid, sentinel, (popen.stdout, popen.stderr))
        self._popen = popen

    def exit_code(self) -> int | None:
        if self._popen.returncode is None:
            # Not Popen.poll: for a process that somebody else has reaped it tells 0.
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._popen.returncode = EXIT_CODE_UNKNOWN
            else:
                self._popen.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self._popen.returncode

    def wait(self) -> None:
        self._popen.wait()

    def close(self) -> None:
        if self.sentinel is not None:
            os.close(self.sentinel)
            self.sentinel = None


class ForkedProcess(WorkerProcess):
    """A process started by `multiprocessing`.

    Args:
        rank: the rank.
        process: the process, started.
        outputs: the read ends of its stdout and stderr.
    """

    def __init__(self, rank: int, process: BaseProcess, outputs: tuple[IO[bytes], IO[bytes]]) -> None:
        assert process.pid is not None  # noqa: S101 - it was started
        # Its own sentinel is a pipe. A fork's own forks inherit the write end, and would hide its death; a fork server
        # holds those of all its children, and its end would look like theirs.
        self._pidfd: int | None = None
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(process.pid)
        super().__init__(rank, process.pid, process.sentinel if self._pidfd is None else self._pidfd, outputs)
        self._process = process
        self._code: int | None = None

    def exit_code(self) -> int | None:
        if self._code is None and (self._pidfd is None or _is_readable(self._pidfd)):
            self._code = self._process.exitcode if isinstance(self._process, ForkProcess) else self._told_by_server()
            if self._code is None and self._pidfd is not None:  # it has ended, and nobody can tell how
                self._code = EXIT_CODE_UNKNOWN
                self._process._popen.returncode = self._code  # type: ignore[attr-defined]  # noqa: SLF001
        return self._code

    def _told_by_server(self) -> int | None:
        # With the server dead as well, multiprocessing makes a code up.
        timeout_s = 0.0 if self._pidfd is None else _EXIT_CODE_WAIT_S
        if not _is_readable(self._process.sentinel, timeout_s):
            return None
        code = self._process.exitcode
        return EXIT_CODE_UNKNOWN if code == _EXIT_CODE_MADE_UP else code

    def wait(self) -> None:
        self._process.join()

    def close(self) -> None:
        self.exit_code()
        self.sentinel = None
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._process.close()


def _is_readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
