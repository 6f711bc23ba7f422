"""Text to token ids and back, read from a checkpoint's tokenizer.json (no transformers needed)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from minivllm.errors import BadInput


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        folder: the checkpoint, with tokenizer.json and perhaps tokenizer_config.json and
            chat_template.jinja.

    Raises:
        BadInput: tokenizer.json cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self.fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BadInput(
                f"{path} cannot be read as a tokenizer ({error}); save the checkpoint again"
            ) from error
        config_path = folder / "tokenizer_config.json"
        self.config: dict[str, Any] = json.loads(config_path.read_text()) if config_path.is_file() else {}
        template_path = folder / "chat_template.jinja"
        self.chat_template: str | None = (
            template_path.read_text() if template_path.is_file() else self.config.get("chat_template")
        )

    @classmethod
    def load(cls, folder: Path | None) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder, or None if it has none."""
        if folder is None or not (folder / "tokenizer.json").is_file():
            return None
        return cls(folder)

    def encode(self, text: str) -> list[int]:
        """Token ids, with whatever special tokens the tokenizer itself adds."""
        return self.fast.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that form no character become U+FFFD."""
        return self.fast.decode(list(token_ids), skip_special_tokens=True)

    def render_chat(self, messages: list[dict[str, str]], **variables: object) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks.

        Args:
            messages: {"role": ..., "content": ...} in order.
            variables: passed to the template, e.g. enable_thinking.

        Raises:
            BadInput: the checkpoint has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise BadInput("this checkpoint has no chat template: it is a base model; use preset=generate")
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals["raise_exception"] = raise_exception
        special = {name: self._special(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            text = environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=True, **special, **variables
            )
        except TemplateError as error:
            raise BadInput(f"the chat template refuses this conversation: {error}") from error
        return self.fast.encode(text, add_special_tokens=False).ids

    def _special(self, name: str) -> str:
        value = self.config.get(name) or ""
        return value["content"] if isinstance(value, dict) else value


class Detokenizer:
    """Text of one growing output, safe on characters split over tokens and on stop strings.

    Text that may yet turn out to be the beginning of a stop string is held back.

    Args:
        tokenizer: decodes.
        stop: strings that end the output.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._held = ""
        self._decoded = ""  # all text so far, held back or not
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take a token; the new text that is certain."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer.fast, token_id) or ""
        self._decoded += piece
        return self._release(piece)

    def finish(self) -> str:
        """The output has ended: the text still held back, unfinished characters as U+FFFD."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids)
        tail = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        self._decoded += tail
        text = self._release(tail)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        text = self._held + piece
        hits = [position for position in (text.find(stop) for stop in self._stop) if position >= 0]
        if hits:
            self.stopped, self._held = True, ""
            return text[: min(hits)]
        keep = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), keep, -1):
                if stop.startswith(text[len(text) - length :]):
                    keep = length
                    break
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]
