"""How workers and drivers tell a test where they are, and fail there on demand: by files in the test's directory.

A plan travels in the environment, so that it is there before any of stepcast's code runs. Only the standard library is
imported.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

#: The variable that carries the plan: `dir`, and where something is to happen `at`, `do`, `ranks` and `others`.
PLAN = "FAULT_PLAN"
#: The note that a process leaves in its last moment.
KILLED = "killed"

#: The file that holds the locks, and where in it the semaphore is.
LOCKS = "locks"
SEMAPHORE_AT = 64

_NAP_S = 0.12
_POLL_INTERVAL_S = 0.002
_WAIT_S = 30.0
_FOREVER_S = 600
_mapped: list[mmap.mmap] = []


def note(directory: str | Path, name: str) -> None:
    """Leave a note with this process's id and the clock's reading; whole as soon as it is there."""
    path = Path(directory, name)
    draft = path.with_name(f".{name}-{os.getpid()}")
    draft.write_text(json.dumps([os.getpid(), time.monotonic()]), encoding="utf-8")
    draft.rename(path)


def read(directory: str | Path, name: str) -> tuple[int, float]:
    """Read a note: the process's id, and when it was left, on the clock that all processes share."""
    pid, when = json.loads(Path(directory, name).read_text(encoding="utf-8"))
    return pid, when


def reach(phase: str) -> None:
    """Called by a worker in each phase: leaves a note, and does there what the plan says."""
    text = os.environ.get(PLAN)
    if text is None:
        return
    plan = json.loads(text)
    rank = int(os.environ["RANK"])
    note(plan["dir"], f"{phase}-{rank}")
    if plan.get("at") != phase:
        return
    if rank in plan["ranks"]:
        ACTIONS[plan["do"]](plan, phase, rank)
    elif plan["others"] == "block":
        block()


def block(*_: Any) -> None:
    """Stay, in Python code that lets other threads run."""
    time.sleep(_FOREVER_S)


def hold_gil(*_: Any) -> None:
    """Stay, in C code that lets no other Python thread run, and that no signal handler interrupts."""
    unlocked = ctypes.create_string_buffer(64)  # a pthread_mutex_t of zeros
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(unlocked)
    lock(unlocked)


def _locks(plan: dict[str, Any]) -> int:
    """The address of two locks that the test holds, a spin lock and a semaphore; in memory that it shares."""
    with Path(plan["dir"], LOCKS).open("r+b") as file:
        _mapped.append(mmap.mmap(file.fileno(), 0))
    return ctypes.addressof(ctypes.c_char.from_buffer(_mapped[-1]))


def _spin(plan: dict[str, Any], phase: str, rank: int) -> str:
    """Compute, in C code that lets no other Python thread run, until the test lets go."""
    ctypes.PyDLL(None).pthread_spin_lock(ctypes.c_void_p(_locks(plan)))
    return "spun"


def _doze(plan: dict[str, Any], phase: str, rank: int) -> str:
    """Wait, in C code that lets no other Python thread run, until the test lets go."""
    ctypes.PyDLL(None).sem_wait(ctypes.c_void_p(_locks(plan) + SEMAPHORE_AT))
    return "dozed"


def ignore_sigterm(*_: Any) -> None:
    """Stay, and not for SIGTERM's sake leave."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(_FOREVER_S)


def segfault(*_: Any) -> None:
    """Read from address 0."""
    ctypes.string_at(0)


def _die(plan: dict[str, Any], phase: str, rank: int) -> NoReturn:
    """Be killed when every rank has come to the same phase."""
    deadline = time.monotonic() + _WAIT_S
    while not all(Path(plan["dir"], f"{phase}-{each}").exists() for each in range(plan["world_size"])):
        if time.monotonic() > deadline:
            sys.exit(f"rank {rank} waits for its peers in {phase} for nothing")
        time.sleep(_POLL_INTERVAL_S)
    note(plan["dir"], KILLED)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _wait_for_go(plan: dict[str, Any], phase: str, rank: int) -> str:
    """Go on when the test says so."""
    deadline = time.monotonic() + _WAIT_S
    while not Path(plan["dir"], "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody says go")
        time.sleep(_POLL_INTERVAL_S)
    return "gone"


def _wait_for_orphanhood(plan: dict[str, Any], phase: str, rank: int) -> None:
    """Go on only when the driver has died."""
    parent = os.getppid()
    deadline = time.monotonic() + _WAIT_S
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)


def _shout(plan: dict[str, Any], phase: str, rank: int) -> NoReturn:
    for number in range(5000):
        print(f"line {number} " + "x" * 100, file=sys.stderr)
    print("the very last words", file=sys.stderr, flush=True)
    os._exit(9)


def _raise(plan: dict[str, Any], phase: str, rank: int) -> NoReturn:
    raise LookupError(f"no luck in {phase} on rank {rank}")


ACTIONS: dict[str, Callable[[dict[str, Any], str, int], Any]] = {
    "block": block,
    "die": _die,
    "doze": _doze,
    "exit": lambda *_: sys.exit(3),
    "exit_0": lambda *_: sys.exit(0),
    "hold_gil": hold_gil,
    "ignore_sigterm": ignore_sigterm,
    "leave_a_thread": lambda *_: threading.Thread(target=block).start(),
    "os_exit": lambda *_: os._exit(7),
    "raise": _raise,
    "segfault": segfault,
    "nap": lambda *_: time.sleep(_NAP_S),
    "shout": _shout,
    "spin": _spin,
    "wait_for_go": _wait_for_go,
    "wait_for_orphanhood": _wait_for_orphanhood,
}
