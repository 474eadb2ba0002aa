"""The backend "ray" on a real cluster: the same steps, and the same errors, as on "mp"."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepcast import Executor, ExecutorConfig, StartupError, StepFailed, WorkerLost
from stepcast.bus.endpoints import RunDirectory, sweep
from stepcast.runtime.launch import checked
from stepcast.runtime.launch.ray import RayLauncher
from stepcast.runtime.launch.seats import Seat, Spot, seat
from stepcast.runtime.sockets import DriverSockets
from stepcast.runtime.state import Life
from tests.harness import ROOT, process_has_ended, wait_until
from tests.ray.cluster import Cluster, processes, running_cluster

WORKERS = f"{ROOT}/tests/runtime/workers_for_tests.py"
COLLECTIVES = f"{ROOT}/tests/faults/collective_victims.py:Collectives"


def config(worker: str = "Obedient", world_size: int = 2, **settings: Any) -> ExecutorConfig:
    limits = {"startup_timeout_s": 60.0, "step_timeout_s": 30.0, "terminate_timeout_s": 1.0}
    worker = worker if ":" in worker else f"{WORKERS}:{worker}"
    return ExecutorConfig(worker=worker, world_size=world_size, backend="ray", **{**limits, **settings})


def actor_of(pid: int) -> psutil.Process:
    actor = psutil.Process(pid).parent()
    assert actor is not None
    assert actor.name().startswith("ray::RankActor")
    return actor


def test_ranks_are_as_those_of_mp(on_cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="stepcast.worker")
    settings = config(world_size=3, worker_options={"a": [1]}, worker_env={"OF_THE_RANKS": "1"})
    with Executor(settings) as executor:
        ranks = executor.call("where")
        environments = executor.call("environment")
        parents = {actor_of(pid).pid for pid in executor.worker_pids}

        assert executor.step({"value": 5}) == {"value": 5}
        assert executor.call("options") == [{"a": [1]}] * 3
        assert executor.step({"print": "to stdout", "print_error": "to stderr", "ranks": [1]}) is None
        executor.step("the last")
        pids = executor.worker_pids

    assert ranks == [[pid, rank, rank, 3, 1] for rank, pid in enumerate(pids)]
    assert len(parents) == 3
    for rank, environment in enumerate(environments):
        place = {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        assert place == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        assert environment["OF_THE_RANKS"] == "1"
        assert "PYTHONBREAKPOINT" not in environment
    assert "[rank 1] to stdout" in caplog.text
    assert "[rank 1] to stderr" in caplog.text
    assert "ray" not in sys.modules


def test_nothing_of_a_group_stays_in_the_cluster(on_cluster: Cluster) -> None:
    with Executor(config()) as executor:
        actors = [actor_of(pid) for pid in executor.worker_pids]

        during = on_cluster.look()

    assert during == {"actors": ["ALIVE", "ALIVE"], "groups": ["CREATED"], "free": 1.0}
    assert all(process_has_ended(actor.pid) for actor in actors)
    wait_until(lambda: on_cluster.look() == {"actors": [], "groups": [], "free": 3.0}, 20.0)


@pytest.mark.slow
def test_collectives_compute_as_under_mp(on_cluster: Cluster) -> None:
    pytest.importorskip("torch")
    words = ["all_reduce", "functional", "gathered", "broadcast"]
    results = []
    for backend in ("ray", "mp"):
        with Executor(config(COLLECTIVES).replace(backend=backend)) as executor:
            results.append(executor.step(words, gather=True))

    assert results[0] == results[1]


def test_a_killed_rank_is_lost_and_the_error_says_how(on_cluster: Cluster) -> None:
    with Executor(config()) as executor:
        pid = executor.worker_pids[1]
        future = executor.submit({"until_aborted": 99})
        os.kill(pid, signal.SIGKILL)

        with pytest.raises(WorkerLost, match=rf"rank 1 \(pid {pid}\) was killed by SIGKILL") as caught:
            future.result(10)

    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)
    assert "actor" not in str(caught.value)


def test_a_rank_that_exits_is_lost_with_its_code_and_its_last_words(on_cluster: Cluster) -> None:
    with Executor(config()) as executor:
        executor.step({"print_error": "it was hot", "ranks": [1]})
        with pytest.raises(WorkerLost, match=r"rank 1 .* exited with code 3 .*\n\n.*\nit was hot") as caught:
            executor.call("end_process_of", 1, 3)

    assert caught.value.exit_code == 3


def test_the_end_of_an_actor_is_told(on_cluster: Cluster) -> None:
    with Executor(config()) as executor:
        future = executor.submit({"until_aborted": 99})
        actor_of(executor.worker_pids[1]).kill()

        with pytest.raises(WorkerLost, match=r"rank 1 .*, with its Ray actor, which has ended"):
            future.result(10)


def test_setup_that_raises_is_told(on_cluster: Cluster) -> None:
    with pytest.raises(StartupError, match="failed in the worker's setup") as caught:
        Executor(config("FailsInSetup"))

    assert "LookupError: no weights here" in str(caught.value)
    assert caught.value.phases in ({0: "loading"}, {1: "loading"})


def test_a_step_that_raises_fails_alone(on_cluster: Cluster) -> None:
    with Executor(config()) as executor:
        with pytest.raises(StepFailed, match=r"rank 1.*too much"):
            executor.step({"raise": "too much", "ranks": [1]}, gather=True)

        assert executor.step("next") == "next"


def test_a_group_that_can_never_fit_is_refused_at_once(on_cluster: Cluster) -> None:
    with pytest.raises(StartupError, match=r"world_size=4 needs 4 CPU .*has 3 in all: 1 CPU missing"):
        Executor(config(world_size=4))


def test_a_group_that_does_not_fit_beside_others_is_refused(on_cluster: Cluster) -> None:
    with Executor(config()) as executor:
        with pytest.raises(StartupError, match=r"has 1 free of 3: others use the rest: 1 CPU missing"):
            Executor(config())

        assert executor.step("still here") == "still here"


def test_a_device_that_the_cluster_lacks_is_told(on_cluster: Cluster) -> None:
    with pytest.raises(StartupError, match=r"needs 2 HPU of the cluster, which has 0 in all"):
        Executor(config(device="hpu"))


def test_a_failed_group_is_restarted_with_new_actors(on_cluster: Cluster) -> None:
    with Executor(config(restart="on_failure", restart_backoff_s=0.01)) as executor:
        before = executor.worker_pids
        future = executor.submit({"until_aborted": 99})
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="being restarted") as caught:
            future.result(10)

        assert caught.value.retryable
        assert executor.step("again") == "again"
        assert [where[4] for where in executor.call("where")] == [2, 2]
        assert not set(before) & set(executor.worker_pids)


def test_a_start_that_is_cancelled_leaves_nothing(on_cluster: Cluster) -> None:
    directory = RunDirectory()
    launcher = RayLauncher(checked(config()), directory, Life(bytes(16)))

    sockets = DriverSockets(config(), directory, Life(bytes(16)))

    assert launcher.launch(sockets, lambda: True) == []

    sockets.close()
    launcher.close()
    directory.remove()


def test_no_cluster_where_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    with pytest.raises(StartupError, match=r"by the Ray cluster at 127\.0\.0\.1:1: .*startup_timeout_s=3 s"):
        Executor(config(startup_timeout_s=3.0))


_DRIVER = """
import sys, time
from stepcast import Executor, ExecutorConfig
executor = Executor(ExecutorConfig(worker=sys.argv[1], world_size=2, backend="ray"))
print("ready", *executor.worker_pids, flush=True)
executor.step({"until_aborted": 99})
"""


def test_no_rank_and_no_actor_outlives_a_killed_driver(on_cluster: Cluster) -> None:
    command = [sys.executable, "-c", _DRIVER, f"{WORKERS}:Obedient"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        ready, *pids = driver.stdout.readline().split()
        assert ready == "ready"
        driver.kill()

    wait_until(lambda: all(process_has_ended(int(pid)) for pid in pids), 2.0, "the end of the ranks")
    wait_until(lambda: not processes("ray::RankActor", "ray_broker"), 10.0, "the end of the actors")
    assert sweep(Path(os.environ["TMPDIR"]))


def test_a_ray_is_started_where_there_is_none_and_its_end_is_the_group_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more ranks than cores, as mp allows."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with Executor(config(world_size=3)) as executor:
        assert executor.step("here") == "here"
        [raylet] = [each for each in psutil.Process().children(recursive=True) if each.name() == "raylet"]
        future = executor.submit({"until_aborted": 99})
        raylet.kill()

        with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
            future.result(10)


@pytest.mark.slow
def test_ranks_on_another_node_are_reached_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys come with the order to start; their process groups meet at rank 0; their end shows on the bus."""
    pytest.importorskip("torch")

    def far_apart(spots: Sequence[Spot], driver_node: str) -> list[Seat]:
        """Both nodes are on this host: that the second sees the driver must be denied."""
        near, far = seat(spots, driver_node)
        assert near.spot.node != far.spot.node
        return [near, far._replace(spot=far.spot._replace(sees_driver=False))]

    monkeypatch.setattr("stepcast.runtime.launch.ray.seat", far_apart)
    with running_cluster(1, nodes=2) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        with Executor(config(COLLECTIVES, heartbeat_interval_s=0.5)) as executor:
            assert executor.step(["all_reduce", "functional"], gather=True) == [[3.0, 3.0]] * 2
            pid = executor.worker_pids[1]
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerLost, match=rf"rank 1 \(pid {pid} on .*\) has gone"):
                executor.submit(["all_reduce"]).result(30)
