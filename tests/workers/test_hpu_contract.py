"""The contract with Gaudi's software, on a stand-in for it: it is kept, and each part of it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

HERE = Path(__file__).parent
PLAN, PROCESS_GROUP = "stepcast.runtime.launch.plan", "stepcast.workers.process_group"
KIND, DEVICE, HPU = "stepcast.runtime.platforms.hpu", "stepcast.workers.devices.device", "stepcast.workers.devices.hpu"
PLACE = "world_size=rank.world_size, rank=rank.rank, local_rank=rank.local_rank"
CALL = f"            hccl.initialize_distributed_hpu({PLACE})\n"


def case(*edits: tuple[str, str, str], imported_before: bool = False, **environ: str) -> dict[str, Any]:
    return {"edits": edits, "imported_before": imported_before, "environ": environ}


#: What must work.
KEPT = {
    "lazy": case(),
    "eager": case(PT_HPU_LAZY_MODE="0"),
    "the driver is bound to a card itself": case(HLS_MODULE_ID="0"),
    "the job has some of the cards": case(HABANA_VISIBLE_MODULES="3,1"),
    "imported before the fork": case(imported_before=True),
}
#: What must not: a change in our source, and the words by which one of the ranks then fails.
BROKEN = {
    "a keyword that the wrapped function has not": (
        case((DEVICE, "(self.backend, **self", "(self.backend, device_id=self.torch_device, **self")),
        "unexpected keyword argument 'device_id'",
    ),
    "no backend named": (case((DEVICE, "(self.backend, **self", "(**self")), "'backend'"),
    "another backend": (case((HPU, 'backend = "hccl"', 'backend = "gloo"')), 'get_backend() == "hccl"'),
    "a keyword misspelt": (case((HPU, "local_rank=rank.local_rank", "localrank=rank.rank")), "'localrank'"),
    "another rank's card": (
        case((HPU, CALL, CALL.replace("=rank.local", "=1 - rank.local")), imported_before=True),
        "it is bound to module",
    ),
    "not bound after a fork": (case((HPU, CALL, ""), imported_before=True), "it is bound to module None"),
    "no LOCAL_RANK before the import": (
        case((PLAN, '        "LOCAL_RANK": str(boot.local_rank),\n', "")),
        "LOCAL_RANK is None in its environment",
    ),
    "HLS_MODULE_ID inherited": (
        case((KIND, 'not_inherited = ("HLS_MODULE_ID",)', "not_inherited = ()"), HLS_MODULE_ID="0"),
        "it is bound to module 0 (HLS_MODULE_ID), where local rank 1 has module 1",
    ),
    "a device with an index": (
        case((KIND, 'return "hpu"', 'return f"hpu:{local_rank}"')),
        "the index of a process's only card is 0",
    ),
    "no first collective": (
        case(
            (
                DEVICE,
                "        dist.init_process_group(self.backend, **self.meeting())\n        self.warm_up()",
                "        dist.init_process_group(self.backend, **self.meeting())",
            )
        ),
        "no first collective on its own card",
    ),
    "a tensor of the CPU": (
        case((PROCESS_GROUP, "torch.ones(1, device=device)", "torch.ones(1)")),
        "No backend type associated",
    ),
    "left with work under way": (case((DEVICE, "        self.synchronize()\n", "")), "left with work under way"),
    "a device for synchronize": (
        case((HPU, "_hpu.synchronize()", "_hpu.synchronize(self.torch_device)")),
        "takes 0 positional arguments",
    ),
    "mark_step in eager mode": (
        case((HPU, "if internal.is_lazy():", "if internal:"), PT_HPU_LAZY_MODE="0"),
        "mark_step belongs to lazy mode",
    ),
    "left to the exit handlers": (
        case((PROCESS_GROUP, "            _joined.leave()\n", "            pass\n")),
        "it has not left the group",
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    """Run all cases one after another, in one process that has torch already."""
    cases = {**KEPT, **{name: broken for name, (broken, _) in BROKEN.items()}}
    run = subprocess.run(
        [sys.executable, HERE / "hpu_contract.py"],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(cases, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize("name", KEPT)
def test_a_group_computes_through_hccl(outcomes: dict[str, list[str]], name: str) -> None:
    """Two ranks, each on its own card: bound, joined, warmed up, computing, and gone in good order."""
    assert outcomes[name] == ["kept", "kept"]


@pytest.mark.parametrize("name", BROKEN)
def test_the_contract_fails_where_a_part_of_it_is_left_out(outcomes: dict[str, list[str]], name: str) -> None:
    """Each keyword, variable and order is there because something breaks without it."""
    words = BROKEN[name][1]
    assert any(words in outcome for outcome in outcomes[name]), outcomes[name]
