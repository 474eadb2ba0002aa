"""The workers without a model."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from stepcast import Executor, ExecutorConfig, RankInfo
from stepcast.workers.echo import Digest, Echo


def rank_info(rank: int) -> RankInfo:
    return RankInfo(
        rank=rank,
        local_rank=rank,
        local_world_size=2,
        world_size=4,
        epoch=1,
        output_rank=0,
        device="cpu",
        rendezvous="",
        collective_timeout_s=1.0,
    )


def test_echo_answers_with_the_step_and_knows_its_rank() -> None:
    """And can be asked to take its time."""
    worker = Echo()
    worker.setup(rank_info(3))
    step = {"a": [1]}
    assert worker.execute(step) is step
    assert worker.whoami() == 3
    assert worker.sleep(0.001) == 3


def test_digest_counts_and_digests() -> None:
    """Bytes of any kind; the driver can check what every rank has seen."""
    worker = Digest()
    worker.setup(rank_info(0))
    for count, data in enumerate((b"", b"abc", memoryview(b"xyz"), bytearray(1000)), start=1):
        assert worker.execute(data) == [count, len(data), hashlib.sha256(data).digest()]
    assert worker.whoami() == 0


def test_they_run_in_a_group() -> None:
    """As the defaults of benchmarks and of trying things out."""
    with Executor(ExecutorConfig(worker="stepcast.workers.echo:Digest", world_size=2)) as executor:
        digest = hashlib.sha256(b"abc").digest()
        assert [executor.step(b"abc", gather=True) for _ in range(2)] == [[[n, 3, digest]] * 2 for n in (1, 2)]


def test_they_import_neither_torch_nor_numpy() -> None:
    """Neither does the driver: both take seconds and memory."""
    code = (
        "import sys, stepcast.workers.echo, stepcast.workers.boot\n"
        "from stepcast import Executor, ExecutorConfig\n"
        "with Executor(ExecutorConfig(worker=stepcast.workers.echo.Echo, world_size=2)) as executor:\n"
        "    executor.step(1)\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
