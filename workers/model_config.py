"""What a model's config.json says about how it can be run. Needs no torch: the driver asks before it starts a rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepcast.bus.errors import ConfigError

#: What tensor parallelism deals out in equal parts. A vocabulary need not divide: the last part is shorter.
_SHARDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def read_model_config(directory: Path) -> dict[str, Any]:
    """Read a model directory's config.json.

    Args:
        directory: a Hugging Face model directory.

    Returns:
        The config, as it stands there.

    Raises:
        ConfigError: there is no such file, or it holds no JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{directory} is no Hugging Face model directory: config.json: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(config).__name__}")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config: multimodal models nest it.

    Args:
        config: the contents of config.json.
    """
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def supported_world_sizes(config: Mapping[str, Any]) -> list[int]:
    """Return the world sizes whose ranks get equal shards of the model.

    Args:
        config: the contents of config.json.

    Returns:
        Every size that divides the attention heads, the key-value heads and the intermediate size; 1 always is.
    """
    text = text_config(config)
    sizes = [text[name] for name in _SHARDED if isinstance(text.get(name), int) and text[name] > 0]
    common = math.gcd(*sizes) or 1  # the gcd of nothing is 0: such a model can't be sharded
    # More ranks than heads never divide them, so nothing above the gcd needs a look.
    return [size for size in range(1, common + 1) if common % size == 0]


def check_world_size(config: Mapping[str, Any], world_size: int) -> None:
    """Refuse a world size that the model's shape does not divide into.

    Args:
        config: the contents of config.json.
        world_size: ranks in the group.

    Raises:
        ConfigError: names the sizes that fit.
    """
    allowed = supported_world_sizes(config)
    if world_size in allowed:
        return
    text = text_config(config)
    shape = ", ".join(f"{name} {text[name]}" for name in _SHARDED if text.get(name) is not None)
    raise ConfigError(
        f"world_size {world_size} does not divide the model's shape ({shape}); "
        f"use one of {', '.join(map(str, allowed))}"
    )


def sequence_limit(config: Mapping[str, Any]) -> int:
    """Return the most tokens that a sequence of the model can have.

    Args:
        config: the contents of config.json.

    Raises:
        ConfigError: the config does not say.
    """
    limit = text_config(config).get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"config.json must give max_position_embeddings, a positive integer, not {limit!r}")
    return limit
