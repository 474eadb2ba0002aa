"""Text to tokens and back, from a model directory's own files; needs neither transformers nor torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stepcast.bus.errors import ConfigError
from stepcast.workers.model_config import read_model_config, text_config

#: How a decoder shows bytes that are no whole character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A model's tokenizer, its chat template and its end-of-sequence tokens.

    Args:
        directory: a Hugging Face model directory with a tokenizer.json.

    Attributes:
        eos_token_ids: tokens that end an answer.
        vocab_size: tokens that the tokenizer knows; the model's vocabulary may be larger.

    Raises:
        ConfigError: a file is missing or can't be read.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"{directory / 'tokenizer.json'} can't be read: {error}") from error
        settings = _read_json(directory / "tokenizer_config.json")
        self.eos_token_ids = _eos_token_ids(directory)
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self._special_tokens = {
            name: token["content"] if isinstance(token, Mapping) else token
            for name, token in settings.items()
            if name.endswith("_token") and isinstance(token, str | Mapping)
        }
        source = _chat_template(directory, settings)
        self._template = _compile(source, directory) if source is not None else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was made for conversations."""
        return self._template is not None

    def encode(self, prompt: str | Sequence[Mapping[str, str]], *, chat: bool = True) -> list[int]:
        """Turn a prompt into tokens.

        An instruction-tuned model answers well only in the format that it was trained on. So where the model has a chat
        template a plain text becomes one user's message in it, up to where the assistant's answer begins.

        Args:
            prompt: a text, or a conversation: messages with "role" and "content".
            chat: False to take a text as it is, to be continued.

        Returns:
            Token ids, at least one.

        Raises:
            ConfigError: a conversation where the model has no chat template, the template refuses it or chat is False;
                or a prompt without a token.
        """
        if isinstance(prompt, str) and not (chat and self._template):
            ids: list[int] = self._tokenizer.encode(prompt).ids
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            # The template writes the special tokens itself.
            ids = self._tokenizer.encode(self._render(messages, chat=chat), add_special_tokens=False).ids
        if not ids:
            raise ConfigError("the prompt is empty: it has no token")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn tokens into text, without special tokens.

        Args:
            ids: token ids.
        """
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental detokenizer, for one answer."""
        return Detokenizer(self)

    def _render(self, messages: Sequence[Mapping[str, str]], *, chat: bool) -> str:
        if not chat or self._template is None:
            raise ConfigError("a conversation needs a chat template" + (", which the model lacks" if chat else ""))
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template refuses the conversation: {error}") from error


class Detokenizer:
    """Turns one answer's tokens into text as they come.

    A token may end inside a character. That character waits until it is whole, so that no piece ever holds a part of
    one; an answer that breaks off inside a character ends before it. Bytes that never become a character are shown as
    U+FFFD, once a whole character follows.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Only the last tokens are decoded again: those of the last whole text, for they decide about a space before
        # the next; and those since.
        self._whole: list[int] = []
        self._since: list[int] = []
        self._given = 0

    def push(self, token: int) -> str:
        """Take a token.

        Args:
            token: its id.

        Returns:
            The text that it completes; often none.
        """
        self._since.append(token)
        before = len(self._tokenizer.decode(self._whole))
        text = self._tokenizer.decode(self._whole + self._since)[before:]
        stable = text.rstrip(_REPLACEMENT)
        piece = stable[self._given :]
        self._given = max(self._given, len(stable))
        if text and stable == text:
            self._whole, self._since, self._given = self._since, [], 0
        return piece


def _eos_token_ids(directory: Path) -> frozenset[int]:
    # What a model generates until is in its generation config; the other is for models that have none.
    for config in (_read_json(directory / "generation_config.json"), text_config(read_model_config(directory))):
        eos = config.get("eos_token_id")
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _compile(source: str, directory: Path) -> jinja2.Template:
    # A template comes with the model, so it is no more trusted than a web page: it runs in a sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _raise_template_error, "strftime_now": _strftime_now}
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template in {directory} is not valid: {error}") from error


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


def _read_json(path: Path) -> dict[str, Any]:
    """Read an optional file."""
    if not path.is_file():
        return {}
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return value
