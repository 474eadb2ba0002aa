"""`ExecutorConfig`: every field is validated and documented, and comes from one of four places in a known order."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from stepcast import ConfigError, ExecutorConfig, Worker
from stepcast.runtime.config import BACKENDS, ENVIRONMENT_PREFIX, LOG_FORMATS, LOG_LEVELS, START_METHODS

WORKER = "package.module:Class"
TYPES = {each.name: str(each.type) for each in fields(ExecutorConfig)}
INTS = [name for name, kind in TYPES.items() if kind == "int"]
SECONDS = [name for name, kind in TYPES.items() if kind.startswith("float")]
TEXTS = [name for name, kind in TYPES.items() if kind == "str"]
SWITCHES = [name for name, kind in TYPES.items() if kind == "bool"]
MAPPINGS = [name for name, kind in TYPES.items() if kind.startswith("Mapping")]


def config(**settings: Any) -> ExecutorConfig:
    return ExecutorConfig(**{"worker": WORKER, **settings})


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    return str(caught.value)


def documented_fields() -> list[str]:
    section = inspect.cleandoc(ExecutorConfig.__doc__ or "").partition("Attributes:\n")[2]
    return re.findall(r"^ {4}(\w+):", section, re.MULTILINE)


# Each field.


def test_every_field_stands_in_the_class_docstring_in_order() -> None:
    """The docstring's Attributes are the fields, all of them, in the order of their definition."""
    assert documented_fields() == list(TYPES)


def test_every_limit_says_its_unit_and_every_unit_is_seconds() -> None:
    """A field is a number of seconds exactly where its name ends in _s."""
    assert [name for name in TYPES if name.endswith("_s")] == SECONDS
    assert SECONDS


def test_the_defaults_are_valid() -> None:
    """A worker's class is all that must be given."""
    assert config().world_size == 1
    with pytest.raises(TypeError, match="worker"):
        ExecutorConfig()  # type: ignore[call-arg]


def test_a_value_of_the_wrong_type_is_refused() -> None:
    """The error names the field, the value, the type that it must have and the one that it has."""
    wrong: list[tuple[str, Any]] = [
        *((name, value) for name in INTS for value in ("3", 1.5, None, True)),
        *((name, value) for name in SECONDS for value in ("1", True, [1.0])),
        *((name, None) for name in SECONDS if TYPES[name] == "float"),
        *((name, value) for name in TEXTS for value in (1, None, b"text")),
        *((name, value) for name in SWITCHES for value in (None, 1, "true")),
        *((name, value) for name in MAPPINGS for value in (None, "a=b", ["a"], 1)),
        *((name, 1) for name, kind in TYPES.items() if kind == "str | None"),
    ]
    assert {name for name, _ in wrong} == set(TYPES) - {"worker"}
    for name, value in wrong:
        text = refusal(**{name: value})
        assert text == f"{name}={value!r}: must be of type {TYPES[name]}, is {type(value).__name__}"


def test_seconds_out_of_range_are_refused() -> None:
    """No limit may be zero, negative, endless, or longer than the kernel can wait."""
    for name in SECONDS:
        for value in (0, 0.0, -1, -0.5, math.inf, -math.inf, math.nan, 1e9):
            allowed = "must be a number of seconds above 0, at most 2000000"
            assert refusal(**{name: value}) == f"{name}={value!r}: {allowed}"


def test_whole_seconds_may_be_given_as_an_int() -> None:
    """An int is as good as a float, up to the largest limit."""
    for name in SECONDS:
        for value in (2, 2_000_000):
            assert getattr(config(**{"heartbeat_interval_s": 0.1, name: value}), name) == value


def test_the_limit_for_unresponsive_ranks_leaves_time_to_find_them() -> None:
    """Three heartbeat intervals; none is the default."""
    assert config().unresponsive_timeout_s is None
    assert config(heartbeat_interval_s=0.5, unresponsive_timeout_s=1.5).unresponsive_timeout_s == 1.5
    assert config(heartbeat_interval_s=0.1, unresponsive_timeout_s=0.3).unresponsive_timeout_s == 0.3
    text = refusal(heartbeat_interval_s=0.5, unresponsive_timeout_s=1.4)
    assert text == "unresponsive_timeout_s=1.4: must be at least 3 times heartbeat_interval_s=0.5"


def test_counts_and_sizes_below_one_are_refused() -> None:
    """The error names the field and the least that is allowed."""
    for name in ("world_size", "max_in_flight", "max_in_flight_bytes", "max_message_bytes"):
        for value in (0, -1):
            assert refusal(**{name: value}) == f"{name}={value}: must be at least 1"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("backend", BACKENDS),
        ("start_method", START_METHODS),
        ("log_format", LOG_FORMATS),
        ("log_level", LOG_LEVELS),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(name: str, allowed: tuple[str, ...]) -> None:
    """The error lists all that can be chosen, and each of them can."""
    text = refusal(**{name: "other"})
    assert text.startswith(f"{name}='other': must be one of ")
    for each in allowed:
        assert repr(each) in text
        assert getattr(config(**{name: each}), name) == each


def test_an_output_rank_outside_the_group_is_refused() -> None:
    """The error names the ranks that there are."""
    for rank in (-1, 2, 100):
        text = refusal(world_size=2, output_rank=rank)
        assert text == f"output_rank={rank}: must be a rank of the group, 0 to 1"
    assert config(world_size=2, output_rank=1).output_rank == 1


def test_what_names_no_worker_class_is_refused() -> None:
    """The error tells the ways to name one."""
    for worker in ("", ":", "module", "module:", ":Class", "script.py", "script.py:", int, object(), None, Worker()):
        text = refusal(worker=worker)
        assert text.startswith(f"worker={worker!r}: must be a subclass of stepcast.Worker, or ")


def test_a_worker_is_named_or_given_as_its_class() -> None:
    """All three forms are taken as they are; whether the class exists is known when it is loaded."""
    for worker in ("m:C", "a.b.c:Outer.Inner", "some/where.py:C", "C:/odd.py:C", Worker):
        assert config(worker=worker).worker == worker


def test_worker_options_that_can_not_be_handed_over_are_refused() -> None:
    """Options are plain MessagePack values, since every rank is told them by value."""
    for value in (object(), {1, 2}, 1 << 70, "\udc80", [lambda: 0], {(1, 2): 3}):
        text = refusal(worker_options={"a": value})
        assert text.startswith("worker_options must hold plain MessagePack values: ")


def test_an_environment_that_no_process_can_have_is_refused() -> None:
    """Names and values are texts, and the error shows the one that is wrong."""
    for variables in ({"A": 1}, {"A": None}, {1: "a"}, {b"A": "a"}, {"": "a"}, {"A=B": "a"}, {"A\0": "a"}, {"A": "\0"}):
        assert refusal(worker_env=variables).startswith(f"worker_env[{next(iter(variables))!r}]=")


# Immutable.


def test_no_field_can_be_assigned() -> None:
    """A configuration does not change under a running group."""
    made = config()
    for name in TYPES:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, getattr(made, name))


def test_mappings_are_copies_that_can_not_be_written() -> None:
    """Neither the caller's dict nor the field's own reaches the settings of a running group."""
    for name in MAPPINGS:
        given: dict[str, Any] = {"A": "1"}
        made = config(**{name: given})
        given["A"] = "2"
        given["B"] = "3"
        assert dict(getattr(made, name)) == {"A": "1"}
        with pytest.raises(TypeError):
            getattr(made, name)["A"] = "4"


def test_values_inside_the_worker_options_are_copies() -> None:
    """A list or dict that the caller goes on using is not the group's."""
    inner: dict[str, Any] = {"layers": [1, 2], "names": {7: "seven"}}
    made = config(worker_options={"inner": inner})
    inner["layers"].append(3)
    inner["names"][8] = "eight"
    assert made.worker_options == {"inner": {"layers": [1, 2], "names": {7: "seven"}}}


def test_replace_gives_a_validated_copy() -> None:
    """The original stays as it was, and a wrong change is refused as in the first place."""
    made = config(world_size=2, worker_env={"A": "1"})
    other = made.replace(world_size=3, output_rank=2)
    assert (made.world_size, other.world_size, other.output_rank) == (2, 3, 2)
    assert other.worker_env == {"A": "1"}
    with pytest.raises(ConfigError, match="output_rank=3"):
        made.replace(output_rank=3)


# From files and variables.


def test_a_file_gives_settings_at_its_top_level(tmp_path: Path) -> None:
    """Every kind of field can stand in a TOML file."""
    path = tmp_path / "stepcast.toml"
    path.write_text(
        'worker = "m:C"\nworld_size = 2\nbackend = "mp"\nstep_timeout_s = 7\n'
        '[worker_options]\nlayers = [1, 2]\n[worker_env]\nA = "1"\n'
    )
    made = ExecutorConfig.load(path, environ={})
    assert (made.worker, made.world_size, made.backend, made.step_timeout_s) == ("m:C", 2, "mp", 7)
    assert (made.worker_options, made.worker_env) == ({"layers": [1, 2]}, {"A": "1"})


def test_a_file_gives_settings_in_a_table_of_their_own(tmp_path: Path) -> None:
    """Where there is a table [stepcast], the rest of the file is somebody else's."""
    path = tmp_path / "pyproject.toml"
    path.write_text('world_size = "mine"\n[stepcast]\nworker = "m:C"\nworld_size = 3\n[other]\nx = 1\n')
    assert ExecutorConfig.load(str(path), environ={}).world_size == 3


def test_a_setting_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """The error names what is unknown, and what is known."""
    path = tmp_path / "stepcast.toml"
    path.write_text('worker = "m:C"\nworld_sise = 3\nbackend_ = "mp"\n')
    with pytest.raises(ConfigError) as caught:
        ExecutorConfig.load(path, environ={})
    assert str(caught.value).startswith("unknown setting backend_, world_sise; known are ")
    assert all(name in str(caught.value) for name in TYPES)
    with pytest.raises(ConfigError, match="unknown setting sise"):
        ExecutorConfig.load(environ={}, worker="m:C", sise=1)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    """The error names the file, and what is wrong with it."""
    path = tmp_path / "broken.toml"
    for content in (b"world_size = ", b"[stepcast", b"a = 1\na = 2", b"\xff\xfe", b"a = 1979-99-99"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"the configuration file .*broken\.toml can't be read: "):
            ExecutorConfig.load(path, environ={})


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    """The error names the path."""
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(f"the configuration file {path} can't be read: ")):
            ExecutorConfig.load(path, environ={})


def test_a_stepcast_that_is_no_table_is_refused(tmp_path: Path) -> None:
    """The error says what it must be."""
    path = tmp_path / "stepcast.toml"
    path.write_text("stepcast = 3\n")
    with pytest.raises(ConfigError, match=r"stepcast\.toml: \[stepcast\] must be a table$"):
        ExecutorConfig.load(path, environ={})


def test_every_plain_field_can_be_given_by_a_variable() -> None:
    """STEPCAST_ and the field's name in capitals; numbers are parsed."""
    values: dict[str, Any] = {"worker": "m:D", "backend": "mp", "output_rank": 0, "start_method": "fork"}
    values |= {"log_format": "json", "log_level": "DEBUG", "keepalive": "bus", "restart": "on_failure"}
    values["unresponsive_timeout_s"] = 7.5
    for name in set(TYPES) - set(MAPPINGS) - set(SWITCHES):
        value = values.get(name, {"int": 2, "float": 2.5}.get(TYPES[name], "text"))
        environ = {"STEPCAST_WORKER": WORKER, ENVIRONMENT_PREFIX + name.upper(): str(value)}
        found = getattr(ExecutorConfig.load(environ=environ), name)
        assert (found, type(found)) == (value, type(value))


def test_a_switch_can_be_given_by_a_variable() -> None:
    for name in SWITCHES:
        variable = ENVIRONMENT_PREFIX + name.upper()
        for text, value in (("true", True), ("1", True), ("False", False), ("0", False)):
            assert getattr(ExecutorConfig.load(environ={variable: text}, worker=WORKER), name) is value
        with pytest.raises(ConfigError, match=f"^{variable}='yes': must be of type bool$"):
            ExecutorConfig.load(environ={variable: "yes"}, worker=WORKER)


def test_a_variable_that_is_no_number_is_refused() -> None:
    """The error names the variable, its text and the type."""
    for name, text in (("world_size", "two"), ("world_size", "1.5"), ("world_size", ""), ("linger_s", "x")):
        variable = ENVIRONMENT_PREFIX + name.upper()
        with pytest.raises(ConfigError) as caught:
            ExecutorConfig.load(environ={variable: text}, worker=WORKER)
        assert str(caught.value) == f"{variable}={text!r}: must be of type {TYPES[name]}"


def test_a_mapping_can_not_be_given_by_a_variable() -> None:
    """It is refused, not ignored; the error says where it can be given."""
    for name in MAPPINGS:
        told = rf"^STEPCAST_{name.upper()}: {name} can't be given by the environment; use a file or an argument$"
        with pytest.raises(ConfigError, match=told):
            ExecutorConfig.load(environ={f"STEPCAST_{name.upper()}": "{}"}, worker=WORKER)


def test_variables_of_other_parts_are_left_alone() -> None:
    """A variable with the prefix that names no field is the embedder's."""
    made = ExecutorConfig.load(environ={"STEPCAST_SOMETHING_ELSE": "1", "WORLD_SIZE": "9"}, worker=WORKER)
    assert made == config()


def test_the_process_environment_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` without arguments is what a command line does."""
    monkeypatch.setenv("STEPCAST_WORKER", "m:E")
    monkeypatch.setenv("STEPCAST_WORLD_SIZE", "3")
    made = ExecutorConfig.load()
    assert (made.worker, made.world_size) == ("m:E", 3)


def test_an_argument_wins_over_a_variable_over_a_file_over_a_default(tmp_path: Path) -> None:
    """Each setting comes from the most particular place that gives it."""
    path = tmp_path / "stepcast.toml"
    path.write_text('worker = "m:C"\nmax_in_flight = 2\nlinger_s = 2.0\ndevice = "file"\n')
    environ = {"STEPCAST_MAX_IN_FLIGHT": "3", "STEPCAST_LINGER_S": "3"}
    made = ExecutorConfig.load(path, environ=environ, max_in_flight=4)
    assert (made.max_in_flight, made.linger_s, made.device, made.log_level) == (4, 3.0, "file", "INFO")


def test_a_wrong_setting_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    """A file and a variable are validated like an argument."""
    path = tmp_path / "stepcast.toml"
    path.write_text('worker = "m:C"\nworld_size = "two"\n')
    with pytest.raises(ConfigError, match=r"^world_size='two': must be of type int"):
        ExecutorConfig.load(path, environ={})
    with pytest.raises(ConfigError, match=r"^world_size=0: "):
        ExecutorConfig.load(environ={"STEPCAST_WORLD_SIZE": "0"}, worker=WORKER)


# The backend.


def test_the_backend_is_chosen_by_the_world_size() -> None:
    """One rank runs in this process unless a process is asked for; more need processes."""
    for backend, world_size, resolved in ((None, 1, "uni"), (None, 2, "mp"), ("mp", 1, "mp"), ("uni", 1, "uni")):
        assert config(backend=backend, world_size=world_size).resolved_backend == resolved


def test_one_process_can_not_hold_two_ranks() -> None:
    """The error says which backend can."""
    with pytest.raises(ConfigError, match=r"^backend='uni' runs one rank, but world_size=2: use backend='mp'$"):
        config(backend="uni", world_size=2)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a process that torchrun has started as one of three."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "3")


@pytest.mark.usefixtures("torchrun")
def test_under_torchrun_its_ranks_are_the_group() -> None:
    assert config().world_size == 3
    assert config().resolved_backend == "torchrun"
    assert config(backend="torchrun").resolved_backend == "torchrun"


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_no_other_group_is_started_inside_torchrun(backend: str) -> None:
    """It has started every rank already; the error names the ways out."""
    with pytest.raises(ConfigError, match=r"started by torchrun.*leave the backend at 'torchrun'.*without torchrun"):
        config(backend=backend).resolved_backend  # noqa: B018


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("settings", "told"),
    [({"restart": "on_failure"}, "--max-restarts"), ({"start_method": "fork"}, "torchrun has started the ranks")],
)
def test_what_is_the_agents_business_is_refused_under_torchrun(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(**settings).resolved_backend  # noqa: B018


def test_torchruns_backend_needs_torchrun() -> None:
    with pytest.raises(ConfigError, match=r"not started by it: run `torchrun --nproc-per-node N program`"):
        config(backend="torchrun").resolved_backend  # noqa: B018


def test_a_world_size_of_torchruns_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="give world_size"):
        config()


def test_one_rank_in_this_process_is_fine_inside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts nothing that torchrun has started."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert config(backend="uni", world_size=1).resolved_backend == "uni"
