"""Converts a GGUF file into a Hugging Face model directory: `python -m stepcast.workers.convert SRC DST`.

A program of its own, so that torch and transformers stay out of the driver that needs the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Path, destination: Path) -> None:
    """Write a GGUF model as safetensors, config, tokenizer and chat template.

    The weights are dequantized to float32: what a quantized weight stands for is kept to the bit.

    Args:
        source: the GGUF file, of a causal language model whose kind transformers can read.
        destination: an existing directory to write into.

    Raises:
        Exception: whatever transformers raises for a file that it can't read.
    """
    quantized = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    # transformers won't save a model that came out of a GGUF file, even though it holds plain weights now; so they are
    # moved into one that did not.
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(destination)

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    tokenizer.save_pretrained(destination)
    _split_digits(source, destination / "tokenizer.json")


def _split_digits(source: Path, path: Path) -> None:
    """Restore what transformers leaves out of SmolLM's tokenizer: it takes each digit for itself.

    Without it "a  1" (two spaces) becomes other tokens than those the model was trained on.
    """
    kind = GGUFReader(source).get_field("tokenizer.ggml.pre")
    if kind is None or kind.contents() != "smollm":
        return
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]
    )
    tokenizer.save(str(path))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
