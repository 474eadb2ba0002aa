"""The measurement: peers interleaved in rounds, each turn timed step by step, every wait bounded."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.limits import IDLE_LIMIT_S, START_LIMIT_S, STOP_LIMIT_S, ProcessHandle, time_limit, turn_limit_s
from benchmarks.peer import PEERS, Payload, Peer, PeerError, decode_step

BASELINE = "plain_zmq"
"""The peer that ratios are taken to."""

_SETTLE_S = 0.5

Progress = Callable[[str, int], None]
"""Called between turns with what comes next and the turns done since the last call."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one run measures.

    Attributes:
        peers: names of the peers.
        ranks: world sizes.
        rounds: times that every peer has its turn, for each world size.
        steps: timed steps in a turn.
        warmup: steps before them that are not timed, at least one.
        payload_bytes: bytes of the encoded step.
        idle_s: seconds for which the idle workers' CPU is measured; 0 for not at all.
        seed: of the payload and of the order in each round.
    """

    peers: tuple[str, ...]
    ranks: tuple[int, ...] = (1, 2, 4)
    rounds: int = 30
    steps: int = 1_000
    warmup: int = 50
    payload_bytes: int = 1_400
    idle_s: float = 6.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One peer's steps in one round.

    Attributes:
        samples_ns: the round trip of each step.
        wall_ns: from the first step's beginning to the last one's end.
        cpu_ns: CPU of the driver and the workers in that time.
    """

    samples_ns: array[int]
    wall_ns: int
    cpu_ns: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a peer dropped out.

    Attributes:
        phase: what it was doing.
        error: the last line of the traceback.
        traceback: all of it.
    """

    phase: str
    error: str
    traceback: str


@dataclass(kw_only=True)
class Outcome:
    """What one peer did at one world size.

    Attributes:
        peer: its name.
        world_size: the ranks it had.
        turns: one per round, as far as it came.
        idle_core_fractions: for each worker, the part of a core that it used while idle.
        failure: None if it did all of its turns.
    """

    peer: str
    world_size: int
    turns: list[Turn] = field(default_factory=list)
    idle_core_fractions: tuple[float, ...] = ()
    failure: Failure | None = None


def measure(settings: Settings, progress: Progress = lambda _text, _turns: None) -> list[Outcome]:
    """Measure every peer at every world size.

    Args:
        settings: what to measure.
        progress: told what comes next, between turns only.

    Returns:
        An outcome per world size and peer, failed ones included.
    """
    payload = decode_step(settings.payload_bytes, settings.seed)
    outcomes: list[Outcome] = []
    for world_size in settings.ranks:
        outcomes += _at_world_size(world_size, payload, settings, progress)
    return outcomes


def _at_world_size(world_size: int, payload: Payload, settings: Settings, progress: Progress) -> list[Outcome]:
    entries = [_Entry(name, world_size) for name in settings.peers]
    order = random.Random(settings.seed + world_size)
    try:
        for entry in entries:
            progress(f"ranks {world_size}: starting {entry.outcome.peer}", 0)
            entry.start()
        for number in range(settings.rounds):
            for entry in order.sample(entries, len(entries)):
                progress(f"ranks {world_size}, round {number + 1}: {entry.outcome.peer}", 0)
                entry.turn(number, payload, settings)
                progress("", 1)
        if settings.idle_s:
            progress(f"ranks {world_size}: idle", 0)
            _measure_idle(entries, settings.idle_s)
            progress("", 1)
    finally:
        for entry in entries:
            entry.stop()
    return [entry.outcome for entry in entries]


def _measure_idle(entries: list[_Entry], idle_s: float) -> None:
    """Let all peers be idle at once, and see what their workers use."""
    time.sleep(_SETTLE_S)
    for entry in entries:
        entry.begin_idle()
    time.sleep(idle_s)
    for entry in entries:
        entry.end_idle()


class _Entry:
    """A peer at one world size: after its first failure it is stopped and takes no more turns."""

    def __init__(self, name: str, world_size: int) -> None:
        self.outcome = Outcome(peer=name, world_size=world_size)
        self._peer: Peer | None = None
        self._workers: list[ProcessHandle] = []
        self._idle_from: tuple[int, list[int]] = (0, [])

    def start(self) -> None:
        """Start its workers."""
        self._bounded("starting", START_LIMIT_S, self._start)

    def turn(self, number: int, payload: Payload, settings: Settings) -> None:
        """Warm up and time one round's steps."""
        peer = self._peer
        if peer is not None:
            limit_s = turn_limit_s(settings.warmup + settings.steps)
            self._bounded(f"round {number + 1}", limit_s, lambda: self._turn(peer, payload, settings))

    def begin_idle(self) -> None:
        """Read the workers' clocks at the start of the idle time."""
        if self._peer is not None:
            self._bounded("idle", IDLE_LIMIT_S, self._begin_idle)

    def end_idle(self) -> None:
        """Read the workers' clocks again."""
        if self._peer is not None:
            self._bounded("idle", IDLE_LIMIT_S, self._end_idle)

    def stop(self) -> None:
        """Stop its workers, and kill those that stay."""
        peer, self._peer = self._peer, None
        if peer is None:
            return
        try:
            self._bounded("stopping", STOP_LIMIT_S, peer.stop)
        finally:
            for worker in self._workers:
                worker.end()

    def _start(self) -> None:
        peer = self._peer = PEERS[self.outcome.peer]()
        try:
            peer.start(self.outcome.world_size)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to show
                self._hold_workers(peer)
            raise
        self._hold_workers(peer)

    def _hold_workers(self, peer: Peer) -> None:
        for pid in peer.pids():
            self._workers.append(ProcessHandle(pid))

    def _turn(self, peer: Peer, payload: Payload, settings: Settings) -> None:
        for _ in range(max(1, settings.warmup)):
            answers = peer.step(payload)
        if answers != [payload] * self.outcome.world_size:
            raise PeerError(
                f"expected the step back from every rank, {self.outcome.world_size} times; got something else"
            )
        self.outcome.turns.append(self._timed(peer, payload, settings.steps))

    def _timed(self, peer: Peer, payload: Payload, steps: int) -> Turn:
        samples = array("q", bytes(8 * steps))
        step, clock = peer.step, time.perf_counter_ns
        workers_before, driver_before, first = sum(self._cpu_ns()), time.process_time_ns(), clock()
        for index in range(steps):
            began = clock()
            step(payload)
            samples[index] = clock() - began
        wall, driver = clock() - first, time.process_time_ns() - driver_before
        return Turn(samples_ns=samples, wall_ns=wall, cpu_ns=driver + sum(self._cpu_ns()) - workers_before)

    def _cpu_ns(self) -> list[int]:
        return [worker.cpu_ns() for worker in self._workers]

    def _begin_idle(self) -> None:
        self._idle_from = (time.perf_counter_ns(), self._cpu_ns())

    def _end_idle(self) -> None:
        began, before = self._idle_from
        elapsed = time.perf_counter_ns() - began
        used = [after - earlier for earlier, after in zip(before, self._cpu_ns(), strict=True)]
        self.outcome.idle_core_fractions = tuple(cpu / elapsed for cpu in used)

    def _bounded(self, phase: str, limit_s: float, action: Callable[[], None]) -> None:
        """Run a part of the peer's life: an exception in it is the peer's failure, not the run's."""
        try:
            with time_limit(limit_s, f"{self.outcome.peer}, {phase},"):
                action()
        except Exception as error:  # noqa: BLE001 - recorded whatever it is
            self._fail(phase, error)
            self.stop()

    def _fail(self, phase: str, error: Exception) -> None:
        if self.outcome.failure is None:
            text = "".join(traceback.format_exception(error)).strip()
            self.outcome.failure = Failure(phase=phase, error=text.splitlines()[-1], traceback=text)
