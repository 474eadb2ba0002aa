"""Workers that tell where they are and fail there, by `signs`."""

from __future__ import annotations

import atexit
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from stepcast import RankInfo, Worker
from stepcast.bus import subscriber

sys.path.append(str(Path(__file__).parent))  # loaded by its path: its folder is not known yet
import signs

signs.reach("importing")


class Victim(Worker):
    """Echoes; on the ranks that a step names, `{rank: word}`, it does what the word says. A list is for every rank."""

    def setup(self, rank: RankInfo) -> None:
        self.info = rank
        self.directory = rank.options["dir"]
        signs.reach("loading")
        atexit.register(signs.note, self.directory, f"atexit-{rank.rank}")

    def execute(self, step: Any) -> Any:
        if isinstance(step, list):
            [word] = step
        elif isinstance(step, dict):
            word = step.get(str(self.info.rank))
        else:
            return step
        if word is not None:
            signs.note(self.directory, f"{word}-{self.info.rank}")
            return self.act(word)
        return self.info.rank

    def act(self, word: str) -> Any:
        return signs.ACTIONS[word]({"dir": self.directory}, "step", self.info.rank)

    def teardown(self) -> None:
        signs.reach("stopping")

    def fork_a_child(self) -> int:
        if self.info.rank != 1:
            return 0
        pid = os.fork()
        if pid == 0:
            signs.block()
            os._exit(0)
        return pid


class Impatient(Worker):
    """Does not wait for a connection that has ended as long as others do."""

    def setup(self, rank: RankInfo) -> None:
        subscriber.RECONNECT_TIMEOUT_S = 0.2

    def execute(self, step: Any) -> Any:
        return step


class Torch(Victim):
    """A victim with a gloo process group."""

    def setup(self, rank: RankInfo) -> None:
        from stepcast.workers.process_group import init_process_group  # noqa: PLC0415 - torch, for this one alone

        super().setup(rank)
        init_process_group(rank)

    def act(self, word: str) -> Any:
        if word != "collective":
            return super().act(word)
        import torch  # noqa: PLC0415

        tensor = torch.ones(1)
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    def teardown(self) -> None:
        from stepcast.workers.process_group import destroy_process_group  # noqa: PLC0415

        super().teardown()
        destroy_process_group()


class Checksum(Worker):
    """Answers a step, which is an array of bytes, with the count of steps so far, its length and its checksum."""

    def setup(self, rank: RankInfo) -> None:
        self.count = 0

    def execute(self, step: Any) -> list[int]:
        self.count += 1
        return [self.count, step.nbytes, zlib.crc32(step)]


class Spinner(Worker):
    """A step is a number of seconds of its processor's time that each rank uses up."""

    def execute(self, step: float) -> None:
        until = time.thread_time() + step
        while time.thread_time() < until:
            pass
