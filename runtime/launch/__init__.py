"""Where the ranks' processes come from: one module for each backend."""

from __future__ import annotations

from stepcast.bus.endpoints import RunDirectory
from stepcast.runtime import platforms
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.state import Life

from .agent import Place
from .launcher import Launcher


def checked(config: ExecutorConfig) -> ExecutorConfig:
    """See that this host can run a group, and choose the device.

    Args:
        config: the settings.

    Returns:
        The settings with the device resolved.

    Raises:
        ConfigError: the group can't run here.
    """
    backend = config.resolved_backend
    here = config.world_size
    if backend == "torchrun":
        # The other ranks' devices are theirs to look for: --virtual-local-rank hides them from this process.
        here = Place.of_this_process().local_rank + 1
        config = config.replace(watch_parent=True)  # torchrun's agent: nobody else would end its ranks when it dies
    if backend == "ray" and config.device != platforms.AUTO:
        kind = platforms.kind_named(config.device)  # of which Ray's nodes have some, if not this host
    else:
        kind = platforms.resolve(config.device, here)
    platforms.check_start_method(kind, config.start_method)
    return config.replace(device=kind.name, backend=backend)


def make_launcher(config: ExecutorConfig, directory: RunDirectory, life: Life) -> Launcher:
    """Make the launcher for a backend.

    Args:
        config: the settings, as `checked` returns them.
        directory: the run's private directory.
        life: run id and epoch.

    Raises:
        ConfigError: a setting does not fit the backend.
    """
    # Each backend's modules where it is used.
    if config.backend == "torchrun":
        from .torchrun import TorchrunLauncher  # noqa: PLC0415

        return TorchrunLauncher(config, directory, life)
    if config.backend == "ray":
        from .ray import RayLauncher  # noqa: PLC0415

        return RayLauncher(config, directory, life)
    from .mp import MpLauncher  # noqa: PLC0415

    return MpLauncher(config, directory, life)
