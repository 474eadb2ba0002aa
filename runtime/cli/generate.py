"""The work of `stepcast generate`: from prompts to answers and figures. Imports neither torch nor transformers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from stepcast.bus.errors import ConfigError
from stepcast.runtime.checkpoint import resolve_model
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.executor import Executor
from stepcast.runtime.generation import Generator, SamplingParams, Scheduler, Tokenizer
from stepcast.workers.model_config import check_world_size, read_model_config, sequence_limit

from .display import Display, progress
from .figures import Percentiles, StepClock, percentiles

#: As many sequences share a step at most, unless the configuration says otherwise.
_MAX_SEQUENCES = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts that can be answered: all that could be checked without starting a group has been.

    Attributes:
        config: the group's settings.
        prompts: the prompts as they were given.
        tokens: the same as token ids.
        params: how to answer.
        tokenizer: the model's.
        max_sequences: the most sequences in a step.
        max_sequence_length: the most tokens in a sequence.
    """

    config: ExecutorConfig
    prompts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    params: SamplingParams
    tokenizer: Tokenizer
    max_sequences: int
    max_sequence_length: int


@dataclass(kw_only=True)
class Answer:
    """What came of one prompt.

    Attributes:
        prompt: the prompt.
        text: the answer.
        token_ids: its tokens; an end token too, which has no text.
        finish_reason: why it ended: "stop" at an end token, "length" at its limit.
    """

    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """All answers, and how long they took.

    Attributes:
        world_size: the number of ranks.
        backend: what ran them.
        outputs: an answer for each prompt, in order.
        steps: steps published.
        step_latency_us: from a step's publication to its result.
        bus_overhead_us: the same less what the slowest rank computed.
        elapsed_s: seconds from the first step's publication to the last one's result.
    """

    world_size: int
    backend: str
    outputs: Sequence[Answer]
    steps: int
    step_latency_us: Percentiles
    bus_overhead_us: Percentiles
    elapsed_s: float

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        values = dataclasses.asdict(self)
        del values["elapsed_s"]
        return values

    def summary(self) -> str:
        """Return the closing line."""
        tokens = sum(len(answer.token_ids) for answer in self.outputs)
        latency = self.step_latency_us
        return (
            f"{tokens} tokens in {self.elapsed_s:.1f} s, {tokens / self.elapsed_s:.1f} tokens/s; "
            f"{self.steps} steps, p50 {latency.p50 / 1000:.1f} ms, p99 {latency.p99 / 1000:.1f} ms"
        )


def prepare(
    config: ExecutorConfig,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    model: str | None,
    chat: bool,
    console: Console | None,
) -> Job:
    """Find the model, and check whether it can answer the prompts.

    Args:
        config: the group's settings; the model in its `worker_options` is used where `model` is None.
        prompts: the prompts.
        params: how to answer.
        model: a model directory; None for the default one.
        chat: whether a prompt is a user's message in the model's chat format, if it has one.
        console: where to show progress.

    Returns:
        The job.

    Raises:
        ConfigError: the model, the world size or a prompt won't do.
        StartupError: the model's conversion failed.
    """
    options = dict(config.worker_options)
    with progress(console, "Preparing the model (the default one is converted on first use)"):
        directory = resolve_model(model if model is not None else options.get("model"))
    model_config = read_model_config(directory)
    check_world_size(model_config, config.world_size)
    longest = sequence_limit(model_config)
    max_sequences = _positive(options, "max_sequences", _MAX_SEQUENCES)
    max_sequence_length = min(longest, _positive(options, "max_sequence_length", longest))
    tokenizer = Tokenizer(directory)
    tokens = [tokenizer.encode(_well_formed(prompt), chat=chat) for prompt in prompts]
    trial = Scheduler(tokenizer, max_running=max_sequences, max_sequence_length=max_sequence_length)
    for ids in tokens:
        trial.add(ids, params)  # refuses what is too long, before a group is started for it
    options |= {"model": str(directory.absolute()), "max_sequences": max_sequences}
    return Job(
        config=config.replace(worker_options=options),
        prompts=prompts,
        tokens=tokens,
        params=params,
        tokenizer=tokenizer,
        max_sequences=max_sequences,
        max_sequence_length=max_sequence_length,
    )


def run(job: Job, display: Display, console: Console | None) -> Result:
    """Start a group, answer the prompts, and end it.

    Args:
        job: what to do.
        display: shows the answers as they come.
        console: where to show progress.

    Returns:
        The answers.

    Raises:
        StepcastError: the group did not start, or failed.
    """
    config = job.config
    ranks = "1 rank" if config.world_size == 1 else f"{config.world_size} ranks"
    # A fork should come from a process without other threads.
    with progress(console, f"Loading the model on {ranks}", moving=config.start_method == "spawn"):
        executor = Executor(config)
    answers = [Answer(prompt=prompt) for prompt in job.prompts]
    with executor:
        clock = StepClock(executor)
        generator = Generator(
            clock, job.tokenizer, max_running=job.max_sequences, max_sequence_length=job.max_sequence_length
        )
        began = time.perf_counter()
        with display:
            for index, event in generator.generate(job.tokens, job.params):
                answer = answers[index]
                answer.text += event.text
                answer.token_ids += [] if event.token_id is None else [event.token_id]
                answer.finish_reason = event.finish_reason
                display.show(index, event.text, event.finish_reason)
        elapsed_s = time.perf_counter() - began
        # Every rank answers a call after all steps before it: then every step's times are there.
        executor.call("cached_tokens")
        return Result(
            world_size=config.world_size,
            backend=config.resolved_backend,
            outputs=answers,
            steps=clock.steps,
            step_latency_us=percentiles(clock.latencies_us()),
            bus_overhead_us=percentiles(clock.overheads_us()),
            elapsed_s=elapsed_s,
        )


def _positive(options: dict[str, Any], name: str, default: int) -> int:
    value = options.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"worker_options: {name} must be a positive integer, not {value!r}")
    return value


def _well_formed(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the prompt {prompt!r} is not valid UTF-8") from None
    return prompt
