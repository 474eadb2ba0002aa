"""The host's processors, with gloo."""

from __future__ import annotations

import os

import torch.distributed as dist

from stepcast.workers.collectives import register_backend

from .device import Device, Memory


class CPU(Device):
    """A share in the host's processors. Where collectives are checked, each is counted."""

    backend = "gloo"
    waits_for_peers = False

    def bind(self) -> None:
        """As `Device.bind`; there is nothing to bind."""

    def join(self) -> None:
        """As `Device.join`. gloo makes its connections at once."""
        log = self.rank.collective_log
        backend = self.backend if log is None else register_backend(log, self.rank.world_size)
        dist.init_process_group(backend, **self.meeting())

    def synchronize(self) -> None:
        """As `Device.synchronize`; work is done when its call returns."""

    def memory(self) -> Memory:
        """As `Device.memory`; that of the host."""
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)
