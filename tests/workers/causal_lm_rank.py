"""One rank of a `CausalLM`, driven by lines of JSON on stdin: `causal_lm_rank.py RANK WORLD_SIZE RENDEZVOUS OPTIONS`.

Run by test_causal_lm.py; ends when stdin does, so that it never outlives the tests.
"""

from __future__ import annotations

import json
import os
import sys

from stepcast.workers.base import RankInfo
from stepcast.workers.causal_lm import CausalLM


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not stand between the answers
    rank, world_size, rendezvous, options = sys.argv[1:]
    worker = CausalLM()
    worker.setup(
        RankInfo(
            rank=int(rank),
            local_rank=int(rank),
            local_world_size=int(world_size),
            world_size=int(world_size),
            epoch=1,
            output_rank=0,
            device="cpu",
            rendezvous=rendezvous,
            collective_timeout_s=60.0,
            options=json.loads(options),
        )
    )
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(worker, method)(*arguments)}
        except Exception as error:  # noqa: BLE001 - the tests judge it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    worker.teardown()


if __name__ == "__main__":
    main()
