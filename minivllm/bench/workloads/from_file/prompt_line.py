"""One request of a file of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.platform.untrusted import printable

NAME_LENGTH = 40  # most characters of a file's own names in a note


@dataclass(frozen=True)
class PromptLine:
    """One request: text, token ids or only their number, never two of these.

    `where` is the file and line number, for messages.
    `answer` is the recorded answer, as in ShareGPT: the output has its length.
    `messages` are what `text` is made of, for a model that has a chat template.
    """

    where: str
    text: str | None
    token_ids: tuple[int, ...] | None
    max_tokens: int | None
    answer: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    input_len: int | None = None  # of a prompt that is drawn
    sampling: Mapping[str, Any] | None = None  # fields of SamplingParams
    # what the chat API takes as it stands: messages, and what tools there are
    chat: Mapping[str, Any] | None = None
    images: int = 0  # in the messages
    pictures: tuple[str, ...] = ()  # paths of the prompt's images, as the line has them

    @property
    def ignore_eos(self) -> bool | None:
        """What the line says of it; None where it does not."""
        return None if self.sampling is None else self.sampling.get("ignore_eos")


def short_name(key: str) -> str:
    """A file's own name for something, as it may be shown."""
    return printable(key)[:NAME_LENGTH]
