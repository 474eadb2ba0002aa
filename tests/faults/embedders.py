"""Programs that embed an executor, and end it, or themselves, in all the wrong ways.

`embedders.py SCENARIO SETTINGS ARGUMENT`: each runs in a process of its own, started by a test. It leaves notes by
`signs`, as the workers do, and prints what the test wants to see.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from stepcast import Closed, Executor, ExecutorConfig, GroupState, WorkerLost
from stepcast.runtime.launch import mp

sys.path.append(str(Path(__file__).parent))
import signs

Scenario = Callable[[ExecutorConfig, Any], object]

_POLL_INTERVAL_S = 0.005
_WAIT_S = 20.0
#: What is never dropped.
_kept: list[Any] = []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("an embedder waits for nothing")
        time.sleep(_POLL_INTERVAL_S)


def note(config: ExecutorConfig, name: str) -> None:
    signs.note(config.worker_options["dir"], name)


def is_there(config: ExecutorConfig, *names: str) -> bool:
    return all(Path(config.worker_options["dir"], name).exists() for name in names)


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# --- To be killed, or interrupted -----------------------------------------------------------------------------------


def look_on(config: ExecutorConfig, argument: Any) -> None:
    """Ask for the health all the time, until told to go; then run a step."""
    with Executor(config) as executor:
        executor.step("warm")
        note(config, "ready")
        red: list[str] = []

        def told_to_go() -> bool:
            health = executor.health()
            red.extend(rank.detail for rank in health.ranks if not health.ok)
            return is_there(config, "go")

        wait_until(told_to_go)
        print("red:", red)
        print("step:", executor.step("on", gather=True))


def start(config: ExecutorConfig, argument: Any) -> None:
    """Start, and come no further."""
    if config.start_method == "fork" and '"at": "spawning"' in config.worker_env[signs.PLAN]:
        run_worker = mp.run_worker

        def run_worker_late(*arguments: Any) -> int:
            signs.reach("spawning")
            return run_worker(*arguments)

        mp.run_worker = run_worker_late
    Executor(config)


def idle(config: ExecutorConfig, argument: Any) -> None:
    """Start, and do nothing with it."""
    executor = Executor(config)
    note(config, "ready")
    signs.block(executor)


def step(config: ExecutorConfig, argument: Any) -> None:
    """Run a step that never ends."""
    Executor(config).step(argument)


def stop(config: ExecutorConfig, argument: Any) -> None:
    """Shut down, which never ends."""
    Executor(config).shutdown()


def step_in_a_with_block(config: ExecutorConfig, argument: Any) -> None:
    """Run a step that never ends; tell when the executor is shut down for it."""
    with Executor(config) as executor:

        def tell() -> None:
            wait_until(lambda: executor.state is not GroupState.READY)
            note(config, executor.state.value)

        threading.Thread(target=tell, daemon=True).start()
        executor.step(argument)


def interrupted_start_and_on(config: ExecutorConfig, argument: Any) -> None:
    """Survive a Ctrl-C during the start, and start again."""
    with contextlib.suppress(KeyboardInterrupt):
        Executor(config)
    print("processes left:", len(threading.enumerate()) - 1)
    with Executor(config.replace(worker_env={})) as executor:
        print("again:", executor.step("again"))


def interrupted_fork(config: ExecutorConfig, argument: Any) -> None:
    """Have a Ctrl-C come in what Python runs after a fork, where it would be forgotten; and start again."""
    presses = iter([signal.SIGINT])
    os.register_at_fork(after_in_parent=lambda: [os.kill(os.getpid(), number) for number in presses])
    try:
        Executor(config)
    except KeyboardInterrupt:
        print("interrupted")
    print("threads left:", threading.active_count() - 1)
    print("handler left alone:", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    with Executor(config) as executor:
        print("again:", executor.step("again"))


# --- Ends without a shutdown ----------------------------------------------------------------------------------------


def drop(config: ExecutorConfig, argument: Any) -> None:
    """Drop the executor, and live on."""
    executor = Executor(config)
    pids = executor.worker_pids
    future = None if argument is None else executor.submit(argument)
    if future is None:
        executor.step("a step")
    del executor
    gc.collect()
    wait_until(lambda: all(map(has_ended, pids)))
    if future is not None:
        print("the step:", type(future.exception(_WAIT_S)).__name__)
    wait_until(lambda: threading.active_count() == 1)
    print("threads left:", threading.active_count() - 1)


def leave(config: ExecutorConfig, argument: Any) -> None:
    """Exit with the executor open."""
    executor = Executor(config)
    _kept.append(executor)
    if argument is None:
        executor.step("a step")
    else:
        _kept.append(executor.submit(argument))


def leave_with_a_daemon_thread_in_a_step(config: ExecutorConfig, argument: Any) -> None:
    """Exit while a daemon thread waits for a step's result."""
    executor = Executor(config)

    def work() -> None:
        while True:
            executor.step(argument)

    threading.Thread(target=work, daemon=True).start()
    if argument != "quick":
        wait_until(lambda: is_there(config, "block-0"))
    else:
        wait_until(lambda: executor.health().published > 100)


def raise_in_the_body(config: ExecutorConfig, argument: Any) -> None:
    """Leave the block by an exception."""
    with Executor(config) as executor:
        if argument is not None:
            executor.submit(argument)
        raise ValueError("the body's own error")


def exit_in_the_body(config: ExecutorConfig, argument: Any) -> NoReturn:
    """Leave the block by an exit."""
    with Executor(config):
        sys.exit(5)


# --- Threads --------------------------------------------------------------------------------------------------------


def build_in_a_thread(config: ExecutorConfig, argument: Any) -> None:
    """Build the executor in a thread, and use it when that thread has ended."""
    built: list[Executor] = []
    builder = threading.Thread(target=lambda: built.append(Executor(config)))
    builder.start()
    builder.join()
    del builder
    with built[0] as executor:
        for number in range(20):
            assert executor.step(number, gather=True) == [number] * config.world_size
    print("20 steps")


def shut_down_from_elsewhere(config: ExecutorConfig, argument: Any) -> None:
    """Shut down in two other threads while this one waits for a step; and again."""
    executor = Executor(config)

    def shut_down() -> None:
        wait_until(lambda: is_there(config, "block-0", "block-1"))
        executor.shutdown()

    threads = [threading.Thread(target=shut_down) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        executor.step(["block"])
    except Closed:
        print("the step: Closed")
    for thread in threads:
        thread.join()
    executor.shutdown()
    print("shut down:", executor.state.value)


# --- Forks ----------------------------------------------------------------------------------------------------------


def fork_afterwards(config: ExecutorConfig, argument: Any) -> None:
    """Fork; the child ends in one way or another, and the parent goes on."""
    with Executor(config) as executor:
        executor.step("before")
        future = executor.submit(["wait_for_go"]) if argument.get("in_a_step") else None
        waiting = threading.Thread(target=lambda: executor.step("in a thread"))
        if argument.get("with_a_thread"):
            waiting.start()
        pid = os.fork()
        if pid == 0:
            end_child(executor, argument["child"])
            return  # by way of the with block, and the interpreter's exit
        _, status = os.waitpid(pid, 0)
        print("child:", os.waitstatus_to_exitcode(status), flush=True)
        note(config, "go")
        if future is not None:
            print("the step under way:", future.result(_WAIT_S))
        if waiting.ident is not None:
            waiting.join()
        print("the parent's steps:", [executor.step(number) for number in range(3)])
        print("the parent's group:", executor.state.value)


def end_child(executor: Executor, how: str) -> None:
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        os._exit(0)
    if how == "del":
        del executor
        gc.collect()
    if how == "shutdown":
        executor.shutdown()
    if how == "use":
        for use in (
            lambda: executor.step("in the child"),
            lambda: executor.submit("in the child"),
            lambda: executor.try_submit("in the child"),
            lambda: executor.call("whoami"),
            lambda: executor.abort(1),
            executor.health,
        ):
            try:
                use()
            except Closed as error:
                print("refused:", error)
    if how == "own":
        with Executor(ExecutorConfig(worker="stepcast.workers.echo:Echo", world_size=2, start_method="spawn")) as own:
            print("the child's own:", own.step("echo"))


# --- SIGCHLD --------------------------------------------------------------------------------------------------------


def ignore_sigchld(config: ExecutorConfig, argument: Any) -> None:
    """Have the kernel reap all children, or reap them here: the exit codes are gone."""
    if argument["how"] == "ignore":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGCHLD, reap)
    executor = Executor(config)
    if argument["kill"]:
        future = executor.submit(["block"])
        wait_until(lambda: is_there(config, "block-0", "block-1"))
        killed_at = time.monotonic()
        os.kill(executor.worker_pids[1], signal.SIGKILL)
        error = future.exception(_WAIT_S)
        assert isinstance(error, WorkerLost)
        print("lost:", error.rank, error.exit_code)
        print("seconds:", time.monotonic() - killed_at)
    else:
        executor.step("a step")
    began = time.monotonic()
    cpu_began = time.process_time()
    executor.shutdown()
    print("shutdown seconds:", time.monotonic() - began)
    print("shutdown cpu seconds:", time.process_time() - cpu_began)
    print("threads left:", threading.active_count() - 1)


def reap(*_: Any) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        build_in_a_thread,
        drop,
        exit_in_the_body,
        fork_afterwards,
        idle,
        ignore_sigchld,
        interrupted_fork,
        interrupted_start_and_on,
        leave,
        leave_with_a_daemon_thread_in_a_step,
        look_on,
        raise_in_the_body,
        shut_down_from_elsewhere,
        start,
        step,
        step_in_a_with_block,
        stop,
    )
}


def main() -> None:
    faulthandler.register(signal.SIGUSR2)
    name, settings, argument = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    SCENARIOS[name](ExecutorConfig(**settings), argument)


if __name__ == "__main__":
    main()
