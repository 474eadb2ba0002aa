"""Fresh interpreters that run a function of stepcast's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import IO


def run_main(
    module: str,
    data: bytes,
    environment: Mapping[str, str],
    *,
    stdout: int | IO[bytes] | None = subprocess.PIPE,
    stderr: int | IO[bytes] | None = subprocess.PIPE,
    path: Sequence[str] | None = None,
    directory: str | None = None,
    inherited: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Run a module's `main` in a fresh interpreter.

    Args:
        module: the module's name.
        data: what it finds as its stdin: over an anonymous file, so that nothing of it shows in a process list.
        environment: its whole environment.
        stdout, stderr: where its output goes; None for where this process's own goes.
        path: where it finds modules; None for where this process does.
        directory: its working directory; None for this process's.
        inherited: descriptors that it has too, with the same numbers.

    Returns:
        The process.

    Raises:
        OSError: it can't be started.
    """
    code = f"import sys; sys.path[:] = {list(sys.path if path is None else path)!r}; from {module} import main; main()"
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
    stdin = os.memfd_create("stepcast-boot")
    try:
        os.write(stdin, data)
        os.lseek(stdin, 0, os.SEEK_SET)
        return subprocess.Popen(
            [sys.executable or "", *flags, "-c", code],  # an embedded interpreter may have none
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=dict(environment),
            cwd=directory,
            pass_fds=inherited,
            bufsize=0,
            # A session of its own: what a terminal sends to its foreground processes reaches the driver alone.
            start_new_session=True,
        )
    finally:
        os.close(stdin)
