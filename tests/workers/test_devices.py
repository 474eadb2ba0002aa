"""What a rank asks of torch for each kind of device. Where there is none of it, torch's answers are made up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from stepcast import ConfigError, Executor, ExecutorConfig
from stepcast.workers import process_group
from stepcast.workers.base import RankInfo
from stepcast.workers.devices import Memory, open_device

#: A package with a kind of device of its own, whose devices are processors.
PACKAGE = {
    "acme-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1\n",
    "acme-1.dist-info/entry_points.txt": "[stepcast.platforms]\nnpu = acme_kind:NPU\n",
    "acme_kind.py": """
from stepcast.runtime.platforms import DeviceKind, Platform, Ruling

class NPU(DeviceKind):
    name = "npu"
    device_class = "acme_device:NPU"

    def detect(self, host):
        return Platform(name="npu", devices=["/dev/npu0", "/dev/npu1"])

    def count(self, platform):
        return len(platform.devices)

    def device(self, local_rank):
        return "cpu:0"

    def environment(self):
        return {"ACME_MODE": "fast"}

    def start_method(self, method, modules):
        return Ruling(refused=None if method == "spawn" else "it is ours to say")
""",
    "acme_device.py": """
import os
import torch.distributed as dist
from stepcast.workers.devices.cpu import CPU

class NPU(CPU):
    def bind(self):
        os.environ["ACME_BOUND"] = str(self.rank.local_rank)

    def join(self):
        dist.init_process_group("gloo", **self.meeting())
        self.warm_up()
""",
    "acme_worker.py": """
import os
BOUND = os.environ.get("ACME_BOUND")
import torch.distributed as dist
from stepcast import Worker
from stepcast.workers.process_group import destroy_process_group, init_process_group

class Telling(Worker):
    def setup(self, rank):
        self.device = init_process_group(rank)

    def execute(self, step):
        return [BOUND, os.environ["ACME_MODE"], type(self.device).__name__, dist.get_backend()]

    def teardown(self):
        destroy_process_group()
""",
}


def test_a_group_runs_on_a_kind_of_device_that_another_package_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by its entry point; each rank has its environment, and is bound before the worker's module is imported."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ExecutorConfig(worker="acme_worker:Telling", backend="mp", world_size=2, device="npu")
    with Executor(config) as executor:
        told = executor.step(None, gather=True)
    assert told == [[str(rank), "fast", "NPU", "gloo"] for rank in range(2)]
    with pytest.raises(ConfigError, match="it is ours to say"):
        Executor(config.replace(start_method="fork"))


def rank_info(device: str, kind: str, **changes: Any) -> RankInfo:
    settings: dict[str, Any] = {
        "rank": 1,
        "local_rank": 1,
        "local_world_size": 2,
        "world_size": 2,
        "epoch": 1,
        "output_rank": 0,
        "device": device,
        "device_class": f"stepcast.workers.devices.{kind}",
        "rendezvous": "file:///nowhere",
        "collective_timeout_s": 7.0,
    }
    return RankInfo(**{**settings, **changes})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was asked of a torch that has two devices of every kind."""
    made: list[tuple[str, Any]] = []

    def record(name: str, answer: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append((name, args + tuple(sorted(kwargs))))
            return answer

        return call

    def add_up(tensor: Any) -> None:
        made.append(("all_reduce", ()))
        tensor.mul_(2)

    ones = torch.ones
    for kind in ("cuda", "xpu"):
        for name, answer in (("set_device", None), ("synchronize", None), ("mem_get_info", (3, 5))):
            monkeypatch.setattr(getattr(torch, kind), name, record(f"{kind}.{name}", answer))
    monkeypatch.setattr(torch, "ones", lambda count, device: ones(count))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", record("init_process_group"))
    monkeypatch.setattr(torch.distributed, "all_reduce", add_up)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", record("destroy_process_group"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return made


PLACE = ("init_method", "rank", "timeout", "world_size")


def test_a_rank_on_nvidias_or_amds_gpu(calls: list[tuple[str, Any]]) -> None:
    """The device is set before anything else, and told to NCCL; work is waited for before the group is left."""
    device = torch.device("cuda", 1)
    process_group.init_process_group(rank_info("cuda:1", "cuda:CUDA"))
    assert process_group.exit_waits_for_peers()
    process_group.destroy_process_group()
    assert not process_group.exit_waits_for_peers()
    assert calls == [
        ("cuda.set_device", (device,)),
        ("init_process_group", ("nccl", "device_id", *PLACE)),
        ("all_reduce", ()),
        ("cuda.synchronize", (device,)),
        ("destroy_process_group", ()),
    ]
    assert open_device(rank_info("cuda:1", "cuda:CUDA")).memory() == Memory(free=3, total=5)


def test_a_rank_on_intels_gpu(calls: list[tuple[str, Any]]) -> None:
    """As the other, with XCCL, which is told no device, but wants a first collective."""
    device = torch.device("xpu", 1)
    process_group.init_process_group(rank_info("xpu:1", "xpu:XPU"))
    process_group.destroy_process_group()
    assert calls == [
        ("xpu.set_device", (device,)),
        ("init_process_group", ("xccl", *PLACE)),
        ("all_reduce", ()),
        ("xpu.synchronize", (device,)),
        ("destroy_process_group", ()),
    ]
    assert open_device(rank_info("xpu:1", "xpu:XPU")).memory() == Memory(free=3, total=5)


def test_a_first_collective_that_adds_up_wrongly_is_told(calls: list[tuple[str, Any]]) -> None:
    """Ranks that share a card, or libraries that do not fit each other, show here and not in the model's words."""
    with pytest.raises(RuntimeError, match=r"first nccl collective of rank 1 adds up to 2, not to the 4 ranks"):
        process_group.init_process_group(rank_info("cuda:1", "cuda:CUDA", world_size=4))
    process_group.destroy_process_group()


@pytest.mark.parametrize(("device", "kind", "library"), [("cuda:1", "cuda:CUDA", "NCCL"), ("xpu:1", "xpu:XPU", "XCCL")])
def test_a_torch_without_the_library_is_told(
    device: str, kind: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rank, and what to install."""
    monkeypatch.setattr(torch.distributed, f"is_{library.lower()}_available", lambda: False)
    with pytest.raises(ConfigError, match=f"^rank 1 can't use its device {device}: .*has no {library}: install"):
        open_device(rank_info(device, kind))


def test_a_class_that_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pathlib:Path must be a subclass of stepcast\.workers\.devices\.Device"):
        open_device(rank_info("cpu", "cpu:CPU", device_class="pathlib:Path"))


def test_a_seed_makes_random_numbers_the_same() -> None:
    """Those of Python, torch, and numpy where it is there."""
    numpy = pytest.importorskip("numpy")
    device = open_device(rank_info("cpu", "cpu:CPU"))
    drawn = []
    for _ in range(2):
        device.seed(2**40 + 1)
        drawn.append((random.random(), torch.rand(1).item(), numpy.random.random()))
    assert drawn[0] == drawn[1]


def test_the_host_has_memory() -> None:
    memory = open_device(rank_info("cpu", "cpu:CPU")).memory()
    kibibytes = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < memory.free <= memory.total == kibibytes * 1024
