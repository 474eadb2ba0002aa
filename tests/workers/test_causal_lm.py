"""`CausalLM`: the same tokens as transformers' own generate, at any world size and in any company."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from stepcast.bus.errors import ConfigError  # noqa: E402
from stepcast.runtime.checkpoint import resolve_model  # noqa: E402
from stepcast.runtime.generation import Generator, SamplingParams, Tokenizer  # noqa: E402
from stepcast.workers import process_group  # noqa: E402
from stepcast.workers.base import RankInfo  # noqa: E402
from stepcast.workers.causal_lm import CausalLM  # noqa: E402

transformers.utils.logging.disable_progress_bar()  # tqdm leaves a thread behind

VOCAB = 260  # 3 ranks can't share it evenly
GREEDY = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 1234}
PROMPTS = {"a": [5, 17, 200, 3, 42], "b": [9], "c": list(range(30, 75)), "d": [250, 250, 1]}
Step = Callable[[dict[str, Any]], Any]


def rank_info(options: dict[str, Any], world_size: int = 1, rendezvous: str = "") -> RankInfo:
    return RankInfo(
        rank=0,
        local_rank=0,
        local_world_size=1,
        world_size=world_size,
        epoch=1,
        output_rank=0,
        device="cpu",
        rendezvous=rendezvous,
        collective_timeout_s=60.0,
        options=options,
    )


def new_worker(directory: Path, **options: Any) -> CausalLM:
    worker = CausalLM()
    worker.setup(rank_info({"model": str(directory), **options}))
    return worker


class Ranks:
    """Three rank processes in lockstep: each command goes to all of them."""

    def __init__(self, directory: Path, rendezvous: Path) -> None:
        script = Path(__file__).with_name("causal_lm_rank.py")
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), "3", rendezvous.as_uri(), json.dumps({"model": str(directory)})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]

    def wait_until_ready(self) -> None:
        assert self._answers() == ["ready"] * 3

    def call(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin
            process.stdin.write(json.dumps([method, *arguments]) + "\n")
            process.stdin.flush()
        return self._answers()

    def step(self, payload: dict[str, Any]) -> Any:
        output, *others = self.call("execute", payload)
        assert others == [{"result": None}] * 2
        return output["result"]

    def close(self) -> list[int]:
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        codes = [process.wait(timeout=30) for process in self.processes]
        for process in self.processes:
            assert process.stdout
            process.stdout.close()
        return codes

    def _answers(self) -> list[Any]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        assert all(lines), "a rank has ended"
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def three_ranks(directory: Path, tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(directory, tmp_path / "rendezvous")
    try:
        ranks.wait_until_ready()
        yield ranks
    finally:
        codes = ranks.close()
    assert codes == [0, 0, 0]


def save_tiny(directory: Path, config: Any) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def llama_config(**changes: Any) -> Any:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,  # wide, so that the random model has clear favourites
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return transformers.LlamaConfig(**(settings | changes))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), llama_config())


@pytest.fixture(scope="module")
def tiny_ranks(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with three_ranks(tiny, tmp_path_factory.mktemp("tiny_ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> CausalLM:
    return new_worker(tiny)


@pytest.fixture
def worker(loaded: CausalLM) -> CausalLM:
    """A worker of world size 1 that holds no sequence."""
    loaded.execute({"release": list(loaded.cached_tokens())})
    return loaded


@pytest.fixture(params=[1, 3])
def step(request: pytest.FixtureRequest, worker: CausalLM, tiny_ranks: Ranks) -> Step:
    """Runs a step at world size 1 or 3, on ranks that hold nothing yet."""
    if request.param == 1:
        return worker.execute
    held = tiny_ranks.call("cached_tokens")
    assert held[0] == held[1] == held[2]
    tiny_ranks.step({"release": list(held[0]["result"])})
    return tiny_ranks.step


def reference(directory: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers itself generates greedily."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def alone(step: Step, prompt: list[int], count: int, sampling: dict[str, Any] = GREEDY) -> list[int]:
    """What a sequence that has the ranks for itself generates."""
    [[_, token]] = step({"admit": [{"id": "alone", "tokens": prompt, **sampling}]})["tokens"]
    tokens = [token]
    while len(tokens) < count:
        [[_, token]] = step({"decode": [["alone", token, len(prompt) + len(tokens) - 1]]})["tokens"]
        tokens.append(token)
    step({"release": ["alone"]})
    return tokens


def together(step: Step, count: int, sampling: dict[str, Any]) -> dict[str, list[int]]:
    """What all prompts generate, each admitted two steps after the one before, and released at its end."""
    tokens: dict[str, list[int]] = {}
    waiting, release = list(PROMPTS), []
    for index in range(2 * len(PROMPTS) + count):
        decode = [[id, got[-1], len(PROMPTS[id]) + len(got) - 1] for id, got in tokens.items() if len(got) < count]
        admit = [waiting.pop(0)] if waiting and index % 2 == 0 else []
        result = step(
            {
                "release": release,
                "admit": [{"id": id, "tokens": PROMPTS[id], **sampling} for id in admit],
                "decode": decode,
            }
        )
        assert [id for id, _ in result["tokens"]] == [*admit, *(id for id, *_ in decode)]
        for id, token in result["tokens"]:
            tokens.setdefault(id, []).append(token)
        release = [id for id, _ in result["tokens"] if len(tokens[id]) == count]
    return tokens


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_greedy_is_what_transformers_generates(tiny: Path, step: Step, prompt: list[int]) -> None:
    """A sequence gets the tokens of transformers' generate, also past the point where its cache has to grow."""
    assert alone(step, prompt, 100) == reference(tiny, prompt, 100)


def test_company_changes_nothing(tiny: Path, step: Step) -> None:
    """Sequences of different lengths, admitted at different steps, each get the tokens they get alone."""
    assert together(step, 20, GREEDY) == {id: reference(tiny, prompt, 20) for id, prompt in PROMPTS.items()}


def test_seeded_sampling_is_reproducible(worker: CausalLM, step: Step) -> None:
    """A seed gives the same tokens alone, in company and at another world size; another seed gives others."""
    expected = {id: alone(worker.execute, prompt, 20, SEEDED) for id, prompt in PROMPTS.items()}
    assert together(step, 20, SEEDED) == expected
    assert alone(step, PROMPTS["a"], 20, SEEDED | {"seed": 4321}) != expected["a"]


def test_abort_frees_the_cache(worker: CausalLM) -> None:
    """A sequence that is released in a step, or aborted between steps, frees its cache; unknown ids are no error."""
    worker.execute({"admit": [{"id": id, "tokens": PROMPTS[id], **GREEDY} for id in "abc"]})
    held = worker.cached_tokens()
    worker.abort("a")
    assert worker.execute({"release": ["b", "never there"]}) == {"tokens": []}
    assert held == {"a": 5, "b": 1, "c": 45}
    assert worker.cached_tokens() == {"c": 45}
    worker.abort("c")
    worker.abort("c")
    assert worker.cached_tokens() == {}


BAD_STEPS = {
    "unknown sequence": ({"decode": [["x", 1, 0]]}, "'x' is not running"),
    "released sequence": ({"release": ["a"], "decode": [["a", 1, 5]]}, "'a' is not running"),
    "position behind": ({"decode": [["a", 1, 4]]}, "stands at position 5, but the step says 4"),
    "position ahead": ({"decode": [["a", 1, 6]]}, "stands at position 5, but the step says 6"),
    "token too large": ({"decode": [["a", VOCAB, 5]]}, f"token {VOCAB} of sequence 'a'"),
    "token negative": ({"decode": [["a", -1, 5]]}, "token -1 of sequence 'a'"),
    "prompt's token": ({"admit": [{"id": "x", "tokens": [0, VOCAB], **GREEDY}]}, f"token {VOCAB} of sequence 'x'"),
    "running already": ({"admit": [{"id": "a", "tokens": [1], **GREEDY}]}, "'a' can't be admitted"),
    "twice in a step": ({"decode": [["a", 1, 5], ["a", 1, 5]]}, "'a' stands in the step twice"),
    "admitted and going on": (
        {"admit": [{"id": "x", "tokens": [1], **GREEDY}], "decode": [["x", 1, 1]]},
        "'x' stands in the step twice",
    ),
    "prompt too long": ({"admit": [{"id": "x", "tokens": [1] * 257, **GREEDY}]}, "max_sequence_length"),
    "too many": ({"admit": [{"id": i, "tokens": [1], **GREEDY} for i in range(64)]}, "max_sequences"),
    "empty prompt": ({"admit": [{"id": "x", "tokens": [], **GREEDY}]}, "one or more integers"),
    "temperature": ({"admit": [{"id": "x", "tokens": [1], **GREEDY, "temperature": -1}]}, "'x': temperature"),
    "no sampling": ({"admit": [{"id": "x", "tokens": [1]}]}, "an admission must be"),
    "odd id": ({"decode": [[1.5, 1, 1]]}, "an integer or a string, not 1.5"),
    "odd entry": ({"decode": [["a", 1]]}, "must be [id, token, position]"),
    "odd list": ({"decode": {"a": 1}}, "'decode' must be a list, not dict"),
    "odd key": ({"decodes": []}, "keys 'release', 'admit' and 'decode' only"),
    "no mapping": ([], "must be a mapping"),
}


@pytest.mark.parametrize(("payload", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_bad_step_changes_nothing(tiny: Path, worker: CausalLM, payload: Any, message: str) -> None:
    """A bad step raises a ValueError that says what is wrong, and the sequence goes on as if it had not been sent."""
    first, second = reference(tiny, PROMPTS["a"], 2)
    assert worker.execute({"admit": [{"id": "a", "tokens": PROMPTS["a"], **GREEDY}]}) == {"tokens": [["a", first]]}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at below
        worker.execute(payload)
    assert message in str(caught.value)
    assert worker.execute({"decode": [["a", first, 5]]}) == {"tokens": [["a", second]]}


def test_bad_step_is_refused_by_every_rank_alike(tiny: Path, tiny_ranks: Ranks) -> None:
    """Every rank raises the same error without entering a collective, so that the group computes the next step."""
    first, second = reference(tiny, PROMPTS["a"], 2)
    tiny_ranks.step({"admit": [{"id": "a", "tokens": PROMPTS["a"], **GREEDY}]})
    for payload, message in BAD_STEPS.values():
        answers = tiny_ranks.call("execute", payload)
        assert answers[0] == answers[1] == answers[2]
        assert answers[0]["error"].startswith("ValueError")
        assert message in answers[0]["error"]
    assert tiny_ranks.step({"decode": [["a", first, 5]]}) == {"tokens": [["a", second]]}
    tiny_ranks.step({"release": ["a"]})


def test_failed_forward_changes_nothing(tiny: Path, worker: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails half-way through the model can be repeated."""
    first, second = reference(tiny, PROMPTS["a"], 2)
    worker.execute({"admit": [{"id": "a", "tokens": PROMPTS["a"], **GREEDY}]})
    again = {"admit": [{"id": "b", "tokens": [1, 2], **GREEDY}], "decode": [["a", first, 5]]}
    with monkeypatch.context() as patch:
        last_layer = worker._model._model.model.layers[1]
        patch.setattr(last_layer, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.execute(again)
    assert worker.cached_tokens() == {"a": 5}
    assert ["a", second] in worker.execute(again)["tokens"]


def test_a_full_sequence_is_refused_one_token_more(tiny: Path) -> None:
    """A sequence can be filled up to max_sequence_length; the next token is refused."""
    worker = new_worker(tiny, max_sequence_length=4, max_sequences=1)
    worker.execute({"admit": [{"id": 1, "tokens": [1, 2, 3], **GREEDY}]})
    worker.execute({"decode": [[1, 5, 3]]})
    with pytest.raises(ValueError, match="5 tokens, more than max_sequence_length"):
        worker.execute({"decode": [[1, 5, 4]]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "missing 1 required keyword-only argument: 'model'"),
        ({"model": "m", "modle": "m"}, "unexpected keyword argument 'modle'"),
        ({"model": 3}, "model must be a string"),
        ({"model": "m", "max_sequences": 0}, "max_sequences must be a positive integer, not 0"),
        ({"model": "m", "max_sequence_length": "9"}, "max_sequence_length must be a positive integer, not '9'"),
        ({"model": "/nowhere"}, "/nowhere is no Hugging Face model directory"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    """A missing, unknown or unusable option is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=message):
        CausalLM().setup(rank_info(options))


def test_wrong_dtype_is_refused(tiny: Path) -> None:
    """A dtype that is no floating-point type of torch is a ConfigError."""
    with pytest.raises(ConfigError, match="dtype must be a torch floating-point type"):
        new_worker(tiny, dtype="int8")


def test_world_size_that_does_not_divide_is_refused(tiny: Path) -> None:
    """A world size that does not divide the heads is a ConfigError that names those that do, before any rank meets."""
    with pytest.raises(ConfigError, match=r"world_size 2 .*num_key_value_heads 3.*use one of 1, 3"):
        CausalLM().setup(rank_info({"model": str(tiny)}, world_size=2))


def test_attention_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    """A model with sliding-window attention fails at start, not with wrong tokens."""
    config = transformers.MistralConfig(**(llama_config().to_dict() | {"model_type": "mistral", "sliding_window": 8}))
    with pytest.raises(ConfigError, match="uses sliding_window"):
        new_worker(save_tiny(tmp_path, config))


def test_layers_without_attention_are_refused(tmp_path: Path) -> None:
    """A model that mixes tokens in other ways than attention fails at start: packed sequences would mix."""
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, max_position_embeddings=9)
    directory = save_tiny(tmp_path, config)
    with pytest.raises(ConfigError, match="not supported"):
        new_worker(directory)


def test_rope_that_depends_on_the_batch_is_refused(tmp_path: Path) -> None:
    """A model whose positions are scaled by the longest sequence in the batch is refused."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="rope_type 'dynamic'"):
        new_worker(save_tiny(tmp_path, llama_config(rope_parameters=rope)))


@pytest.mark.parametrize("given", [None, "eth7"])
def test_gloo_uses_the_loopback_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """On one host gloo is pointed at the loopback interface; a user's own setting stays."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda backend, **options: joined.append(options))
    monkeypatch.setattr(process_group.torch, "set_num_threads", lambda count: None)
    process_group.init_process_group(rank_info({}, rendezvous=f"file://{tmp_path}/r"))
    assert process_group.os.environ["GLOO_SOCKET_IFNAME"] == (given or "lo")
    assert joined[0]["timeout"].total_seconds() == 60


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first time the model is converted
def test_smollm2_is_the_same_at_world_size_1_3_and_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 tells the same story on one rank, on three, and in transformers' generate; nobody asks the network."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the converter's torch leaves a cache of its own
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))
    directory = resolve_model()
    tokenizer = Tokenizer(directory)
    prompt = tokenizer.encode("Tell me a story about a dragon.")
    expected = reference(directory, prompt, 40)
    assert alone(new_worker(directory).execute, prompt, 40) == expected
    with three_ranks(directory, tmp_path) as ranks:
        generator = Generator(ranks, tokenizer, max_running=4, max_sequence_length=256)
        events = [event for _, event in generator.generate([prompt], SamplingParams(max_tokens=40))]
        assert not any(answer["result"] for answer in ranks.call("cached_tokens"))
    assert [event.token_id for event in events] == expected
    assert "".join(event.text for event in events) == tokenizer.decode(expected)
    assert "dragon" in tokenizer.decode(expected)
