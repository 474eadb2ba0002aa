"""What the "ray" backend decides without Ray: which cluster, which variables, and which devices a rank sees."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stepcast import ConfigError, Executor, ExecutorConfig
from stepcast.runtime import platforms
from stepcast.runtime.launch.plan import Variables
from stepcast.runtime.launch.ray import broker_environment, cluster_address, on_node

ECHO = "stepcast.workers.echo:Echo"


def ray_module(*, initialized: bool, client: bool = False) -> Any:
    """A stand-in for Ray's module as the embedder has imported it."""
    return SimpleNamespace(
        is_initialized=lambda: initialized,
        util=SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: client))),
        get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"),
    )


@pytest.mark.parametrize(
    ("environ", "modules", "address"),
    [
        ({}, {}, None),
        ({"RAY_ADDRESS": ""}, {}, None),
        ({"RAY_ADDRESS": "local"}, {}, None),
        ({"RAY_ADDRESS": "auto"}, {}, "auto"),
        ({"RAY_ADDRESS": "10.0.0.2:1"}, {"ray": ray_module(initialized=False)}, "10.0.0.2:1"),
        ({"RAY_ADDRESS": "10.0.0.2:1"}, {"ray": ray_module(initialized=True)}, "10.0.0.1:6379"),
    ],
)
def test_the_cluster_is_the_embedder_s_or_the_one_that_is_named(
    environ: dict[str, str], modules: dict[str, Any], address: str | None
) -> None:
    assert cluster_address(environ, modules) == address


@pytest.mark.parametrize(
    ("environ", "modules"),
    [
        ({"RAY_ADDRESS": "ray://10.0.0.2:10001"}, {}),
        ({}, {"ray": ray_module(initialized=True, client=True)}),
    ],
)
def test_a_program_outside_the_cluster_is_refused(environ: dict[str, str], modules: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Ray Client .*run the program on a node of the cluster"):
        cluster_address(environ, modules)


def test_a_ray_that_is_started_tells_nobody_and_lets_nobody_in() -> None:
    first, second = (broker_environment({"PATH": "/bin"}, None) for _ in range(2))

    assert first["PATH"] == "/bin"
    assert first["RAY_USAGE_STATS_ENABLED"] == "0"
    assert first["RAY_AUTH_MODE"] == "token"
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_what_the_user_has_set_for_ray_holds() -> None:
    environ = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "7"}

    started = broker_environment(environ, None)

    assert started["RAY_worker_niceness"] == "7"
    assert started["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN" not in started
    assert broker_environment(environ, "10.0.0.1:6379") == environ


# What Ray gives the actor of local rank 1 of two that have devices 5 and 2, and what its rank must have instead.
@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", {"OTHER": "1"}, {"OTHER": "1"}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "5,2"}),
        # With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, Ray sets nothing, and tells the ids all the same.
        ("cuda", {}, {"CUDA_VISIBLE_DEVICES": "5,2"}),
        (
            "rocm",
            {"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5", "HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"},
            {"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5", "HIP_VISIBLE_DEVICES": "5,2"},
        ),
        ("xpu", {"ZE_AFFINITY_MASK": "2"}, {"ZE_AFFINITY_MASK": "5,2"}),
        ("xpu", {"ONEAPI_DEVICE_SELECTOR": "level_zero:2"}, {"ZE_AFFINITY_MASK": "5,2"}),
        ("hpu", {"HABANA_VISIBLE_MODULES": "2"}, {"HABANA_VISIBLE_MODULES": "5,2"}),
        ("hpu", {"HABANA_VISIBLE_MODULES": "2", "HLS_MODULE_ID": "7"}, {"HABANA_VISIBLE_MODULES": "5,2"}),
    ],
)
def test_a_rank_sees_the_devices_of_all_ranks_of_its_node(
    device: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    """Its local rank is its device's index, and Ray shows each actor its own device alone."""
    variables = Variables(platforms.not_inherited(), {}, {})

    told = on_node(variables, platforms.kind_named(device).visible(["5", "2"]))

    assert told.applied_to(given) == expected


@pytest.mark.parametrize("devices", [["5", "2"], ["0"]])
def test_a_mask_of_the_settings_holds(devices: Sequence[str]) -> None:
    variables = Variables((), {}, {"CUDA_VISIBLE_DEVICES": "1"})

    told = on_node(variables, platforms.kind_named("cuda").visible(devices))

    assert told.applied_to({}) == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("device", "resource"), [("cpu", "CPU"), ("cuda", "GPU"), ("rocm", "GPU"), ("xpu", "GPU"), ("hpu", "HPU")]
)
def test_devices_are_what_ray_counts_them_as(device: str, resource: str) -> None:
    assert platforms.kind_named(device).ray_resource == resource


def test_a_missing_ray_is_told_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install 'stepcast\[ray\]'"):
        Executor(ExecutorConfig(worker=ECHO, world_size=2, backend="ray"))


def test_ray_starts_the_ranks_in_its_own_way() -> None:
    with pytest.raises(ConfigError, match=r"start_method='fork': Ray starts the ranks"):
        Executor(ExecutorConfig(worker=ECHO, backend="ray", start_method="fork"))
