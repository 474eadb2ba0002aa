"""Prints what transformers itself generates, greedily, as JSON: `reference.py MODEL MAX_TOKENS PROMPT`."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers


def main(directory: str, max_tokens: int, prompt: str) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    json.dump({"token_ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
