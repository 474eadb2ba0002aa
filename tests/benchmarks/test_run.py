"""Short runs of the real peers, and of peers that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import measure as measuring
from benchmarks.cli import app
from benchmarks.codec import pack
from benchmarks.limits import LimitPassed, ProcessHandle, time_limit
from benchmarks.measure import Outcome, Settings, measure
from benchmarks.peer import PEERS, Payload, decode_step

ROOT = Path(__file__).parents[2]
TINY = ["--quick", "--ranks", "2", "--rounds", "2", "--steps", "5", "--idle-s", "0.1"]


class FakePeer:
    """Answers in the driver's own process; tests override what shall fail."""

    name = "fake"
    world_size = 0
    stopped = False

    def start(self, world_size: int) -> None:
        self.world_size = world_size

    def step(self, payload: Payload) -> list[Any]:
        return [payload] * self.world_size

    def pids(self) -> tuple[int, ...]:
        return ()

    def stop(self) -> None:
        self.stopped = True


class FailingPeer(FakePeer):
    """Fails in the third step."""

    steps = 0

    def step(self, payload: Payload) -> list[Any]:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("deliberately")
        return super().step(payload)


class HangingPeer(FakePeer):
    """Never comes up."""

    def start(self, world_size: int) -> None:
        del world_size
        signal.pause()


class WrongPeer(FakePeer):
    """Forgets one rank."""

    def step(self, payload: Payload) -> list[Any]:
        return super().step(payload)[1:]


class LeavingPeer(FakePeer):
    """Leaves its worker behind."""

    def __init__(self) -> None:
        self.worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    def pids(self) -> tuple[int, ...]:
        return (self.worker.pid,)


def _same(peer: FakePeer) -> FakePeer:
    return peer


def _measure(monkeypatch: pytest.MonkeyPatch, **peers: FakePeer) -> list[Outcome]:
    for name, peer in peers.items():
        monkeypatch.setitem(PEERS, name, partial(_same, peer))
    return measure(Settings(peers=tuple(peers), ranks=(2,), rounds=2, steps=3, warmup=1, idle_s=0))


def _wait_for_end(pids: list[int], limit_s: float) -> list[int]:
    """The processes that still run when the limit passes."""
    deadline = time.monotonic() + limit_s
    while running := [pid for pid in pids if _runs(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return running


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class TestCommandLine:
    def test_writes_the_documented_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run measures two real peers, shows a third as failed, and writes all of it."""
        monkeypatch.setitem(PEERS, "failing", FailingPeer)
        target = tmp_path / "result.json"

        result = CliRunner().invoke(app, [*TINY, "--peers", "plain_zmq,pipe,failing", "--json", str(target)])

        assert result.exit_code == 0, result.output
        assert "failing failed (ranks: 2, round 1): RuntimeError: deliberately" in result.output
        found = json.loads(target.read_text(encoding="utf-8"))
        assert found["schema_version"] == 1
        assert found.keys() == {"schema_version", "created", "machine", "versions", "settings", "results"}
        assert found["machine"].keys() == {"cpu", "cores", "kernel", "architecture", "load_average_1min"}
        assert {"python", "libzmq", "pyzmq", "msgpack", "stepcast", "commit"} <= found["versions"].keys()
        assert found["settings"]["ranks"] == [2]
        by_peer = {result["peer"]: result for result in found["results"]}
        assert {peer: result["status"] for peer, result in by_peer.items()} == {
            "plain_zmq": "ok",
            "pipe": "ok",
            "failing": "failed",
        }
        for peer in ("plain_zmq", "pipe"):
            self._check_result(by_peer[peer])

    def _check_result(self, result: dict[str, Any]) -> None:
        summary = result["summary"]
        assert summary["steps"] == 10
        assert 0 < summary["p50_us"] <= summary["p99_us"] <= summary["p999_us"]
        assert summary["steps_per_s"] > 0
        assert summary["cpu_us_per_step"] > 0
        assert summary["ratio"]["min"] <= summary["ratio"]["median"] <= summary["ratio"]["max"]
        assert len(result["idle_core_fractions"]) == 2
        assert [turn.keys() for turn in result["rounds"]] == [
            {"p50_us", "p99_us", "steps_per_s", "cpu_us_per_step"}
        ] * 2

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--peers", "nope"], "plain_zmq"),
            (["--ranks", "0"], "1,2,4"),
            (["--ranks", "two"], "1,2,4"),
            (["--payload", "3"], "64"),
            (["--json", "/nowhere/at/all.json"], "/nowhere/at"),
        ],
    )
    def test_refuses_a_wrong_option(self, arguments: list[str], told: str) -> None:
        """A user's mistake is told with what is allowed, before anything is started."""
        result = CliRunner().invoke(app, arguments)

        assert result.exit_code == 2
        assert told in result.output

    def test_exit_code_when_nothing_was_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The exit code is 1 where every peer failed."""
        monkeypatch.setitem(PEERS, "failing", FailingPeer)

        assert CliRunner().invoke(app, [*TINY, "--peers", "failing"]).exit_code == 1


class TestFailingPeer:
    def test_does_not_stop_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A peer that raises has its failure recorded and is stopped; the other takes all its turns."""
        failing, other = FailingPeer(), FakePeer()

        first, second = _measure(monkeypatch, failing=failing, other=other)

        assert first.failure is not None
        assert first.failure.error == "RuntimeError: deliberately"
        assert failing.stopped
        assert failing.steps == 3
        assert second.failure is None
        assert len(second.turns) == 2
        assert other.stopped

    def test_hang_ends_at_its_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A peer that does not come up is given up at the limit, which the failure names."""
        monkeypatch.setattr(measuring, "START_LIMIT_S", 0.2)

        (outcome,) = _measure(monkeypatch, hanging=HangingPeer())

        assert outcome.failure is not None
        assert outcome.failure.phase == "starting"
        assert outcome.failure.error.endswith("hanging, starting, took longer than 0.2 s")

    def test_answers_are_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A peer that leaves a rank's answer out fails rather than being the fastest."""
        (outcome,) = _measure(monkeypatch, wrong=WrongPeer())

        assert outcome.failure is not None
        assert "every rank" in outcome.failure.error

    def test_missing_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A peer whose library is not installed is shown as failed, with the module's name."""
        monkeypatch.setitem(sys.modules, "stepcast", None)

        (outcome,) = measure(Settings(peers=("stepcast_bus",), ranks=(1,), rounds=1, steps=1, idle_s=0))

        assert outcome.failure is not None
        assert "stepcast" in outcome.failure.error
        assert "ImportError" in outcome.failure.error or "ModuleNotFoundError" in outcome.failure.error

    def test_left_over_worker_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker that its peer leaves behind is killed."""
        peer = LeavingPeer()

        _measure(monkeypatch, leaving=peer)

        assert peer.worker.wait(timeout=5) == -signal.SIGKILL

    @pytest.mark.parametrize("name", ["pipe", "plain_zmq"])
    def test_killed_worker_is_named(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker that is killed makes its peer fail with the rank and the exit code."""
        monkeypatch.setattr("benchmarks.peers.plain_zmq._ANSWER_LIMIT_MS", 300)
        peer = PEERS[name]()
        peer.start(2)
        try:
            os.kill(peer.pids()[1], signal.SIGKILL)
            with pytest.raises(Exception, match="rank 1 ended with exit code -9"):  # noqa: PT012 - one of them raises
                for _ in range(1_000):
                    peer.step({"step": 1})
        finally:
            peer.stop()


@pytest.mark.parametrize("name", ["pipe", "plain_zmq"])
def test_nothing_is_left_when_the_driver_is_killed(name: str, tmp_path: Path) -> None:
    """No worker and no file is left when the driver has been killed."""
    script = (
        "import signal\n"
        "from benchmarks.peer import PEERS\n"
        "if __name__ == '__main__':\n"
        f"    peer = PEERS[{name!r}]()\n"
        "    peer.start(2)\n"
        "    print(*peer.pids(), flush=True)\n"
        "    signal.pause()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    with driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        driver.kill()
    assert len(pids) == 2

    assert _wait_for_end(pids, limit_s=5) == []
    assert list(tmp_path.iterdir()) == []


class TestTimeLimit:
    def test_keeps_an_earlier_timer(self) -> None:
        """A timer that was armed before is armed again afterwards, with no more than what was left of it."""
        before, handler = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
        with time_limit(30, "outer"):
            with time_limit(10, "inner"):
                pass
            assert 10 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30

        assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (before[0] > 0)
        assert signal.getsignal(signal.SIGALRM) is handler

    def test_interrupts_a_blocking_wait(self) -> None:
        """A blocking call is interrupted and the error names what took too long."""
        with pytest.raises(LimitPassed, match=r"the nap took longer than 0\.05 s"), time_limit(0.05, "the nap"):
            time.sleep(5)


def test_cpu_clock_counts_all_of_a_process() -> None:
    """A process's CPU clock agrees with what the process says of itself."""
    handle = ProcessHandle(os.getpid())
    before = time.process_time_ns()
    measured = handle.cpu_ns()
    after = time.process_time_ns()
    os.close(handle._descriptor)

    assert before <= measured <= after


@pytest.mark.parametrize("size", [64, 100, 1_400, 65_536])
def test_step_has_the_size_asked_for(size: int) -> None:
    """The step encodes to exactly the bytes asked for, the same ones each time."""
    assert len(pack(decode_step(size))) == size
    assert pack(decode_step(size)) == pack(decode_step(size))
