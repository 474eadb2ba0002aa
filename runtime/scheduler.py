"""Continuous batching: which sequences each step computes, and what becomes of its tokens.

The scheduler is a pure state machine: it starts nothing and waits for nothing. Whoever owns the executor turns the
crank, in a loop or in an async task:

    while scheduler.has_work:
        for event in scheduler.consume(executor.step(scheduler.build_step())):
            ...
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from stepcast.bus.errors import ConfigError, ProtocolError
from stepcast.workers.causal_lm_step import Admission, Decode, Sampling, Step

#: Why an answer ended: at an end token, at its token limit, by `abort`, or because its step failed.
FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's answer is generated.

    Attributes:
        max_tokens: the most tokens that the answer may have, at least 1.
        temperature: 0 takes the likeliest token each time; higher is more varied.
        top_p: with a temperature, only the likeliest tokens that together reach this probability; above 0, up to 1.
        seed: with a temperature, the same seed gives the same answer, whatever else runs; None draws one.
        stop_token_ids: tokens that end the answer, besides the model's own end-of-sequence tokens.

    Raises:
        ConfigError: a value is outside its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        max_tokens: object = self.max_tokens
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ConfigError(f"max_tokens must be a positive integer, not {max_tokens!r}")
        try:
            self.sampling()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def sampling(self) -> Sampling:
        """Return what the ranks need to know, with a seed drawn where none was given."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(temperature=self.temperature, top_p=self.top_p, seed=seed)


@dataclass(frozen=True)
class TokenEvent:
    """What a step brought for one request.

    Attributes:
        request_id: whose it is.
        text: the answer's next characters; may be empty.
        token_id: the token; None where the request ended without one.
        finish_reason: why the answer ended, or None while it goes on.
    """

    request_id: int
    text: str
    token_id: int | None
    finish_reason: FinishReason | None


class IncrementalDetokenizer(Protocol):
    """Turns one answer's tokens into text as they come."""

    def push(self, token: int, /) -> str:
        """Take a token; return the text that it completes."""


class AnswerTokenizer(Protocol):
    """What the scheduler asks of a tokenizer; `stepcast.runtime.tokenizer.Tokenizer` is one."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def detokenizer(self) -> IncrementalDetokenizer:
        """Return a new detokenizer, for one answer."""


@dataclass
class _Request:
    id: int
    prompt: Sequence[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    detokenizer: IncrementalDetokenizer
    last_token: int = -1  # there is none before the first step
    num_answered: int = 0

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together."""
        return len(self.prompt) + self.num_answered


@dataclass(frozen=True)
class _InFlight:
    requests: Sequence[_Request]  # in the order of the result's tokens
    num_released: int


class Scheduler:
    """Decides what each step holds, and follows every request to its end.

    Requests are admitted in the order in which they came, as soon as fewer than `max_running` run. One step is in
    flight at a time, since the next one's tokens are in its result.

    Args:
        tokenizer: gives the model's end tokens, and turns tokens into text.
        max_running: the most sequences in a step; no more than the workers' `max_sequences`.
        max_sequence_length: the most tokens in a sequence, prompt and answer together; no more than the workers'.

    Raises:
        ConfigError: `max_running` is not positive.
    """

    def __init__(self, tokenizer: AnswerTokenizer, *, max_running: int, max_sequence_length: int) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1, not {max_running}")
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._max_sequence_length = max_sequence_length
        self._next_id = 0
        self._waiting: dict[int, _Request] = {}
        self._running: dict[int, _Request] = {}
        self._to_release: list[int] = []
        self._in_flight: _InFlight | None = None

    @property
    def has_work(self) -> bool:
        """Whether another step is needed, for tokens or to free what has ended on the ranks."""
        return bool(self._waiting or self._running or self._to_release)

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue a request.

        Args:
            prompt: token ids, at least one.
            params: how to answer.

        Returns:
            The request's id: 0, 1, 2 and so on.

        Raises:
            ConfigError: the prompt is empty, or leaves no room for an answer.
        """
        if not 0 < len(prompt) < self._max_sequence_length:
            raise ConfigError(
                f"a prompt must have at least one token and fewer than max_sequence_length "
                f"({self._max_sequence_length}); this one has {len(prompt)}"
            )
        stop_ids = self._tokenizer.eos_token_ids | frozenset(params.stop_token_ids)
        request = _Request(self._next_id, prompt, params, stop_ids, self._tokenizer.detokenizer())
        self._waiting[request.id] = request
        self._next_id += 1
        return request.id

    def abort(self, request_id: int) -> TokenEvent | None:
        """End a request at once. The next step frees it on every rank; what a step in flight brings for it is dropped.

        Args:
            request_id: the request.

        Returns:
            Its last event, which no step brings again; None where it has ended already.
        """
        if self._waiting.pop(request_id, None):
            return TokenEvent(request_id, "", None, "abort")
        if request_id in self._running:
            return self._end(request_id, "", None, "abort")
        return None

    def build_step(self) -> dict[str, Any]:
        """Admit what there is room for and describe the next step.

        Returns:
            The payload for `Executor.step`, as `stepcast.workers.causal_lm_step` describes it.

        Raises:
            RuntimeError: the last step's result has not been consumed.
        """
        if self._in_flight is not None:
            raise RuntimeError("a step is in flight: consume its result, or call fail_running, before the next")
        going = list(self._running.values())
        new = [self._waiting.pop(id) for id in list(self._waiting)[: self._max_running - len(going)]]
        self._running |= {request.id: request for request in new}
        self._in_flight = _InFlight([*new, *going], len(self._to_release))
        return Step(
            release=self._to_release,
            admit=[Admission(request.id, request.prompt, request.params.sampling()) for request in new],
            decode=[Decode(request.id, request.last_token, request.length - 1) for request in going],
        ).to_payload()

    def consume(self, result: Any) -> list[TokenEvent]:
        """Take the step's result.

        Args:
            result: what `Executor.step` returned.

        Returns:
            An event for each sequence in the step, but for those aborted since.

        Raises:
            ProtocolError: the result does not answer the step.
            RuntimeError: no step is in flight.
        """
        if self._in_flight is None:
            raise RuntimeError("no step is in flight: build one first")
        requests = self._in_flight.requests
        tokens = _read_tokens(result, [request.id for request in requests])
        del self._to_release[: self._in_flight.num_released]
        self._in_flight = None
        return [
            self._advance(request, token)
            for request, token in zip(requests, tokens, strict=True)
            if request.id in self._running
        ]

    def fail_running(self) -> list[TokenEvent]:
        """End every running request, after its step failed; waiting ones stay. The next step frees the ended ones.

        Returns:
            The last event of each.
        """
        self._in_flight = None
        return [self._end(id, "", None, "error") for id in list(self._running)]

    def _advance(self, request: _Request, token: int) -> TokenEvent:
        if token in request.stop_ids:
            return self._end(request.id, "", token, "stop")
        request.last_token = token
        request.num_answered += 1
        text = request.detokenizer.push(token)
        if request.num_answered == request.params.max_tokens or request.length == self._max_sequence_length:
            return self._end(request.id, text, token, "length")
        return TokenEvent(request.id, text, token, None)

    def _end(self, request_id: int, text: str, token: int | None, reason: FinishReason) -> TokenEvent:
        del self._running[request_id]
        self._to_release.append(request_id)
        return TokenEvent(request_id, text, token, reason)


def _read_tokens(result: Any, ids: list[int]) -> list[int]:
    pairs = result.get("tokens") if isinstance(result, Mapping) else None
    if not isinstance(pairs, list | tuple) or [pair[0] for pair in pairs] != ids:
        raise ProtocolError(
            "the output rank's result does not answer the step", expected=f"tokens of sequences {ids}", got=repr(result)
        )
    return [token for _, token in pairs]
