"""Interactive serving under torchrun: an asyncio front end in rank 0's process, requests that come and go."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from stepcast import Executor, ExecutorConfig
from tests.faults.rig import wait_for_none_left
from tests.torchrun import serving
from tests.torchrun.rig import Job

MAKE_TINY = Path(__file__).parents[1] / "e2e" / "make_tiny_model.py"
RANKS = 3
SEED = 20


@pytest.mark.slow
def test_requests_cancellations_and_adapters_reach_all_ranks_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """50 requests at random, a third cancelled midway, two adapters, an idle time longer than a collective may take.

    Every rank was told the same in the same order. What they answered is what one rank alone answers when it is told
    the same. What was cancelled is freed everywhere.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
    model, out = tmp_path / "model", tmp_path / "found"
    model.mkdir()
    subprocess.run([sys.executable, MAKE_TINY, model], check=True, capture_output=True, timeout=100)
    with Job(tmp_path, [serving.__file__, str(model), str(out), str(SEED)], ranks=RANKS) as job:
        assert job.finish(110.0) == 0, job.output
        wait_for_none_left(5.0)
    found: dict[str, Any] = json.loads(out.read_text())
    record_property("largest_gap_ms", round(found["largest_gap_s"] * 1e3, 1))
    record_property("steps", found["steps"])

    reasons = [answer["reason"] for answer in found["answers"]]
    assert len(reasons) == serving.REQUESTS
    assert reasons.count("abort") == serving.CANCELLED
    assert all(answer["tokens"] for answer in found["answers"])
    assert [entry[1] for entry in found["log"] if entry[0] == "adapter"] == [name for name, _ in serving.CHANGES]

    assert found["idle_s"] > serving.COLLECTIVE_TIMEOUT_S
    assert len(found["last"]["tokens"]) == 8
    assert found["ok"]
    for ranks in (found["ranks"], found["ranks_at_the_end"]):
        assert ranks == [ranks[0]] * RANKS, "the ranks were not told the same"
    assert found["ranks_at_the_end"][0][0] == found["steps"]
    assert found["cached"] == found["cached_at_the_end"] == [{}] * RANKS, "what has ended is not freed everywhere"

    options = {"model": str(model), "max_sequences": serving.MAX_RUNNING, "max_sequence_length": serving.MAX_LENGTH}
    config = ExecutorConfig(worker=f"{serving.__file__}:AdaptedLM", worker_options=options, backend="uni", world_size=1)
    with Executor(config) as alone:
        for kind, told, *answer in found["log"]:
            if kind == "adapter":
                alone.call("set_adapter", told)
            else:
                assert alone.step(msgpack.unpackb(bytes.fromhex(told), strict_map_key=False)) == answer[0]
        assert alone.call("record") == found["ranks_at_the_end"][:1]
