"""Many steps, large steps, many groups: nothing is lost, and nothing grows."""

from __future__ import annotations

import gc
import os
import random
import statistics
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from zmq.utils import garbage

from stepcast import Executor, ExecutorConfig, StepFuture
from tests.faults.rig import HERE, Stage, run_directories

MIB = 1 << 20
GIB = 1 << 30
RANKS = 4
STEPS = 10_000
DEPTH = 8
LARGE_BYTES = 64 * MIB
LARGE_STEPS = 16
LARGEST_OF_THE_OTHERS = MIB
SEED = 20261202


@pytest.fixture
def no_garbage_thread() -> Iterator[None]:
    """Ends pyzmq's thread, which forgets buffers that were sent without a copy."""
    yield
    garbage.gc.stop()


class MemoryWatch(threading.Thread):
    """Samples the memory of some processes together."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(name="memory-watch", daemon=True)
        self._processes = [psutil.Process(pid) for pid in pids]
        self._ended = threading.Event()
        self.samples: list[tuple[float, int]] = []

    def run(self) -> None:
        while not self._ended.wait(0.1):
            self.samples.append((time.monotonic(), sum(each.memory_info().rss for each in self._processes)))

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def between(self, begin: float, end: float) -> list[int]:
        return [size for when, size in self.samples if begin <= when < end]


def draw_sizes(draw: random.Random) -> list[int]:
    """Sizes of which the logarithms are uniform, some empty, and the large ones spread evenly over the run."""
    scale = np.log2(2 * LARGEST_OF_THE_OTHERS)
    sizes = [int(2 ** draw.uniform(0, scale)) // 2 for _ in range(STEPS)]
    for number in range(LARGE_STEPS):
        sizes[STEPS // LARGE_STEPS * number + STEPS // LARGE_STEPS // 2] = LARGE_BYTES
    assert (sizes.count(LARGE_BYTES), min(sizes)) == (LARGE_STEPS, 0)
    return sizes


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ten_thousand_steps_of_all_sizes_reach_every_rank_once_and_in_order(
    no_garbage_thread: None, measured: Callable[[str, object], None]
) -> None:
    """Four ranks tell of each step its number, size and checksum; all memory stays below 4 GiB, and does not grow."""
    draw = random.Random(SEED)
    sizes = draw_sizes(draw)
    pool = np.frombuffer(draw.randbytes(LARGE_BYTES), dtype=np.uint8)
    large_checksum = zlib.crc32(pool)
    config = ExecutorConfig(
        worker=f"{HERE}/victims.py:Checksum",
        world_size=RANKS,
        max_in_flight=DEPTH,
        max_in_flight_bytes=256 * MIB,
        step_timeout_s=120.0,
        backpressure_timeout_s=120.0,
    )
    under_way: deque[tuple[list[int], StepFuture]] = deque()

    def check_oldest() -> None:
        expected, future = under_way.popleft()
        assert future.result(120) == [expected] * RANKS

    with Executor(config) as executor:
        watch = MemoryWatch([os.getpid(), *executor.worker_pids])
        watch.start()
        began = time.monotonic()
        try:
            for number, size in enumerate(sizes):
                if number == STEPS // 2:
                    halfway = time.monotonic()
                start = draw.randrange(LARGE_BYTES - size + 1)
                step = pool[start : start + size]
                checksum = large_checksum if size == LARGE_BYTES else zlib.crc32(step)
                if len(under_way) == DEPTH:
                    check_oldest()
                under_way.append(([number + 1, size, checksum], executor.submit(step, gather=True)))
            while under_way:
                check_oldest()
        finally:
            watch.stop()
        ended = time.monotonic()
        health = executor.health()

    first, second = watch.between(began, halfway), watch.between(halfway, ended)
    measured("seconds", round(ended - began, 1))
    measured("peak_mib", [max(first) // MIB, max(second) // MIB])
    measured("median_mib", [int(statistics.median(first)) // MIB, int(statistics.median(second)) // MIB])
    assert max(first + second) < 4 * GIB
    assert max(second) < 1.1 * max(first) + 64 * MIB
    assert min(second) < 1.1 * min(first) + 64 * MIB
    assert (health.published, health.in_flight, health.in_flight_bytes) == (STEPS + 1, 0, 0)  # and BEGIN
    assert sum(health.dropped.values()) == 0


def inventory() -> dict[str, object]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - the cheap way
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": len(psutil.Process().children(recursive=True)),
        "run directories": run_directories(),
        "shared memory": sorted(path.name for path in Path("/dev/shm").iterdir()),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("method", "groups"), [("spawn", 10), ("fork", 20)])
def test_groups_that_come_and_go_leave_nothing(
    stage: Stage, measured: Callable[[str, object], None], method: str, groups: int
) -> None:
    """Descriptors, threads and run directories are as they were after the first, and memory no more than a little."""
    inventories = []
    memory = []
    for number in range(groups):
        with Executor(stage.config(world_size=2, start_method=method)) as executor:
            assert executor.step(number, gather=True) == [number] * 2
        inventories.append(inventory())
        memory.append(psutil.Process().memory_info().rss)

    assert all(each == inventories[0] for each in inventories)
    assert inventories[0]["run directories"] == []
    grown_per_group = (memory[-1] - memory[groups // 3]) / (groups - groups // 3)
    measured("grown_kib_per_group", round(grown_per_group / 1024))
    assert grown_per_group < 100 * 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_steps_neither_grow_nor_slow_down(
    request: pytest.FixtureRequest, measured: Callable[[str, object], None]
) -> None:
    """The last tenth of the steps is as fast as the first, as medians, and memory is flat; `--long-steps 1000000`."""
    count = request.config.getoption("--long-steps")
    config = ExecutorConfig(worker="stepcast.workers.echo:Echo", world_size=2)
    with Executor(config) as executor:
        processes = [psutil.Process(pid) for pid in (os.getpid(), *executor.worker_pids)]
        latencies = np.empty(count, dtype=np.float32)  # made before: it must not count as growth
        latencies.fill(0.0)
        memory = []
        for number in range(count):
            began = time.perf_counter()
            assert executor.step(number) == number
            latencies[number] = time.perf_counter() - began
            if number % (count // 10) == count // 20:
                memory.append(sum(each.memory_info().rss for each in processes))
    tenth = count // 10
    first, last = float(np.median(latencies[:tenth])), float(np.median(latencies[-tenth:]))
    measured("first and last tenth, us", (round(first * 1e6, 1), round(last * 1e6, 1)))
    measured("memory, MiB", [size >> 20 for size in memory])
    assert last < 2 * first
    assert memory[-1] - memory[0] < 16 * MIB
