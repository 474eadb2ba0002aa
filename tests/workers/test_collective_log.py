"""What the loop thread notes of its collectives."""

from __future__ import annotations

import threading

from stepcast.bus.liveness import Phase
from stepcast.bus.tally import CODE_OF, roll, signature
from stepcast.workers.board import NO_COLLECTIVES, Board
from stepcast.workers.collective_log import CollectiveLog


def test_a_collective_is_counted_and_told_with_its_message() -> None:
    board = Board()
    log = CollectiveLog(board)
    board.moment = (Phase.STEP, 1, 7, 3)
    log.enter("all_reduce", "torch.float32", 4, "RedOpType.SUM")
    log.enter("barrier")
    first = roll(0, signature("all_reduce float32[4] SUM"), CODE_OF["all_reduce"])
    second = roll(first, signature("barrier"), CODE_OF["barrier"])
    assert board.tally == (0, 2, second)
    assert board.collectives(7) == [(2, second, "barrier"), (1, first, "all_reduce float32[4] SUM")]
    assert board.collectives(8) == []


def test_while_it_waits_the_rank_is_in_the_phase_collective() -> None:
    board = Board()
    log = CollectiveLog(board)
    board.moment = (Phase.STEP, 1, 7, 3)
    before = log.begin_wait()
    status = board.status
    assert (status.phase, status.sequence, status.step) == (Phase.COLLECTIVE, 7, 3)
    log.end_wait(before)
    assert board.moment == (Phase.STEP, 1, 7, 3)
    assert board.tally[0] > 0


def test_another_threads_collectives_are_left_out() -> None:
    board = Board()
    log = CollectiveLog(board)

    def enter() -> None:
        log.enter("barrier")
        log.end_wait(log.begin_wait())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert board.tally == NO_COLLECTIVES
    assert not board.trail
