"""A worker's process as the driver sees it, whichever way it was started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from typing import IO

#: What `WorkerProcess.exit_code` gives where somebody else has reaped the process: the embedder, or the kernel where
#: the embedder ignores SIGCHLD.
EXIT_CODE_UNKNOWN = 256


class WorkerProcess:
    """One rank's process.

    Attributes:
        rank: the rank.
        pid: its process id.
        sentinel: a descriptor that becomes readable when the process has ended; None where the kernel has none.
        outputs: the read ends of its stdout and stderr.
    """

    def __init__(self, rank: int, pid: int, sentinel: int | None, outputs: tuple[IO[bytes], IO[bytes]]) -> None:
        self.rank = rank
        self.pid = pid
        self.sentinel = sentinel
        self.outputs = outputs

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
        self._pidfd: int | None = None
        if isinstance(process, ForkProcess):
            # Its sentinel is a pipe, whose write end the rank's own forks inherit: they would hide its death.
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(process.pid)
        super().__init__(rank, process.pid, process.sentinel if self._pidfd is None else self._pidfd, outputs)
        self._process = process

    def exit_code(self) -> int | None:
        code = self._process.exitcode
        if code is None and self._pidfd is not None and _is_readable(self._pidfd):
            code = self._process.exitcode  # it may have ended in between
            if code is None:  # and always would be
                self._process._popen.returncode = code = EXIT_CODE_UNKNOWN  # type: ignore[attr-defined]  # noqa: SLF001
        return code

    def wait(self) -> None:
        self._process.join()

    def close(self) -> None:
        self.exit_code()
        self.sentinel = None
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._process.close()


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
