"""A front end on asyncio, run by torchrun as each rank: `serving.py MODEL OUT SEED`. Rank 0's process is the front end.

Requests arrive at random, some are cancelled midway, and an adapter is changed twice, all while steps are under way.
What was done, in order, and what came of it goes to the file OUT.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import msgpack

from stepcast import AsyncExecutor, ExecutorConfig, RankInfo
from stepcast.runtime.generation import SamplingParams, Scheduler, Tokenizer
from stepcast.workers.causal_lm import CausalLM

REQUESTS = 50
CANCELLED = REQUESTS // 3
#: Adapters, and the share of all requests that have arrived when each is set.
CHANGES = (("loud", 0.3), ("inverse", 0.7))
MAX_RUNNING, MAX_LENGTH = 8, 128
COLLECTIVE_TIMEOUT_S = 6.0
_ARRIVALS_S = 0.02
_TICK_S = 0.001
_MEET_S = 60.0


def meet(directory: Path, rank: RankInfo) -> None:
    """Wait until every rank has come here."""
    notes = [directory / f"here-{each}" for each in range(rank.world_size)]
    notes[rank.rank].touch()
    deadline = time.monotonic() + _MEET_S
    while not all(note.exists() for note in notes):
        if time.monotonic() > deadline:
            raise TimeoutError("a rank has not come")
        time.sleep(_TICK_S)


class AdaptedLM(CausalLM):
    """A model with adapters, which change what every rank's shard computes; and a record of all that it was told."""

    FACTORS: ClassVar = {None: 1.0, "loud": 3.0, "inverse": -1.0}

    def setup(self, rank: RankInfo) -> None:
        # The limit of a collective holds for their meeting too, and imports may be further apart on a busy machine.
        import stepcast.workers.packed_model  # noqa: F401, PLC0415

        meet(Path(rank.options["model"]), rank)
        super().setup(rank)
        self.told = hashlib.sha256()
        self.steps = 0
        self.factor = 1.0

    def execute(self, step: Any) -> Any:
        self.steps += 1
        self.told.update(msgpack.packb(step))
        return super().execute(step)

    def set_adapter(self, name: str | None) -> None:
        import torch  # noqa: PLC0415

        factor = self.FACTORS[name]
        self.told.update(msgpack.packb(name))
        with torch.no_grad():
            for layer, weight in self._model._model.named_parameters():
                if "o_proj" in layer:
                    weight.mul_(factor / self.factor)
        self.factor = factor

    def record(self) -> list[Any]:
        return [self.steps, self.told.hexdigest(), self.factor, len(self.cached_tokens())]


class FrontEnd:
    """Takes requests as they come, and turns the crank while there is one."""

    def __init__(self, executor: AsyncExecutor, tokenizer: Tokenizer) -> None:
        self.executor = executor
        self.scheduler = Scheduler(tokenizer, max_running=MAX_RUNNING, max_sequence_length=MAX_LENGTH)
        self.events: dict[int, asyncio.Queue[Any]] = {}
        self.log: list[Any] = []
        self._wanted: list[str] = []
        self._work = asyncio.Event()
        self.idle = asyncio.Event()

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        request = self.scheduler.add(prompt, params)
        self.events[request] = asyncio.Queue()
        self._work.set()
        return request

    def cancel(self, request: int) -> None:
        """End a request now; the next step frees it on every rank."""
        event = self.scheduler.abort(request)
        if event is not None:
            self.events[request].put_nowait(event)
            self._work.set()

    def change_adapter(self, name: str) -> None:
        """Have an adapter set between two steps."""
        self._wanted.append(name)
        self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            self.idle.clear()
            while self._wanted or self.scheduler.has_work:
                if self._wanted:
                    name = self._wanted.pop(0)
                    await self.executor.call("set_adapter", name)
                    self.log.append(["adapter", name])
                    continue
                step = self.scheduler.build_step()
                result = await self.executor.step(step)
                self.log.append(["step", msgpack.packb(step).hex(), result])
                for event in self.scheduler.consume(result):
                    self.events[event.request_id].put_nowait(event)
            self.idle.set()


async def client(front_end: FrontEnd, prompt: list[int], tokens: int, cancel_after: int | None) -> dict[str, Any]:
    """Ask, read the answer as it comes, and leave midway where that is wanted."""
    request = front_end.add(prompt, SamplingParams(max_tokens=tokens))
    answer: list[int] = []
    while True:
        event = await front_end.events[request].get()
        if event.token_id is not None:
            answer.append(event.token_id)
        if event.finish_reason is not None:
            return {"request": request, "tokens": answer, "reason": event.finish_reason}
        if len(answer) == cancel_after:
            front_end.cancel(request)


async def tick(gaps: list[float]) -> None:
    """Note how late this loop wakes whoever sleeps."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        gaps.append(time.perf_counter() - began - _TICK_S)


async def serve(model: str, draw: random.Random) -> dict[str, Any]:
    """Serve all requests, idle for longer than any collective may take, and serve one more."""
    config = ExecutorConfig(
        worker=f"{__file__}:AdaptedLM",
        worker_options={"model": model, "max_sequences": MAX_RUNNING, "max_sequence_length": MAX_LENGTH},
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        heartbeat_interval_s=0.5,
    )
    async with AsyncExecutor(config) as executor:
        front_end, gaps = FrontEnd(executor, Tokenizer(Path(model))), []
        background = [asyncio.create_task(front_end.run()), asyncio.create_task(tick(gaps))]
        cancelled = set(draw.sample(range(REQUESTS), CANCELLED))
        changes = {int(share * REQUESTS): name for name, share in CHANGES}
        clients = []
        for number in range(REQUESTS):
            await asyncio.sleep(draw.expovariate(1 / _ARRIVALS_S))
            if number in changes:
                front_end.change_adapter(changes[number])
            prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 24))]
            cancel_after = draw.randrange(1, 6) if number in cancelled else None
            clients.append(asyncio.create_task(client(front_end, prompt, draw.randrange(8, 20), cancel_after)))
        answers = await asyncio.gather(*clients)
        await front_end.idle.wait()  # what has ended is freed by a step of its own
        busy = {"cached": await executor.call("cached_tokens"), "ranks": await executor.call("record")}
        idle_from = time.monotonic()
        await asyncio.sleep(COLLECTIVE_TIMEOUT_S + 1.0)
        idle_s = time.monotonic() - idle_from
        last = await client(front_end, [1, 2, 3], 8, None)
        await front_end.idle.wait()
        for task in background:
            task.cancel()
        return {
            "answers": answers,
            "last": last,
            "idle_s": idle_s,
            **busy,
            "ranks_at_the_end": await executor.call("record"),
            "cached_at_the_end": await executor.call("cached_tokens"),
            "ok": executor.health().ok,
            "log": front_end.log,
            "largest_gap_s": max(gaps),
            "steps": sum(entry[0] == "step" for entry in front_end.log),
        }


def main() -> None:
    model, out, seed = sys.argv[1:]
    found = asyncio.run(serve(model, random.Random(int(seed))))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
