"""Text to token ids and back, read from a checkpoint's tokenizer.json (no transformers needed)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from minivllm.errors import BadInput
from minivllm.models.checkpoint import read_json


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
        self.fast.no_truncation()  # what a checkpoint was trained with is no part of what a prompt says
        self.fast.no_padding()
        config_path = folder / "tokenizer_config.json"
        self.config: dict[str, Any] = (
            read_json(config_path, "repair or remove it") if config_path.is_file() else {}
        )
        template_path = folder / "chat_template.jinja"
        self.chat_template: str | None = (
            template_path.read_text(encoding="utf-8")
            if template_path.is_file()
            else _default_template(self.config.get("chat_template"))
        )

    @classmethod
    def load(cls, folder: Path | None) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder, or None if it has none."""
        if folder is None or not (folder / "tokenizer.json").is_file():
            return None
        return cls(folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with whatever special tokens the tokenizer itself adds unless told not to.

        Raises:
            BadInput: half of a surrogate pair, which is no character.
        """
        try:
            return self.fast.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise BadInput(
                f"the text {text[:40]!r} holds what is no character: it cannot be encoded"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that form no character become U+FFFD."""
        return self.fast.decode(list(token_ids), skip_special_tokens=True)

    def render_chat(self, messages: list[dict[str, str]], **variables: Any) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks; see `chat_text`."""
        return self.encode(self.chat_text(messages, **variables), add_special_tokens=False)

    def chat_text(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """A conversation as the chat template writes it, special tokens included.

        Args:
            messages: {"role": ..., "content": ...} in order.
            add_generation_prompt: end where the assistant speaks.
            variables: passed to the template, e.g. enable_thinking.

        Raises:
            BadInput: the checkpoint has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise BadInput("this checkpoint has no chat template: it is a base model; use preset=generate")
        from minivllm.engine.chat_template import render  # jinja2 is not needed without one

        special = {name: self._special(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            known = {"add_generation_prompt": add_generation_prompt, **special, **variables}
            return render(self.chat_template, messages, **known)
        except Exception as error:  # a template is somebody else's program and may raise anything
            raise BadInput(f"the chat template refuses this conversation: {error}") from error

    def special_id(self, name: str) -> int | None:
        """Token id of "bos_token", "eos_token", ...; None where the checkpoint names none."""
        return self.fast.token_to_id(self._special(name))

    def _special(self, name: str) -> str:
        value = self.config.get(name) or ""
        return value["content"] if isinstance(value, dict) else value


def _default_template(templates: Any) -> str | None:
    """The template to chat with, where a checkpoint names several."""
    if not isinstance(templates, list):
        return templates if isinstance(templates, str) else None
    named = {entry.get("name"): entry.get("template") for entry in templates}
    return named.get("default")


class Detokenizer:
    """Text of one growing output, safe on characters split over tokens and on stop strings.

    A token is decoded together with the few before it, those of the prompt included, because what it reads
    as may depend on them (SentencePiece drops a leading space, byte tokens make up one character); the new
    text is what the longer decoding has more. The algorithm is that of text-generation-inference and vLLM.
    Text that may yet turn out to be the beginning of a stop string is held back.

    Args:
        tokenizer: decodes.
        stop: strings that end the output.
        prompt_token_ids: what the output follows.
    """

    CONTEXT = 6  # tokens of the prompt that the first output token is decoded with

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        start = max(0, len(prompt_token_ids) - self.CONTEXT)
        begins = range(start, max(-1, start - 4), -1)  # a character may be four tokens, of a byte each
        cut = (i for i in begins if not tokenizer.decode(prompt_token_ids[i:]).startswith("\ufffd"))
        self._ids = list(prompt_token_ids[next(cut, start) :])
        self._prefix, self._read = 0, len(self._ids)  # decoded with, and already told
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take a token; the new text that is certain. Stop strings end the text only where `may_stop`."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        return self._release(self._new_text(final=False), may_stop)

    def finish(self) -> str:
        """The output has ended: the text still held back, unfinished characters as U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._new_text(final=True), may_stop=True)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _new_text(self, final: bool) -> str:
        """What the tokens since the last call add; nothing while a character is incomplete."""
        known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        whole = self._tokenizer.decode(self._ids[self._prefix :])
        if len(whole) <= len(known) or (whole.endswith("\ufffd") and not final):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return whole[len(known) :]

    def _release(self, piece: str, may_stop: bool) -> str:
        text = self._held + piece
        if not may_stop:
            self._held = ""
            return text
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
