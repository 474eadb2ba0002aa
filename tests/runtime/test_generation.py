"""The scheduler, the generator and the tokenizer, without any worker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from stepcast.bus.errors import ConfigError, ProtocolError, StepFailed  # noqa: E402
from stepcast.runtime.generation import Generator, SamplingParams, Scheduler, TokenEvent, Tokenizer  # noqa: E402
from stepcast.workers.causal_lm_step import Limits, Step, check_step  # noqa: E402

EOS = 99
LIMITS = Limits(vocab_size=100, max_sequences=3, max_sequence_length=20)


class Letters:
    """A tokenizer whose text for a token is its number and a space."""

    eos_token_ids = frozenset({EOS})

    def detokenizer(self) -> Letters:
        return self

    def push(self, token: int, /) -> str:
        return f"{token} "


class FakeRanks:
    """Holds sequences as the ranks do, checks each step as they do, and counts on from a sequence's last token."""

    def __init__(self) -> None:
        self.lengths: dict[int | str, int] = {}
        self.steps: list[Step] = []
        self.fails = 0

    def step(self, payload: dict[str, Any]) -> dict[str, Any]:
        step = Step.from_payload(payload)
        check_step(step, self.lengths, LIMITS)
        self.steps.append(step)
        if self.fails:
            self.fails -= 1
            raise StepFailed("broken", step=1, rank=0, exception_type="ValueError", traceback="")
        for id in step.release:
            self.lengths.pop(id, None)
        for new in step.admit:
            self.lengths[new.id] = len(new.tokens)
        for going in step.decode:
            self.lengths[going.id] += 1
        last = [(new.id, new.tokens[-1]) for new in step.admit] + [(going.id, going.token) for going in step.decode]
        return {"tokens": [[id, token + 1] for id, token in last]}


def new_scheduler(max_running: int = 3) -> Scheduler:
    return Scheduler(Letters(), max_running=max_running, max_sequence_length=LIMITS.max_sequence_length)


def run_step(scheduler: Scheduler, ranks: FakeRanks) -> list[TokenEvent]:
    return scheduler.consume(ranks.step(scheduler.build_step()))


def test_a_request_from_admission_to_release() -> None:
    """A request is admitted, goes on with its newest token at its position, ends at max_tokens and is released."""
    scheduler, ranks = new_scheduler(), FakeRanks()
    id = scheduler.add([7, 8], SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, seed=4))
    payloads = []
    events = []
    while scheduler.has_work:
        payloads.append(scheduler.build_step())
        events += scheduler.consume(ranks.step(payloads[-1]))
    admission = {"id": id, "tokens": [7, 8], "temperature": 0.5, "top_p": 0.9, "seed": 4}
    assert payloads == [
        {"release": [], "admit": [admission], "decode": []},
        {"release": [], "admit": [], "decode": [[id, 9, 2]]},
        {"release": [], "admit": [], "decode": [[id, 10, 3]]},
        {"release": [id], "admit": [], "decode": []},
    ]
    assert events == [
        TokenEvent(id, "9 ", 9, None),
        TokenEvent(id, "10 ", 10, None),
        TokenEvent(id, "11 ", 11, "length"),
    ]


@pytest.mark.parametrize(("prompt", "stop"), [([EOS - 2], ()), ([40], (42,))])
def test_an_end_token_ends_the_answer(prompt: list[int], stop: Sequence[int]) -> None:
    """The model's end token, or one of the request's own, ends the answer and gives no text."""
    scheduler, ranks = new_scheduler(), FakeRanks()
    id = scheduler.add(prompt, SamplingParams(stop_token_ids=stop))
    events = [*run_step(scheduler, ranks), *run_step(scheduler, ranks)]
    first, second = prompt[0] + 1, prompt[0] + 2
    assert events == [TokenEvent(id, f"{first} ", first, None), TokenEvent(id, "", second, "stop")]


def test_the_sequence_limit_ends_the_answer() -> None:
    """Prompt and answer together never have more tokens than the workers hold."""
    scheduler, ranks = new_scheduler(), FakeRanks()
    scheduler.add([1] * 17, SamplingParams(max_tokens=50))
    events = [event for _ in range(3) for event in run_step(scheduler, ranks)]
    assert [event.finish_reason for event in events] == [None, None, "length"]


def test_requests_wait_their_turn() -> None:
    """No more than max_running run; the next waiting request is admitted in the step that releases an ended one."""
    scheduler, ranks = new_scheduler(max_running=2), FakeRanks()
    ids = [scheduler.add([1], SamplingParams(max_tokens=count)) for count in (1, 2, 1)]
    run_step(scheduler, ranks)
    run_step(scheduler, ranks)
    assert [[new.id for new in step.admit] for step in ranks.steps] == [ids[:2], ids[2:]]
    assert ranks.steps[1].release == [ids[0]]


def test_abort_of_a_waiting_request_reaches_no_rank() -> None:
    """A request that is aborted before its admission ends at once, and is never in a step."""
    scheduler = new_scheduler()
    id = scheduler.add([1], SamplingParams())
    assert scheduler.abort(id) == TokenEvent(id, "", None, "abort")
    assert not scheduler.has_work


def test_abort_of_a_running_request_is_in_the_next_step() -> None:
    """An aborted request ends at once; the next step releases it; a second abort does nothing."""
    scheduler, ranks = new_scheduler(), FakeRanks()
    id, other = scheduler.add([1], SamplingParams()), scheduler.add([5], SamplingParams())
    run_step(scheduler, ranks)
    assert scheduler.abort(id) == TokenEvent(id, "", None, "abort")
    assert scheduler.abort(id) is None
    assert [event.request_id for event in run_step(scheduler, ranks)] == [other]
    assert ranks.steps[-1].release == [id]
    assert ranks.lengths.keys() == {other}


def test_abort_while_a_step_is_in_flight_drops_its_token() -> None:
    """What a step in flight brings for an aborted request is dropped; the step after it releases the request."""
    scheduler, ranks = new_scheduler(), FakeRanks()
    id = scheduler.add([1], SamplingParams())
    payload = scheduler.build_step()
    scheduler.abort(id)
    assert scheduler.consume(ranks.step(payload)) == []
    assert scheduler.has_work
    assert scheduler.build_step() == {"release": [id], "admit": [], "decode": []}


def test_a_failed_step_ends_what_ran_and_spares_what_waits() -> None:
    """After a step that raised, running requests end with an error and are released; waiting ones are then served."""
    scheduler, ranks = new_scheduler(max_running=2), FakeRanks()
    ids = [scheduler.add([count], SamplingParams(max_tokens=1)) for count in (1, 2, 3)]
    ranks.fails = 1
    with pytest.raises(StepFailed):
        run_step(scheduler, ranks)
    assert scheduler.fail_running() == [TokenEvent(id, "", None, "error") for id in ids[:2]]
    assert run_step(scheduler, ranks) == [TokenEvent(ids[2], "4 ", 4, "length")]
    assert ranks.steps[-1].release == ids[:2]


def test_releases_survive_a_failed_step() -> None:
    """What a failed step should have released is released by the next one."""
    scheduler, ranks = new_scheduler(), FakeRanks()
    id = scheduler.add([1], SamplingParams(max_tokens=1))
    run_step(scheduler, ranks)
    ranks.fails = 1
    with pytest.raises(StepFailed):
        run_step(scheduler, ranks)
    scheduler.fail_running()
    assert ranks.lengths.keys() == {id}
    run_step(scheduler, ranks)
    assert not ranks.lengths
    assert not scheduler.has_work


@pytest.mark.parametrize("result", [None, {}, {"tokens": []}, {"tokens": [[1, 5]]}, {"tokens": [[0, 5], [1, 5]]}])
def test_a_result_that_does_not_answer_the_step_is_refused(result: Any) -> None:
    """A result without exactly the step's sequences is a ProtocolError."""
    scheduler = new_scheduler()
    scheduler.add([1], SamplingParams())
    scheduler.build_step()
    with pytest.raises(ProtocolError, match="does not answer the step"):
        scheduler.consume(result)


def test_steps_are_built_and_consumed_in_turn() -> None:
    """A second step can't be built before the first one's result is consumed, nor a result consumed without a step."""
    scheduler = new_scheduler()
    scheduler.add([1], SamplingParams())
    with pytest.raises(RuntimeError, match="no step is in flight"):
        scheduler.consume({"tokens": []})
    scheduler.build_step()
    with pytest.raises(RuntimeError, match="a step is in flight"):
        scheduler.build_step()


@pytest.mark.parametrize("length", [0, 20])
def test_a_prompt_without_a_token_or_without_room_is_refused(length: int) -> None:
    """A prompt that is empty, or as long as a sequence may be, is a ConfigError."""
    with pytest.raises(ConfigError, match=f"this one has {length}"):
        new_scheduler().add([1] * length, SamplingParams())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a positive integer, not 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a positive integer, not 1.5"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 0}, "top_p must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_wrong_sampling_params_are_refused(settings: dict[str, Any], message: str) -> None:
    """A setting outside its range is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**settings)


def test_max_running_must_be_positive() -> None:
    """A scheduler that may run nothing is refused."""
    with pytest.raises(ConfigError, match="max_running"):
        new_scheduler(max_running=0)


def test_a_seed_is_drawn_where_none_is_given() -> None:
    """Requests without a seed get different ones, so that their answers differ."""
    scheduler = new_scheduler()
    for _ in range(3):
        scheduler.add([1], SamplingParams(temperature=1.0))
    assert len({new["seed"] for new in scheduler.build_step()["admit"]}) == 3


Operation = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 19), st.integers(1, 30)),
    st.tuples(st.just("abort"), st.integers(0, 12), st.booleans()),
    st.tuples(st.just("step"), st.booleans(), st.none()),
)


@given(st.lists(Operation, max_size=40))
def test_any_order_of_events_keeps_driver_and_ranks_in_step(operations: list[tuple[str, Any, Any]]) -> None:
    """Whatever is added, aborted and failed in whatever order: every step fits the ranks, every request ends once."""
    scheduler, ranks = new_scheduler(), FakeRanks()
    added: list[int] = []
    ended: list[int] = []

    def take(events: Sequence[TokenEvent | None]) -> None:
        ended.extend(event.request_id for event in events if event and event.finish_reason)

    def advance(abort: int | None = None) -> None:
        payload = scheduler.build_step()
        if abort is not None:
            take([scheduler.abort(abort)])
        try:
            take(scheduler.consume(ranks.step(payload)))
        except StepFailed:
            take(scheduler.fail_running())

    for name, first, second in operations:
        if name == "add":
            added.append(scheduler.add([1] * first, SamplingParams(max_tokens=second)))
        elif name == "abort" and second:
            advance(abort=first)
        elif name == "abort":
            take([scheduler.abort(first)])
        else:
            ranks.fails = int(first)
            advance()
    ranks.fails = 0
    while scheduler.has_work:
        advance()
    assert sorted(ended) == added
    assert not ranks.lengths


def test_generator_answers_prompts_together() -> None:
    """Every prompt's events come with its index, to its end; the ranks hold nothing afterwards."""
    ranks = FakeRanks()
    generator = Generator(ranks, Letters(), max_running=2, max_sequence_length=20)
    for _ in range(2):  # the second round's requests have other ids, but the same indexes
        texts = ["", "", ""]
        for index, event in generator.generate([[10], [20], [30]], SamplingParams(max_tokens=2)):
            texts[index] += event.text
        assert texts == ["11 12 ", "21 22 ", "31 32 "]
        assert not ranks.lengths


def test_generator_left_early_aborts_the_rest() -> None:
    """Where the caller stops listening, what runs is released by the next call's first step."""
    ranks = FakeRanks()
    generator = Generator(ranks, Letters(), max_running=2, max_sequence_length=20)
    events = generator.generate([[10], [20], [30]], SamplingParams())
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert [event.text for _, event in generator.generate([[40]], SamplingParams(max_tokens=1))] == ["41 "]
    assert not ranks.lengths


def test_generator_can_be_used_after_a_failed_step() -> None:
    """A step that raises ends the call with its error; the next call works."""
    ranks = FakeRanks()
    generator = Generator(ranks, Letters(), max_running=2, max_sequence_length=20)
    ranks.fails = 1
    with pytest.raises(StepFailed):
        list(generator.generate([[10]], SamplingParams()))
    assert [event.text for _, event in generator.generate([[40]], SamplingParams(max_tokens=1))] == ["41 "]
    assert not ranks.lengths


# The tokenizer.

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level() -> Any:
    """A tokenizer with a token for each byte, and an end token, as GPT-2's and SmolLM's are."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def byte_fallback() -> Any:
    """A tokenizer with words, and bytes for all else, as Llama's is."""
    words = ["<unk>", "▁", "▁a", "▁b", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def save(directory: Path, made: Any, **files: Any) -> Path:
    directory.mkdir(exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    for name, content in ({"config": {"eos_token_id": 3}} | files).items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tokenizer"), byte_level(), generation_config={"eos_token_id": [256, 7]})


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(tmp_path_factory.mktemp("tokenizer"), request.param()))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_text_comes_out_piece_by_piece(tokenizer: Tokenizer, text: str) -> None:
    """The pieces make up the text, and none holds a part of a character."""
    ids = tokenizer._tokenizer.encode(text).ids
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(id) for id in ids]
    assert "".join(pieces) == text.rstrip("�")
    assert all("�" not in piece for piece in pieces) or "�" in text


@given(ids=st.lists(st.integers(0, 256), max_size=20))
def test_broken_bytes_come_out_as_decode_shows_them(directory: Path, ids: list[int]) -> None:
    """Whatever bytes come: the pieces make up what decode makes of all of them, less what is broken at the end."""
    tokenizer = Tokenizer(directory)
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push(id) for id in ids) == tokenizer.decode(ids).rstrip("�")


def test_a_character_in_several_tokens_waits_until_it_is_whole(directory: Path) -> None:
    """An emoji of four byte tokens comes out with its last one, and not at all where the answer ends before."""
    tokenizer = Tokenizer(directory)
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(id) for id in tokenizer.encode("a🙂b")] == ["a", "", "", "", "🙂", "b"]
    cut = tokenizer.detokenizer()
    assert [cut.push(id) for id in tokenizer.encode("a🙂")[:-1]] == ["a", "", "", ""]


def test_special_tokens_have_no_text(directory: Path) -> None:
    """An end token in an answer is not shown, and spaces around it stay."""
    tokenizer = Tokenizer(directory)
    detokenizer = tokenizer.detokenizer()
    ids = [*tokenizer.encode("a "), 256, *tokenizer.encode(" b")]
    assert "".join(detokenizer.push(id) for id in ids) == "a  b" == tokenizer.decode(ids)


def test_end_tokens_come_from_the_generation_config_first(directory: Path, tmp_path: Path) -> None:
    """generation_config.json says which tokens end an answer; without it config.json does; without both none does."""
    assert Tokenizer(directory).eos_token_ids == {256, 7}
    assert Tokenizer(save(tmp_path / "a", byte_level())).eos_token_ids == {3}
    assert Tokenizer(save(tmp_path / "b", byte_level(), config={})).eos_token_ids == frozenset()


@pytest.mark.parametrize("place", ["file", "settings", "named"])
def test_a_prompt_goes_through_the_chat_template(tmp_path: Path, place: str) -> None:
    """With a chat template a text is a user's message, wherever the template is kept; chat=False takes it as it is."""
    template: Any = TEMPLATE
    if place == "named":
        template = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    settings = {"eos_token": {"content": "<end>"}} | ({} if place == "file" else {"chat_template": template})
    directory = save(tmp_path, byte_level(), tokenizer_config=settings)
    if place == "file":
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer(directory)
    raw = tokenizer._tokenizer
    assert tokenizer.has_chat_template
    assert tokenizer.encode("hi") == raw.encode("user:hi<end>assistant:").ids
    assert tokenizer.encode("hi", chat=False) == raw.encode("hi").ids
    conversation = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert tokenizer.encode(conversation) == raw.encode("system:be<end>user:hi<end>assistant:").ids
    with pytest.raises(ConfigError, match=r"a conversation needs a chat template$"):
        tokenizer.encode(conversation, chat=False)


def test_without_a_chat_template_a_text_is_taken_as_it_is(directory: Path) -> None:
    """A model without a template continues the text; a conversation is refused, and so is a prompt without a token."""
    tokenizer = Tokenizer(directory)
    assert not tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    with pytest.raises(ConfigError, match="which the model lacks"):
        tokenizer.encode([{"role": "user", "content": "hi"}])
    with pytest.raises(ConfigError, match="no token"):
        tokenizer.encode("")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "refuses the conversation: no system role"),
        ("{{ messages.__class__.__mro__ }}", "refuses the conversation"),
        ("{% for %}", "is not valid"),
    ],
)
def test_a_template_that_fails_is_a_config_error(tmp_path: Path, template: str, message: str) -> None:
    """A template that refuses, breaks out of its sandbox or does not parse is a ConfigError."""
    directory = save(tmp_path, byte_level(), tokenizer_config={"chat_template": template})
    with pytest.raises(ConfigError, match=message):
        Tokenizer(directory).encode("hi")


def test_a_template_may_ask_for_the_date_and_for_json(tmp_path: Path) -> None:
    """The helpers that templates of the field rely on are there."""
    template = "{{ strftime_now('%Y') | length }} {{ messages[0] | tojson(indent=1) }}"
    tokenizer = Tokenizer(save(tmp_path, byte_level(), tokenizer_config={"chat_template": template}))
    assert tokenizer.decode(tokenizer.encode("é<&")) == '4 {\n "role": "user",\n "content": "é<&"\n}'


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    """A tokenizer.json or tokenizer_config.json that can't be read is a ConfigError that names the file."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be read"):
        Tokenizer(tmp_path)
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer(tmp_path)


def test_the_driver_needs_no_torch() -> None:
    """Generation, checkpoints and the step format import neither torch nor transformers."""
    code = (
        "import sys, stepcast.runtime.generation, stepcast.runtime.checkpoint\n"
        "sys.exit(' '.join({'torch', 'transformers', 'numpy'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
