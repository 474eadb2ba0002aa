"""When an idle group publishes KEEPALIVE. Pure: counts heartbeats, and reads no clock."""

from __future__ import annotations


class KeepalivePacer:
    """Decides, heartbeat by heartbeat.

    A heartbeat is published after an interval without any publication, so the heartbeats since the last message tell
    how long the ranks have been parked.

    Args:
        every: heartbeat intervals of silence after which a KEEPALIVE is due; None for never.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._sequence = -1
        self._silent = 0

    def heartbeat(self, sequence: int, in_flight: int) -> bool:
        """Note that a heartbeat is due.

        Args:
            sequence: the highest sequence number published.
            in_flight: messages that some rank has not answered: while there is one, another would only wait behind it.

        Returns:
            Whether a KEEPALIVE is due in its place.
        """
        if sequence != self._sequence:
            self._sequence = sequence
            self._silent = 0
        self._silent += 1
        return self._every is not None and self._silent >= self._every and in_flight == 0
