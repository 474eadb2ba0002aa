"""The step metadata of `CausalLM`: its format, and the check of a step against what a rank holds. Needs no torch.

A step's payload is made of plain MessagePack values:

    {"release": [id, ...],                      sequences to forget: finished or aborted
     "admit": [{"id": id,                       new sequences, whose prompts this step computes
                "tokens": [token, ...],
                "temperature": 0.8, "top_p": 0.95, "seed": 7}, ...],
     "decode": [[id, token, position], ...]}    one more token for each of these sequences

and the output rank answers with one new token for each admitted and each decoded sequence, in that order:

    {"tokens": [[id, token], ...]}

The driver schedules: it says what every step holds. Ranks only compute, so that none has to know why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

#: Names a sequence; the driver's choice.
SequenceId: TypeAlias = int | str

_MAX_SEED = 2**64 - 1
_ADMISSION_KEYS = {"id", "tokens", "temperature", "top_p", "seed"}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sequence's tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token; higher is more varied.
        top_p: with a temperature, only the likeliest tokens that together reach this probability; above 0, up to 1.
        seed: with a temperature, makes the choice reproducible; 0 to 2**64 - 1.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number of at least 0, not {self.temperature!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be a number above 0 and up to 1, not {self.top_p!r}")
        if not (_is_int(self.seed) and 0 <= self.seed <= _MAX_SEED):
            raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, not {self.seed!r}")


@dataclass(frozen=True)
class Admission:
    """A sequence that begins in this step.

    Attributes:
        id: the new sequence.
        tokens: its prompt's token ids, at least one.
        sampling: how its tokens are chosen, in this step and all later ones.
    """

    id: SequenceId
    tokens: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True)
class Decode:
    """A sequence that goes on in this step.

    Attributes:
        id: the sequence.
        token: its newest token's id, which the ranks have not seen yet.
        position: where that token stands in the sequence, from 0: the number of tokens that came before it.
    """

    id: SequenceId
    token: int
    position: int


@dataclass(frozen=True)
class Step:
    """One step of the model: what to forget, what to begin and what to go on with.

    Attributes:
        release: sequences to forget before anything is computed; an id that no rank holds is no error.
        admit: sequences that begin.
        decode: sequences that go on.
    """

    release: Sequence[SequenceId] = ()
    admit: Sequence[Admission] = ()
    decode: Sequence[Decode] = ()

    def to_payload(self) -> dict[str, Any]:
        """Return the step as the plain values that travel."""
        return {
            "release": list(self.release),
            "admit": [
                {
                    "id": new.id,
                    "tokens": list(new.tokens),
                    "temperature": new.sampling.temperature,
                    "top_p": new.sampling.top_p,
                    "seed": new.sampling.seed,
                }
                for new in self.admit
            ],
            "decode": [[going.id, going.token, going.position] for going in self.decode],
        }

    @classmethod
    def from_payload(cls, payload: Any) -> Step:
        """Read a step from the values that traveled.

        Args:
            payload: what `to_payload` made; a key may be missing where its list is empty.

        Raises:
            ValueError: the payload is not of this format.
        """
        if not isinstance(payload, Mapping) or payload.keys() - {"release", "admit", "decode"}:
            raise ValueError("a step must be a mapping with the keys 'release', 'admit' and 'decode' only")
        lists = {key: payload.get(key, ()) for key in ("release", "admit", "decode")}
        for key, value in lists.items():
            if not isinstance(value, list | tuple):
                raise ValueError(f"a step's {key!r} must be a list, not {type(value).__name__}")
        return cls(
            release=[_sequence_id(id) for id in lists["release"]],
            admit=[_admission(entry) for entry in lists["admit"]],
            decode=[_decode(entry) for entry in lists["decode"]],
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a rank can hold.

    Attributes:
        vocab_size: tokens in the vocabulary.
        max_sequences: sequences held at once.
        max_sequence_length: tokens in one sequence, prompt and answer together.
    """

    vocab_size: int
    max_sequences: int
    max_sequence_length: int


def check_step(step: Step, lengths: Mapping[SequenceId, int], limits: Limits) -> None:
    """Check a step against what a rank holds.

    Ranks hold the same sequences and are sent the same step, so all accept it or all raise alike. A rank therefore
    checks the whole step before it computes any of it: after a bad step no rank waits for another in a collective,
    nothing has changed, and the group goes on.

    Args:
        step: the step.
        lengths: the sequences that the rank holds, and how many tokens of each it has computed.
        limits: what the rank can hold.

    Raises:
        ValueError: says what is wrong, with which sequence.
    """
    held = dict(lengths)
    for id in step.release:
        held.pop(id, None)
    seen: set[SequenceId] = set()
    for new in step.admit:
        if new.id in held or new.id in seen:
            raise ValueError(f"sequence {new.id!r} can't be admitted: it is running already")
        seen.add(new.id)
        _check_room(new.id, len(new.tokens), limits)
        _check_tokens(new.id, new.tokens, limits)
    if len(held) + len(step.admit) > limits.max_sequences:
        raise ValueError(
            f"{len(held)} running and {len(step.admit)} new sequences are more than max_sequences "
            f"({limits.max_sequences})"
        )
    for going in step.decode:
        if going.id in seen:
            raise ValueError(f"sequence {going.id!r} stands in the step twice")
        if going.id not in held:
            raise ValueError(f"sequence {going.id!r} is not running: it was never admitted, or it has been released")
        seen.add(going.id)
        if going.position != held[going.id]:
            raise ValueError(
                f"sequence {going.id!r} stands at position {held[going.id]}, but the step says {going.position}"
            )
        _check_room(going.id, going.position + 1, limits)
        _check_tokens(going.id, [going.token], limits)


def _check_room(id: SequenceId, length: int, limits: Limits) -> None:
    if length > limits.max_sequence_length:
        raise ValueError(
            f"sequence {id!r} would have {length} tokens, more than max_sequence_length ({limits.max_sequence_length})"
        )


def _check_tokens(id: SequenceId, tokens: Sequence[int], limits: Limits) -> None:
    for token in tokens:
        if not 0 <= token < limits.vocab_size:
            raise ValueError(f"token {token} of sequence {id!r} is not below vocab_size ({limits.vocab_size})")


def _admission(entry: Any) -> Admission:
    if not isinstance(entry, Mapping) or entry.keys() != _ADMISSION_KEYS:
        raise ValueError(f"an admission must be a mapping with the keys {sorted(_ADMISSION_KEYS)}")
    id = _sequence_id(entry["id"])
    tokens = entry["tokens"]
    if not isinstance(tokens, list | tuple) or not tokens or not all(map(_is_int, tokens)):
        raise ValueError(f"the tokens of sequence {id!r} must be a list of one or more integers")
    try:
        sampling = Sampling(temperature=entry["temperature"], top_p=entry["top_p"], seed=entry["seed"])
    except ValueError as error:
        raise ValueError(f"sequence {id!r}: {error}") from error
    return Admission(id, tokens, sampling)


def _decode(entry: Any) -> Decode:
    match entry:
        case [id, token, position] if _is_int(token) and _is_int(position):
            return Decode(_sequence_id(id), token, position)
    raise ValueError("an entry of a step's 'decode' must be [id, token, position]")


def _sequence_id(value: Any) -> SequenceId:
    if not (_is_int(value) or isinstance(value, str)):
        raise ValueError(f"a sequence's id must be an integer or a string, not {value!r}")
    id: SequenceId = value
    return id


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
