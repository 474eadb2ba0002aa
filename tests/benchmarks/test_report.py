"""What a run says about known samples."""

from __future__ import annotations

from array import array

import pytest
from rich.console import Console

from benchmarks.measure import Failure, Outcome, Settings, Turn
from benchmarks.report import document, failures, percentiles_us, round_ratio, summaries, summarise, table

SETTINGS = Settings(peers=("plain_zmq", "pipe"), rounds=3, steps=4)


def _turn(*samples_us: float, cpu_us: float = 0.0) -> Turn:
    samples = array("q", (int(sample * 1_000) for sample in samples_us))
    return Turn(samples_ns=samples, wall_ns=sum(samples), cpu_ns=int(cpu_us * 1_000))


def _outcome(peer: str, *p50s_us: float, world_size: int = 2) -> Outcome:
    turns = [_turn(p50, p50, p50, p50) for p50 in p50s_us]
    return Outcome(peer=peer, world_size=world_size, turns=turns)


def _failed(peer: str, *, reason: str = "OSError: [Errno 24] too many") -> Outcome:
    failure = Failure(phase="round 2", error=reason, traceback=f"Traceback\n{reason}")
    return Outcome(peer=peer, world_size=2, turns=[_turn(1.0)], failure=failure)


def _text(outcomes: list[Outcome]) -> str:
    console = Console(width=100, record=True, quiet=False, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table(outcomes, SETTINGS))
    return captured.get()


class TestPercentiles:
    def test_known_data(self) -> None:
        """1 to 1001 us have their 50th, 99th and 99.9th percentile at 501, 991 and 1000 us."""
        samples = [us * 1_000 for us in range(1001, 0, -1)]

        assert percentiles_us(samples) == pytest.approx((501.0, 991.0, 1000.0))

    def test_between_two_samples(self) -> None:
        """A percentile between two samples lies on the line between them."""
        p50, _, _ = percentiles_us([1_000, 2_000])

        assert p50 == pytest.approx(1.5)

    def test_one_sample(self) -> None:
        """One sample is every percentile."""
        assert percentiles_us([7_000]) == (7.0, 7.0, 7.0)


class TestRatio:
    def test_is_taken_per_round(self) -> None:
        """A machine that slows down tenfold in the second round changes no ratio."""
        peer = [_turn(20), _turn(200)]
        baseline = [_turn(40), _turn(400)]

        ratio = round_ratio(peer, baseline)

        assert (ratio.median, ratio.min, ratio.max) == pytest.approx((0.5, 0.5, 0.5))

    def test_has_the_spread_over_rounds(self) -> None:
        """The median, the least and the greatest of the rounds' ratios are kept."""
        peer = [_turn(10), _turn(30), _turn(12)]
        baseline = [_turn(10), _turn(10), _turn(10)]

        ratio = round_ratio(peer, baseline)

        assert (ratio.median, ratio.min, ratio.max) == pytest.approx((1.2, 1.0, 3.0))

    def test_is_to_the_same_world_size(self) -> None:
        """The baseline of another rank count is not taken."""
        outcomes = [_outcome("plain_zmq", 100, world_size=1), _outcome("pipe", 50, world_size=2)]

        assert [summary.ratio is None for _, summary in summaries(outcomes) if summary] == [False, True]

    def test_without_a_baseline(self) -> None:
        """There is no ratio where the baseline failed."""
        summary = summarise(_outcome("pipe", 50, 50), _failed("plain_zmq"))

        assert summary is not None
        assert summary.ratio is None


class TestSummary:
    def test_rate_and_cpu(self) -> None:
        """Steps per second and CPU per step are over all turns."""
        outcome = Outcome(peer="pipe", world_size=1, turns=[_turn(100, 100, cpu_us=30), _turn(300, 300, cpu_us=90)])

        summary = summarise(outcome, None)

        assert summary is not None
        assert summary.steps == 4
        assert summary.steps_per_s == pytest.approx(5_000)
        assert summary.cpu_us_per_step == pytest.approx(30)

    def test_of_a_failed_peer(self) -> None:
        """A failed peer has no summary, even with turns behind it."""
        assert summarise(_failed("pipe"), _outcome("plain_zmq", 1)) is None


class TestFailedPeer:
    def test_in_the_table(self) -> None:
        """The failed peer's row says so, beside the figures of the others."""
        rows = _text([_outcome("plain_zmq", 123.4), _failed("pipe")]).splitlines()

        assert any("plain_zmq" in row and "123.4" in row for row in rows)
        assert any("pipe" in row and "failed" in row for row in rows)

    def test_with_its_reason(self) -> None:
        """The reason is told with the peer, the rank count and the phase."""
        (line,) = failures([_outcome("plain_zmq", 1), _failed("pipe")])

        assert line == "pipe failed (ranks: 2, round 2): OSError: [Errno 24] too many"

    def test_in_the_file(self) -> None:
        """The file keeps the reason, the traceback and the rounds before the failure."""
        result = document([_failed("pipe")], SETTINGS)["results"][0]

        assert result["status"] == "failed"
        assert result["failure"]["error"] == "OSError: [Errno 24] too many"
        assert result["failure"]["traceback"].startswith("Traceback")
        assert result["summary"] is None
        assert len(result["rounds"]) == 1


def test_idle_shows_the_busiest_worker() -> None:
    """The idle column is the greatest of the workers' parts of a core."""
    outcome = _outcome("plain_zmq", 1)
    outcome.idle_core_fractions = (0.001, 0.0042)

    assert "0.42%" in _text([outcome])
