"""Writes a small random Llama with a byte-level tokenizer: `make_tiny_model.py DIRECTORY`.

World sizes 1 and 3 divide it. A program of its own, so that the tests' process need not import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tokenizers
import torch
import transformers

END = "<end>"


def main(directory: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        initializer_range=0.3,  # wide, so that the random model has clear favourites
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
