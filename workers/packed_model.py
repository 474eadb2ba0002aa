"""A Hugging Face causal language model that computes packed batches, whole or as one rank's shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.distributed import DistributedConfig

from stepcast.bus.errors import ConfigError

from .attention import PACKED, KVCache, Span, packed_attention
from .model_config import text_config

transformers.AttentionInterface.register(PACKED, packed_attention)

#: These scale positions by the longest sequence of a batch, so that a sequence's tokens would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


class PackedModel:
    """The model, loaded from a directory; never from the network.

    With more than one rank the weights are sharded by transformers' own tensor-parallel plan for the model, each rank
    reading only its part of the files, and the logits are gathered on every rank. The default process group must be up.

    Args:
        directory: a Hugging Face model directory with safetensors.
        config: the contents of its config.json.
        dtype: a torch floating-point type's name, such as "float32".
        device: where to compute.
        world_size: ranks that share the model.

    Attributes:
        vocab_size: tokens in the vocabulary.

    Raises:
        ConfigError: the model, or the device, is of a kind that isn't supported.
    """

    def __init__(self, directory: Path, config: dict[str, Any], *, dtype: str, device: str, world_size: int) -> None:
        _refuse_unsupported(config)
        self._device = torch.device(device)
        sharding: dict[str, Any] = {}
        if world_size > 1:
            _check_accelerator(self._device)
            sharding["distributed_config"] = DistributedConfig(tp_size=world_size, tp_plan="auto")
        transformers.utils.logging.disable_progress_bar()  # a rank's stderr is for what went wrong
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=_floating_dtype(dtype),
            attn_implementation=PACKED,
            local_files_only=True,
            trust_remote_code=False,
            **sharding,
        )
        self._model: Any = (model if sharding else model.to(self._device)).eval()
        self.vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self._warm_up()

    @torch.no_grad()
    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Compute a packed batch. Writes the spans' caches, but leaves it to the caller to make the writes count.

        Args:
            spans: the sequences with their new tokens, at least one.

        Returns:
            The logits that follow each span's last token: (spans, vocabulary), float32, on the CPU.
        """
        tokens = [token for span in spans for token in span.tokens]
        positions = [span.cache.length + index for span in spans for index in range(len(span.tokens))]
        lengths = torch.tensor([len(span.tokens) for span in spans], device=self._device)
        output = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            logits_to_keep=lengths.cumsum(0) - 1,
            use_cache=False,  # transformers' cache: ours is in the spans
            spans=spans,
        )
        logits: Tensor = output.logits[0].float().cpu()
        return logits

    def _warm_up(self) -> None:
        """Compute one token, so that an unsupported model fails at start, and connections between ranks are made."""
        cache = KVCache(limit=1)
        self.forward([Span(cache, [0])])
        layers = self._model.config.get_text_config().num_hidden_layers
        if cache.num_layers != layers:
            raise ConfigError(
                f"{type(self._model).__name__} is not supported: {cache.num_layers} of its {layers} layers use "
                "transformers' attention interface, and CausalLM packs sequences through that alone"
            )


def _floating_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a torch floating-point type such as 'float32' or 'bfloat16', not {name!r}")
    return dtype


def _refuse_unsupported(config: dict[str, Any]) -> None:
    rope = text_config(config).get("rope_parameters") or text_config(config).get("rope_scaling") or {}
    if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
        raise ConfigError(f"the model's rope_type {rope['rope_type']!r} is not supported by CausalLM")


def _check_accelerator(device: torch.device) -> None:
    # transformers shards onto whatever accelerator torch finds, and takes no word on it.
    found = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if found.type != device.type:
        raise ConfigError(
            f"the rank's device is {device}, but transformers would place its shard on {found.type}: "
            f"hide the {found.type} devices from the workers, or run on them"
        )
