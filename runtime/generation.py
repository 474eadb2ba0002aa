"""Text generation with a group of `CausalLM` workers, from the driver; needs neither torch nor transformers.

With an executor of such workers:

    tokenizer = Tokenizer(directory)
    generator = Generator(executor, tokenizer, max_running=8, max_sequence_length=2048)
    for index, event in generator.generate([tokenizer.encode("Tell me a story.")], SamplingParams(max_tokens=100)):
        print(event.text, end="")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from .scheduler import AnswerTokenizer, FinishReason, SamplingParams, Scheduler, TokenEvent
from .tokenizer import Detokenizer, Tokenizer

__all__ = [
    "Detokenizer",
    "FinishReason",
    "Generator",
    "SamplingParams",
    "Scheduler",
    "Stepper",
    "TokenEvent",
    "Tokenizer",
]


class Stepper(Protocol):
    """Runs a step; an `Executor` is one."""

    def step(self, payload: Any, /) -> Any:
        """Run the step on every rank; return the output rank's result."""


class Generator:
    """Answers prompts with an executor of `CausalLM` workers.

    Args:
        stepper: runs the steps: an executor.
        tokenizer: the model's.
        max_running: the most sequences in a step; no more than the workers' `max_sequences`.
        max_sequence_length: the most tokens in a sequence, prompt and answer together; no more than the workers'.

    Attributes:
        scheduler: the requests' state; `abort` on it ends one between two steps.
    """

    def __init__(
        self, stepper: Stepper, tokenizer: AnswerTokenizer, *, max_running: int, max_sequence_length: int
    ) -> None:
        self._stepper = stepper
        self.scheduler = Scheduler(tokenizer, max_running=max_running, max_sequence_length=max_sequence_length)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Iterator[tuple[int, TokenEvent]]:
        """Answer prompts together; one call at a time.

        Args:
            prompts: token ids of each.
            params: how to answer all of them.

        Yields:
            A prompt's index and what a step brought for it, step after step, until every answer has ended. Where the
            caller stops early, or a step raises, the rest are aborted.

        Raises:
            ConfigError: a prompt is empty or too long.
            StepcastError: whatever the executor's step raises.
        """
        indexes: dict[int, int] = {}
        try:
            for index, prompt in enumerate(prompts):
                indexes[self.scheduler.add(prompt, params)] = index
            while self.scheduler.has_work:
                for event in self.scheduler.consume(self._stepper.step(self.scheduler.build_step())):
                    yield indexes[event.request_id], event
        finally:
            for request_id in indexes:
                self.scheduler.abort(request_id)
            self.scheduler.fail_running()  # clears a step that raised
