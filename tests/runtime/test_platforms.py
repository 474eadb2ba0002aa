"""The kinds of device: how many ranks they are enough for, which are refused and why, and how others are registered."""

from __future__ import annotations

import logging
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepcast import ConfigError, Executor, ExecutorConfig
from stepcast.runtime import platforms
from stepcast.runtime.platforms import DeviceKind, Host, Platform, Ruling, check_start_method, kind_named, resolve

ECHO = "stepcast.workers.echo:Echo"


def host(root: Path, *names: str, builds: str = "", **environ: str) -> Host:
    """A host with files of these names under its root, and a torch that is built for something."""
    for name in names:
        path, _, text = name.partition("=")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    torch = root / "site/torch"
    torch.mkdir(parents=True, exist_ok=True)
    (torch / "version.py").write_text("".join(f"{each} = '1'\n" for each in builds.split()))
    modules = {"torch": str(torch / "__init__.py"), "habana_frameworks": "somewhere"}
    return Host(root=root, environ=environ, find_module=modules.get, version={"torch": "2.13.0"}.get)


def cuda_host(root: Path, **environ: str) -> Host:
    return host(root, "dev/nvidia0", "dev/nvidia1", "dev/nvidia2", builds="cuda", **environ)


def rocm_host(root: Path, **environ: str) -> Host:
    nodes = [f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id={node}" for node in range(4)]
    return host(root, "dev/kfd", *nodes, builds="hip", **environ)


def hpu_host(root: Path, **environ: str) -> Host:
    cards = [f"dev/accel/accel{card}" for card in range(3)]
    return host(root, *cards, *(f"sys/class/accel/accel{card}/device/vendor=0x1da3" for card in range(3)), **environ)


def xpu_host(root: Path, **environ: str) -> Host:
    cards = [f"dev/dri/renderD{card}" for card in range(3)]
    vendors = [f"sys/class/drm/renderD{card}/device/vendor=0x8086" for card in range(3)]
    return host(root, *cards, *vendors, builds="xpu", **environ)


HOSTS = {"cuda": cuda_host, "rocm": rocm_host, "hpu": hpu_host, "xpu": xpu_host}


# Which one, and how many.


@pytest.mark.parametrize(
    ("name", "environ", "count"),
    [
        ("cuda", {}, 3),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1,7,0"}, 1),  # the runtime stops at what there is not
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-8f3a,GPU-11c0"}, 2),
        ("rocm", {}, 3),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "0,2", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "0,2"}, 2),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ("hpu", {}, 3),
        ("hpu", {"HABANA_VISIBLE_MODULES": "5,4"}, 2),
        ("xpu", {}, 3),
        ("xpu", {"ZE_AFFINITY_MASK": "1"}, 1),
        ("xpu", {"ZE_AFFINITY_MASK": "0.0,0.1"}, 2),
    ],
)
def test_as_many_ranks_fit_as_devices_are_visible(
    tmp_path: Path, name: str, environ: dict[str, str], count: int
) -> None:
    """One device for each rank; the error tells the count and the masks."""
    found = HOSTS[name](tmp_path, **environ)
    for device in (name, "auto"):
        assert resolve(device, count, found).name == name
        with pytest.raises(ConfigError) as raised:
            resolve(device, count + 1, found)
        told = str(raised.value)
        assert told.startswith(f"world_size={count + 1}: needs as many {name} devices, but {count} can be used of 3")
        assert all(f"{mask}={value!r}" in told for mask, value in environ.items())


def test_processors_are_shared(tmp_path: Path) -> None:
    """Any number of ranks; and "auto" comes to them where there is nothing else."""
    assert resolve("auto", 100, host(tmp_path)).name == "cpu"
    assert resolve("cpu", 100, cuda_host(tmp_path)).name == "cpu"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "contradict each other: set one of them"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}, "names more devices than ROCR_VISIBLE_DEVICES="),
    ],
)
def test_masks_that_contradict_each_other_are_told(tmp_path: Path, environ: dict[str, str], words: str) -> None:
    """Before a rank starts: torch itself would raise in every one of them."""
    with pytest.raises(ConfigError, match=words):
        resolve("rocm", 1, rocm_host(tmp_path, **environ))


def test_a_device_that_can_not_be_used_says_why(tmp_path: Path) -> None:
    """What "auto" would pass over."""
    unbuilt = host(tmp_path, "dev/nvidia0")
    with pytest.raises(ConfigError, match=r"^device='cuda' can't be used: torch 2\.13\.0 is not built for cuda"):
        resolve("cuda", 1, unbuilt)
    assert resolve("auto", 1, unbuilt).name == "cpu"


def test_a_wrong_device_names_what_is_allowed_and_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such kind, and none of that kind here; in processes or in this one."""
    monkeypatch.setattr(platforms, "this_host", cuda_host(tmp_path))
    for backend in ("mp", "uni"):
        with pytest.raises(ConfigError) as raised:
            Executor(ExecutorConfig(worker=ECHO, backend=backend, device="gpu"))
        assert str(raised.value) == (
            "device='gpu': must be one of 'auto', 'hpu', 'cuda', 'rocm', 'xpu', 'cpu'; this host has cuda, cpu"
        )
        with pytest.raises(ConfigError, match=r"^device='xpu': this host has cuda, cpu; use one of these"):
            Executor(ExecutorConfig(worker=ECHO, backend=backend, device="xpu"))


def test_every_rank_is_told_its_device_as_torch_calls_it() -> None:
    names = {name: kind_named(name).device(2) for name in ("cpu", "cuda", "rocm", "hpu", "xpu")}
    assert names == {"cpu": "cpu", "cuda": "cuda:2", "rocm": "cuda:2", "hpu": "hpu", "xpu": "xpu:2"}


# Start methods.


def torch_that_is(initialized: bool) -> dict[str, Any]:
    return {"torch": SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: initialized))}


@pytest.mark.parametrize(
    ("name", "method", "modules", "words"),
    [
        ("cuda", "fork", torch_that_is(True), "has initialized cuda already"),
        ("rocm", "fork", torch_that_is(True), "has initialized rocm already"),
        ("xpu", "fork", {}, "does not survive a fork"),
        ("hpu", "fork", {"habana_frameworks": ModuleType("habana_frameworks")}, "has imported habana_frameworks"),
    ],
)
def test_a_fork_that_could_not_use_its_device_is_refused(
    name: str, method: str, modules: dict[str, Any], words: str
) -> None:
    """The error says why, and what to use."""
    with pytest.raises(ConfigError, match=f"^start_method='{method}' with device='{name}': .*{words}.*='spawn'$"):
        check_start_method(kind_named(name), method, modules)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_forks_on_gaudi_cards_are_warned_of(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are used all the same, as they were asked for."""
    check_start_method(kind_named("hpu"), method, {})
    assert "ends without its exit handlers" in caplog.text


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "spawn") for name in ("cpu", "cuda", "rocm", "hpu", "xpu")),
        *(("cpu", method) for method in ("fork", "forkserver")),
        *((name, "forkserver") for name in ("cuda", "rocm", "xpu")),
        ("cuda", "fork"),
    ],
)
def test_other_start_methods_are_allowed(name: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a word; a fork server has no device, whatever this process has."""
    modules = torch_that_is(method != "fork")
    with caplog.at_level(logging.DEBUG):
        check_start_method(kind_named(name), method, modules)
    assert not caplog.records


# Kinds of other packages.


class NPU(DeviceKind):
    """A kind that another package might bring."""

    name = "npu"
    device_class = "elsewhere:NPU"

    def detect(self, host: Host) -> Platform:
        return Platform(name="npu", devices=["/dev/npu0", "/dev/npu1"])

    def count(self, platform: Platform) -> int:
        return len(platform.devices)

    def start_method(self, method: str, modules: Any) -> Ruling:
        return Ruling()


def register(monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    group = platforms.ENTRY_POINTS
    made = [metadata.EntryPoint(name, f"{__name__}:{value}", group) for name, value in entries.items()]
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "NPU", NPU, raising=False)
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: made if group == platforms.ENTRY_POINTS else [])


def test_another_package_can_register_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, preferred to the CPU, and told to the ranks by its class."""
    register(monkeypatch, npu="NPU")
    empty = host(tmp_path)
    assert [each.name for each in platforms.detect_platforms(empty)] == ["npu", "cpu"]
    kind = resolve("auto", 2, empty)
    assert (kind.name, kind.device(1), kind.device_class) == ("npu", "npu:1", "elsewhere:NPU")


def test_a_kind_that_does_not_load_says_so_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others can be used."""
    register(monkeypatch, broken="Missing", renamed="NPU")
    for name, words in (("broken", "AttributeError"), ("renamed", "with the name 'renamed'")):
        with pytest.raises(ConfigError, match=f"^device='{name}' can't be used: .*{words}"):
            resolve(name, 1, host(tmp_path))
    assert resolve("auto", 1, host(tmp_path)).name == "cpu"


def test_a_registered_kind_does_not_take_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, cuda="NPU", cpu="NPU", auto="NPU")
    assert list(platforms.kinds()) == ["hpu", "cuda", "rocm", "xpu", "cpu"]
    assert not isinstance(kind_named("cuda"), NPU)
