"""A tensor-parallel causal language model, with continuous batching scheduled by the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcast.bus.errors import ConfigError

from .attention import KVCache, Span
from .base import RankInfo, Worker
from .causal_lm_step import Limits, Sampling, SequenceId, Step, check_step
from .model_config import check_world_size, read_model_config, sequence_limit
from .packed_model import PackedModel
from .process_group import destroy_process_group, init_process_group
from .sampling import sample


@dataclass(frozen=True, kw_only=True)
class CausalLMOptions:
    """`RankInfo.options` of a `CausalLM`.

    Attributes:
        model: a Hugging Face model directory, as `stepcast.runtime.checkpoint.resolve_model` returns it.
        dtype: the weights' type, by torch's name for it.
        max_sequences: the most sequences held at once.
        max_sequence_length: the most tokens in a sequence, prompt and answer together; at most, and by default, the
            model's own limit.
    """

    model: str
    dtype: str = "float32"
    max_sequences: int = 64
    max_sequence_length: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> CausalLMOptions:
        """Check options as they came with the rank.

        Args:
            options: by name.

        Raises:
            ConfigError: one is missing, unknown, or of the wrong type.
        """
        try:
            parsed = cls(**options)
        except TypeError as error:
            what = str(error).removeprefix(f"{cls.__name__}.__init__() ")
            raise ConfigError(f"worker_options of CausalLM: {what}") from error
        for name in ("model", "dtype"):
            if not isinstance(getattr(parsed, name), str):
                raise ConfigError(f"worker_options of CausalLM: {name} must be a string")
        for name in ("max_sequences", "max_sequence_length"):
            value = getattr(parsed, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"worker_options of CausalLM: {name} must be a positive integer, not {value!r}")
        return parsed


@dataclass(frozen=True)
class _Sequence:
    sampling: Sampling
    cache: KVCache


class CausalLM(Worker):
    """Computes a causal language model's steps on this rank's shard.

    `causal_lm_step` describes the steps. Each is one forward: the prompts of its new sequences and the newest tokens of
    its running ones, packed. Only the output rank samples, since the driver's next step brings the token to the others;
    so no token crosses between ranks, and no rank can disagree with another about one.

    Raises (in `setup`):
        ConfigError: the options are wrong, or the model can't be run, or not by this many ranks.
    """

    def setup(self, rank: RankInfo) -> None:
        """Join the process group, where there is more than one rank, and load this rank's shard.

        Args:
            rank: its `options` are those of `CausalLMOptions`.

        Raises:
            ConfigError: an option is wrong, or the model is not supported, or not at this world size.
        """
        options = CausalLMOptions.parse(rank.options)
        directory = Path(options.model)
        config = read_model_config(directory)
        check_world_size(config, rank.world_size)
        max_length = sequence_limit(config)
        self._samples = rank.rank == rank.output_rank
        self._sequences: dict[SequenceId, _Sequence] = {}
        if rank.world_size > 1:
            init_process_group(rank)  # before the weights: loading shards them over the group
        self._model = PackedModel(
            directory, config, dtype=options.dtype, device=rank.device, world_size=rank.world_size
        )
        self._limits = Limits(
            vocab_size=self._model.vocab_size,
            max_sequences=options.max_sequences,
            max_sequence_length=min(options.max_sequence_length or max_length, max_length),
        )

    def execute(self, step: Any) -> dict[str, Any] | None:
        """Compute one step.

        Args:
            step: a payload as `causal_lm_step` describes it.

        Returns:
            On the output rank a new token for each sequence in the step, as `causal_lm_step` describes; elsewhere None.

        Raises:
            ValueError: the step is malformed or does not fit what this rank holds; raised on every rank alike, before
                any collective, and with nothing changed.
        """
        plan = Step.from_payload(step)
        check_step(plan, self.cached_tokens(), self._limits)
        for id in plan.release:
            self.abort(id)
        limit = self._limits.max_sequence_length
        batch = [(new.id, _Sequence(new.sampling, KVCache(limit)), new.tokens) for new in plan.admit]
        batch += [(going.id, self._sequences[going.id], [going.token]) for going in plan.decode]
        logits = self._model.forward([Span(sequence.cache, tokens) for _, sequence, tokens in batch]) if batch else ()
        for id, sequence, tokens in batch:  # only now does what was written count
            sequence.cache.length += len(tokens)
            self._sequences[id] = sequence
        if not self._samples:
            return None
        return {
            "tokens": [
                [id, sample(row.numpy(), sequence.sampling, sequence.cache.length)]
                for row, (id, sequence, _) in zip(logits, batch, strict=True)
            ]
        }

    def abort(self, request_id: SequenceId) -> None:
        """Forget a sequence and free its cache.

        Args:
            request_id: the sequence; one that is not held is no error, for it may have ended by itself.
        """
        self._sequences.pop(request_id, None)

    def cached_tokens(self) -> dict[SequenceId, int]:
        """Return how many tokens of each sequence this rank has cached. To be reached by `Executor.call`, too."""
        return {id: sequence.cache.length for id, sequence in self._sequences.items()}

    def teardown(self) -> None:
        """Free the model and leave the process group."""
        self._sequences.clear()
        del self._model
        destroy_process_group()
