"""A checkpoint's tokenizer and chat template, without transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import BadInput
from minivllm.models.load.tokenizer_files import (
    TokenizerFiles,
    as_bad_input,
    has_tokenizer,
    read_tokenizer,
)

if TYPE_CHECKING:
    from minivllm.models.load.chat_template import Conversation

DATE = "26 Jul 2024"  # for templates that take one, so that prompts are the same on any day


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        place: a GGUF file with a tokenizer; or a folder with tokenizer.json, or vocab.json and
            merges.txt, and perhaps tokenizer_config.json, special_tokens_map.json and
            chat_template.jinja.
        files: what was read of it before, or None.

    Raises:
        BadInput: one of these files cannot be read.
    """

    def __init__(self, place: Path, files: TokenizerFiles | None = None) -> None:
        files = files or read_tokenizer(place)
        self.fast, self.special_tokens, self.chat_template = (
            *(files.fast, files.special_tokens),
            files.chat_template,
        )

    @classmethod
    def load(cls, place: Path | None) -> Tokenizer | None:
        """The tokenizer of a checkpoint, or None if it has none."""
        if place is None:
            return None
        if place.is_file():
            from minivllm.models.load.gguf.tokenizer import read_tokenizer as read_gguf

            files = read_gguf(place)
            return None if files is None else cls(place, files)
        return cls(place) if has_tokenizer(place) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds, unless they are disabled.

        Raises:
            BadInput: half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadInput(
                f"the text {text[:40]!r} holds what is no character: it cannot be encoded"
            ) from None
        try:
            # In a batch, as `encode` holds Python's lock: a server would stand still meanwhile.
            (encoding,) = self.fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        except BaseException as error:
            raise as_bad_input(
                f"the tokenizer cannot encode the text {text[:40]!r}", error
            ) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text, by default without special tokens; bytes that form no character become U+FFFD."""
        try:
            return self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise as_bad_input("the tokenizer cannot decode its own tokens", error) from None

    def render_chat(self, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation up to the assistant's turn; see `chat_text`."""
        return self.encode(self.chat_text(messages, **variables), add_special_tokens=False)

    def chat_text(self, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        """A conversation as the chat template writes it, special tokens included; see
        `conversation`.

        Raises:
            BadInput: as there; or the template rejects the messages, takes too long or too much
                memory; or it does not show the text to continue.
        """
        return self.conversation(messages, **variables).text()

    def conversation(
        self,
        messages: list[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Conversation:
        """A conversation that the chat template is to write.

        Args:
            messages: {"role": ..., "content": ...} in order; see `parse_messages`.
            add_generation_prompt: end where the assistant speaks.
            continue_final_message: end with the last message's text instead, which an answer
                continues, as transformers' `apply_chat_template` has it.
            variables: passed to the template, e.g. enable_thinking; its `tools` are described in
                the system turn where the template takes none, see `tool_texts`.

        Raises:
            BadInput: the checkpoint has no chat template, or a value is none of JSON's.
        """
        if self.chat_template is None:
            raise BadInput(
                "this checkpoint has no chat template: it is a base model; use preset=generate"
            )
        from minivllm.models.load.chat_template import Conversation  # only these models need it

        adds = add_generation_prompt and not continue_final_message
        known = {"add_generation_prompt": adds, **self.special_tokens, **variables}
        return Conversation.of(self.chat_template, messages, known, continue_final_message)

    @property
    def special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        added = self.fast.get_added_tokens_decoder()
        return [token_id for token_id, token in added.items() if token.special]

    @property
    def size(self) -> int:
        """Token ids from here on have no text; a model's vocabulary may be larger."""
        return int(max(self.fast.get_vocab().values(), default=-1)) + 1

    def special_id(self, name: str) -> int | None:
        """Token id of "bos_token", "eos_token", ...; None where the checkpoint names none."""
        return self.fast.token_to_id(self.special_tokens.get(name, ""))

    def token_id(self, text: str) -> int | None:
        """The id of the special token with this text; None if there is none."""
        token_id = self.fast.token_to_id(text)
        added = self.fast.get_added_tokens_decoder().get(token_id) if token_id is not None else None
        return token_id if added is not None and added.special else None


def chat_renderer(
    tokenizer: object,
) -> Callable[[Sequence[dict[str, Any]]], tuple[str, tuple[int, ...]]] | None:
    """What writes messages of a workload as a model is used to them, as text and as token ids. None
    for a model without a chat template, or none that is known of."""
    if not isinstance(getattr(tokenizer, "chat_template", None), str):
        return None
    known: Any = tokenizer

    def render(messages: Sequence[dict[str, Any]]) -> tuple[str, tuple[int, ...]]:
        text = known.chat_text(list(messages), date_string=DATE)
        return text, tuple(known.encode(text, add_special_tokens=False))

    return render
