"""Attention over a packed batch: the new tokens of many sequences in one row, each with its own key-value cache.

Packing has no padding: a step's prompts and single tokens, of any lengths, go through the model's linear layers side by
side as one row, and only here is each sequence taken apart again, to attend to itself alone. So a step costs one
forward and one set of collectives, whatever it holds, and a sequence's tokens do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepcast.bus.errors import ConfigError

#: The name by which a model is told to use `packed_attention`.
PACKED = "stepcast_packed"

_INITIAL_CAPACITY = 64


class KVCache:
    """The keys and values of one sequence, for the heads that this rank holds.

    A write only counts once `length` is raised past it: a forward that fails has changed nothing.

    Args:
        limit: the most tokens that the sequence will have.

    Attributes:
        length: tokens of the sequence that are cached.
    """

    def __init__(self, limit: int) -> None:
        self.length = 0
        self._limit = limit
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def num_layers(self) -> int:
        """How many layers have written."""
        return len(self._keys)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the newest tokens' keys and values behind the cached ones.

        Args:
            layer: the layer's index.
            keys: (1, key-value heads, new tokens, head dimension).
            values: the same, for the values.

        Returns:
            The keys and the values of all the sequence's tokens, cached and new: (1, heads, tokens, dimension) each.
        """
        return self._append(self._keys, layer, keys), self._append(self._values, layer, values)

    def _append(self, buffers: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        end = self.length + new.shape[2]
        buffer = buffers.get(layer)
        if buffer is None or buffer.shape[2] < end:
            # Doubling, so that a long answer copies its cache a few times, not at each token.
            capacity = min(max(2 * end, _INITIAL_CAPACITY), self._limit)
            grown = new.new_empty((*new.shape[:2], capacity, new.shape[3]))
            if buffer is not None:
                grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = buffers[layer] = grown
        buffer[:, :, self.length : end] = new
        return buffer[:, :, :end]


@dataclass(frozen=True)
class Span:
    """One sequence's part of a packed batch.

    Attributes:
        cache: the sequence's keys and values.
        tokens: its new tokens' ids: its whole prompt where the cache is empty, else one.
    """

    cache: KVCache
    tokens: Sequence[int]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers passes it
    *,
    spans: Sequence[Span],
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend, sequence by sequence. Registered as transformers' attention function `PACKED`.

    Args:
        module: the attention layer that calls.
        query: (1, heads, tokens of all spans, head dimension).
        key: the same for the key-value heads.
        value: of the same shape as `key`.
        attention_mask: unused; causality follows from each span's place behind its cache.
        spans: the sequences, in the order in which their tokens stand in the row; passed through the model's forward.
        scaling: what the products are multiplied by.
        options: the model's other settings.

    Returns:
        (1, tokens, heads, head dimension), and no weights.

    Raises:
        ConfigError: the model asks for a kind of attention that isn't computed here.
    """
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise ConfigError(f"the model's attention uses {name}, which CausalLM does not support")
    layer: Any = module.layer_idx
    outputs, start = [], 0
    for span in spans:
        part = slice(start, start + len(span.tokens))
        keys, values = span.cache.write(layer, key[:, :, part], value[:, :, part])
        # One token sees all that came before it; a prompt has nothing before it, so plain causality is right.
        is_causal = len(span.tokens) > 1
        outputs.append(
            functional.scaled_dot_product_attention(
                query[:, :, part], keys, values, is_causal=is_causal, scale=scaling, enable_gqa=True
            )
        )
        start = part.stop
    return torch.cat(outputs, dim=2).transpose(1, 2), None
