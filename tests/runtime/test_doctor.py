"""`stepcast doctor`: what a host has is read from its files, on hosts that are made up."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.console import Console

from stepcast.bus.errors import StartupError
from stepcast.runtime import doctor, trial
from stepcast.runtime.cli.doctor import print_report
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.platforms import Host, Platform, choose_platform, detect_platforms
from tests.e2e.command import stepcast

ECHO = "stepcast.workers.echo:Echo"
INTEL, AMD, HABANA, NVIDIA = "0x8086", "0x1002", "0x1da3", "0x10de"


class FakeHost:
    """A host with the files, packages and variables that a test gives it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions = {"torch": "2.13.0+cpu"}
        self.modules: dict[str, str] = {}
        self.environ: dict[str, str] = {}
        self.torch_is_built_for()

    def put(self, path: str, content: str = "") -> FakeHost:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return self

    def torch_is_built_for(self, **builds: str) -> FakeHost:
        lines = [f"{name}: Optional[str] = {builds.get(name)!r}" for name in ("cuda", "hip", "rocm", "xpu")]
        self.put("site/torch/version.py", "\n".join(["__version__ = '2.13.0'", "debug = False", *lines, ""]))
        self.modules["torch"] = str(self.root / "site/torch/__init__.py")
        return self

    def detect(self) -> list[Platform]:
        return detect_platforms(
            Host(root=self.root, environ=self.environ, find_module=self.modules.get, version=self.versions.get)
        )


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def test_a_host_without_devices_has_cpus(host: FakeHost) -> None:
    """Where there is no device file the platform is the CPU, driven by torch."""
    (found,) = host.detect()
    assert found == Platform(name="cpu", software="torch 2.13.0+cpu")
    assert choose_platform([found]) is found


def test_without_torch_the_cpu_says_so(host: FakeHost) -> None:
    """A host where torch is missing still has CPUs, with the reason why they can't be used."""
    host.versions, host.modules = {}, {}
    (found,) = host.detect()
    assert found.problem == "torch is not installed"
    assert choose_platform([found]) is found


def with_cuda(host: FakeHost) -> FakeHost:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        host.put(f"dev/{name}")
    return host.torch_is_built_for(cuda="13.0")


def with_rocm(host: FakeHost) -> FakeHost:
    host.put("dev/kfd")
    for node, gpu in enumerate(("0", "51234", "51235")):  # the first is the CPU
        host.put(f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id", f"{gpu}\n")
    return host.torch_is_built_for(hip="7.1.0", rocm="7.1.0")


def with_hpu(host: FakeHost) -> FakeHost:
    for name, vendor in (("accel0", HABANA), ("accel1", HABANA), ("accel2", INTEL)):  # the last is an NPU
        host.put(f"dev/accel/{name}").put(f"sys/class/accel/{name}/device/vendor", f"{vendor}\n")
    host.put("dev/accel/accel_controlD0")
    host.modules["habana_frameworks"] = "somewhere"
    host.versions["habana-torch-plugin"] = "1.24.1.482"
    return host


def with_xpu(host: FakeHost) -> FakeHost:
    for name, vendor in (("renderD128", INTEL), ("renderD129", AMD)):
        host.put(f"dev/dri/{name}").put(f"sys/class/drm/{name}/device/vendor", f"{vendor}\n")
    return host.torch_is_built_for(xpu="20250300")


@pytest.mark.parametrize(
    ("prepare", "name", "devices", "software"),
    [
        (with_cuda, "cuda", [f"/dev/nvidia{number}" for number in (0, 1, 2, 10)], "torch 2.13.0+cpu"),
        (with_rocm, "rocm", ["/dev/kfd node 1", "/dev/kfd node 2"], "torch 2.13.0+cpu"),
        (with_hpu, "hpu", ["/dev/accel/accel0", "/dev/accel/accel1"], "habana-torch-plugin 1.24.1.482"),
        (with_xpu, "xpu", ["/dev/dri/renderD128"], "torch 2.13.0+cpu"),
    ],
)
def test_each_kind_of_device_is_found(
    host: FakeHost, prepare: Callable[[FakeHost], FakeHost], name: str, devices: list[str], software: str
) -> None:
    """Device files of a kind, and the software that drives them, make a platform, which is preferred to the CPU."""
    found = prepare(host).detect()
    assert [each.name for each in found] == [name, "cpu"]
    assert found[0] == Platform(name=name, devices=devices, software=software)
    assert choose_platform(found).name == name


@pytest.mark.parametrize("prepare", [with_cuda, with_rocm, with_xpu])
def test_a_torch_that_is_built_for_another_device_is_named(
    host: FakeHost, prepare: Callable[[FakeHost], FakeHost]
) -> None:
    """Devices that the installed torch is not built for are told of, with the reason; the CPU is used."""
    prepare(host).torch_is_built_for()
    found = host.detect()
    assert found[0].problem == f"torch 2.13.0+cpu is not built for {found[0].name}: install the build that is"
    assert found[0].software is None
    assert choose_platform(found).name == "cpu"


def test_gaudi_cards_without_their_plugin_are_named(host: FakeHost) -> None:
    """habana_frameworks is what is imported; the package has another name, and is not on PyPI."""
    with_hpu(host).modules.pop("habana_frameworks")
    found = host.detect()
    assert found[0].problem is not None
    assert "habana-torch-plugin" in found[0].problem
    assert choose_platform(found).name == "cpu"


def test_an_older_driver_names_gaudi_cards_otherwise(host: FakeHost) -> None:
    """/dev/hl0 is a Gaudi card too."""
    host.put("dev/hl0").put("dev/hl_controlD0")
    assert [each.devices for each in host.detect()] == [["/dev/hl0"], ()]


@pytest.mark.parametrize(
    ("prepare", "mask", "value", "hides"),
    [
        (with_cuda, "CUDA_VISIBLE_DEVICES", "1,2", False),
        (with_cuda, "CUDA_VISIBLE_DEVICES", "", True),
        (with_cuda, "CUDA_VISIBLE_DEVICES", "-1", True),
        (with_rocm, "HIP_VISIBLE_DEVICES", "0", False),
        (with_rocm, "ROCR_VISIBLE_DEVICES", "", True),
        (with_hpu, "HABANA_VISIBLE_MODULES", "0,1", False),
        (with_hpu, "HLS_MODULE_ID", "3", False),
        (with_xpu, "ZE_AFFINITY_MASK", "0", False),
    ],
)
def test_masks_are_told(
    host: FakeHost, prepare: Callable[[FakeHost], FakeHost], mask: str, value: str, hides: bool
) -> None:
    """A variable that masks devices is told; one that hides them all is why they can't be used."""
    prepare(host).environ[mask] = value
    found = host.detect()[0]
    assert found.masks == {mask: value}
    assert found.problem == (f"{mask}={value!r} hides every device" if hides else None)


def test_a_device_that_may_not_be_opened_is_named(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device file without access for this user is told with what to do."""
    with_rocm(host)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != host.root / "dev/kfd")
    assert "can't be opened by this user" in (host.detect()[0].problem or "")


def test_a_windows_subsystem_has_one_device(host: FakeHost) -> None:
    """Under WSL there is no /dev/nvidia0, but /dev/dxg."""
    host.put("dev/dxg").torch_is_built_for(cuda="13.0")
    assert host.detect()[0].devices == ["/dev/dxg"]


def test_detection_imports_nothing_heavy() -> None:
    """Looking for platforms imports neither torch nor the devices' own packages."""
    code = (
        "import sys\n"
        "from stepcast.runtime.platforms import detect_platforms\n"
        "detect_platforms()\n"
        "assert not {'torch', 'habana_frameworks', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


# Packages, cores, memory.


def test_packages_that_are_missing_are_told_by_extra() -> None:
    """Each extra's packages that are not installed are named; the names come from stepcast's own metadata."""
    assert doctor.missing_packages(lambda name: "1") == {"cli": [], "causal-lm": []}
    missing = doctor.missing_packages(lambda name: None if name in ("typer", "gguf", "torch") else "1")
    assert missing == {"cli": ["typer"], "causal-lm": ["gguf"]}


def test_packages_have_versions() -> None:
    """What is installed has a version, what is not has none."""
    versions = doctor.packages({"stepcast": "1", "pyzmq": "2"}.get)
    assert versions["stepcast"] == "1"
    assert versions["torch"] is None
    assert versions["python"] == sys.version.split()[0]
    assert versions["libzmq"]


def test_cores_come_with_what_limits_them(tmp_path: Path) -> None:
    """Affinity and the control group's quota are told beside the count."""
    host = FakeHost(tmp_path).put("sys/fs/cgroup/cpu.max", "150000 100000\n")
    found = doctor.processors(host.root)
    assert found.quota == 1.5
    assert found.usable == sorted(os.sched_getaffinity(0))
    host.put("sys/fs/cgroup/cpu.max", "max 100000\n")
    assert doctor.processors(host.root).quota is None
    assert doctor.processors(tmp_path / "nowhere").quota is None


def test_memory_comes_with_its_limit(tmp_path: Path) -> None:
    """Total, available and the control group's limit, in bytes."""
    host = FakeHost(tmp_path).put("proc/meminfo", "MemTotal:       2048 kB\nMemAvailable:   1024 kB\nHugePages: 0\n")
    assert doctor.memory(host.root) == doctor.Memory(total=2 << 20, available=1 << 20, limit=None)
    host.put("sys/fs/cgroup/memory.max", "1048576\n")
    assert doctor.memory(host.root).limit == 1 << 20
    host.put("sys/fs/cgroup/memory.max", "max\n")
    assert doctor.memory(host.root).limit is None


# The run directory.


def test_the_run_directory_is_private_and_short() -> None:
    """Root, mode and the length of the longest socket path are told, and nothing is left."""
    found = doctor.examine_run_directory(None)
    root = Path(os.environ["TMPDIR"])
    assert (found.root, found.writable, found.mode, found.problem) == (str(root), True, "0700", None)
    assert found.longest_socket_path_bytes == len(f"{root}/stepcast-12345678/replies")
    assert found.limit_bytes == 107
    assert list(root.iterdir()) == []


def test_stale_runs_are_told_and_deleted() -> None:
    """What a dead run left is named and deleted; a living run's directory is left alone."""
    code = (
        "import sys\n"
        "from stepcast.bus.endpoints import RunDirectory\n"
        "directory = RunDirectory(sys.argv[1])\n"
        "print(directory.path, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, os.environ["TMPDIR"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout
        alive = living.stdout.readline().strip()
        dead = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
        assert doctor.examine_run_directory(None).stale == [dead.stdout.strip()]
        assert Path(alive).is_dir()
        living.communicate()
    assert doctor.examine_run_directory(None).stale == [alive]


@pytest.mark.parametrize("wanted", ["nowhere", "file"])
def test_a_run_directory_that_will_not_do_is_told(tmp_path: Path, wanted: str) -> None:
    """A directory that is not there, or is none, is a problem with its path in it."""
    (tmp_path / "file").touch()
    found = doctor.examine_run_directory(str(tmp_path / wanted))
    assert (found.root, found.writable, found.mode) == (None, False, None)
    assert str(tmp_path / wanted) in (found.problem or "")


def test_kernel_features_are_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature that this kernel has, and one that it lacks."""

    def lacks(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    assert doctor.kernel()["eventfd"] is True
    monkeypatch.setattr(os, "pidfd_open", lacks)
    found = doctor.kernel()
    assert found["pidfd_open"] is False
    assert found["release"] == os.uname().release


# Backends.


def test_each_backend_is_started() -> None:
    """Those whose software is installed work here, with their times; of the others the report says what they need."""
    trials = trial.try_backends(ExecutorConfig(worker=ECHO))
    expected = {"mp", "uni"} | ({"torchrun"} if importlib.util.find_spec("torch") else set())
    assert {name for name, each in trials.items() if each.available} >= expected
    for name in expected:
        found = trials[name]
        assert found.problem is None
        assert found.start_s is not None
        assert found.shutdown_s is not None
        assert found.step_us is not None
        assert found.step_us > 0
    if "torchrun" not in expected:
        assert trials["torchrun"].problem == "needs torch, which brings torchrun: pip install torch"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (
            "import sys; sys.stderr.write('noise\\nTypeError: no port\\nmore'); sys.exit(3)",
            "code 3: TypeError: no port",
        ),
        ("import time; time.sleep(60)", "not come to an end within 0.5 s"),
    ],
)
def test_a_torchrun_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, program: str, problem: str) -> None:
    """A program in torchrun's place that fails, and one that hangs."""
    run = subprocess.run
    monkeypatch.setattr(trial.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(trial, "_TORCHRUN_LIMIT_S", 0.5)
    monkeypatch.setattr(trial.subprocess, "run", lambda command, **options: run([command[0], "-c", program], **options))
    found = trial.try_torchrun()
    assert not found.available
    assert problem in (found.problem or "")


@pytest.mark.parametrize(
    ("raised", "problem"),
    [(StartupError("rank 1 is late\nand more"), "rank 1 is late"), (OSError(11, "no process"), "no process")],
)
def test_a_backend_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, raised: Exception, problem: str) -> None:
    """Whatever keeps a backend from starting is its problem, in one line."""

    def fail(config: ExecutorConfig) -> Any:
        raise raised

    monkeypatch.setattr(trial, "Executor", fail)
    found = trial.try_backend(ExecutorConfig(worker=ECHO), "mp", 2)
    assert not found.available
    assert problem in (found.problem or "")
    assert "\n" not in (found.problem or "")


# The command.


def test_the_command_prints_one_object() -> None:
    """`stepcast doctor --json` prints the report as one JSON object, exits with 0, and writes nothing else."""
    done = stepcast("doctor", "--json", PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report.keys() == {
        "ok",
        "platform",
        "platforms",
        "packages",
        "missing",
        "processors",
        "memory",
        "run_directory",
        "limits",
        "kernel",
        "start_methods",
        "backends",
    }
    assert report["ok"] is True
    assert report["platforms"][-1]["name"] == "cpu"
    assert report["limits"]["open_files"]["soft"] in (resource.getrlimit(resource.RLIMIT_NOFILE)[0], None)
    assert report["start_methods"] == ["spawn", "fork", "forkserver"]
    assert report["run_directory"]["mode"] == "0700"


def test_the_command_fails_where_a_backend_does() -> None:
    """Inside torchrun's environment mp can't start: exit code 1, and the report says why."""
    done = stepcast("doctor", TORCHELASTIC_RUN_ID="1", WORLD_SIZE="3")
    assert done.returncode == 1
    assert "backend mp        no  backend='mp': this process was started by torchrun" in done.stdout
    assert "backend uni       ok" in done.stdout


def test_a_report_of_a_poor_host_reads_well(monkeypatch: pytest.MonkeyPatch, host: FakeHost) -> None:
    """Everything that is missing is named in the text."""
    with_cuda(host).torch_is_built_for()
    host.put("sys/fs/cgroup/cpu.max", "50000 100000").put("sys/fs/cgroup/memory.max", str(1 << 30))
    host.environ["CUDA_VISIBLE_DEVICES"] = "0"
    host.versions.pop("typer", None)
    failed = trial.Trial(available=False, problem="it does not start")
    monkeypatch.setattr(doctor, "try_backends", lambda config: {"mp": failed, "uni": failed})
    missing_directory = str(host.root / "nowhere")
    report = doctor.examine(
        ExecutorConfig(worker=ECHO, run_dir=missing_directory),
        Host(root=host.root, environ=host.environ, find_module=host.modules.get, version=host.versions.get),
    )
    assert not report.ok
    console = Console(file=io.StringIO(), width=300)
    with console.capture() as text:
        print_report(report, console)
    for part in (
        "no  cuda (4: /dev/nvidia0, ",
        "CUDA_VISIBLE_DEVICES=0: torch 2.13.0+cpu is not built for cuda",
        "pip install 'stepcast[cli]'",
        "time of 0.5 by the control group",
        "limit 1.0 GiB by the control group",
        missing_directory,
        "no  it does not start",
    ):
        assert part in text.get()
