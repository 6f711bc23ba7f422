"""`TerminalModel`, the interface of what answers in a terminal: an engine here, or a server."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from minivllm.engine.options import SamplingParams
from minivllm.interactive.answer import Answer
from minivllm.models.vision.picture import data_uri, open_picture
from minivllm.platform.untrusted import MIB, read_bytes

MOST_BYTES = 32 * MIB  # of a picture's file


@dataclass(frozen=True)
class Turn:
    """What is to be answered: the user's text after the conversation so far, and the pictures that
    it is about, as data: URIs."""

    text: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    system: str | None = None
    images: tuple[str, ...] = ()

    @property
    def user(self) -> dict[str, Any]:
        """The user's text as a message, behind its pictures."""
        if not self.images:
            return {"role": "user", "content": self.text}
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All messages, with the system prompt and the user's text."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages, self.user]


def picture_uri(path: str) -> tuple[str, tuple[int, int]]:
    """A picture's file as a data: URI, and the picture's width and height.

    Raises:
        BadInput: there is no such file, or it is no picture or too large.
    """
    what = f"/image {path}"
    data = read_bytes(Path(path).expanduser(), MOST_BYTES, what, "give a smaller picture")
    size = open_picture(data, what=what).size
    return data_uri(data), size


def picture_bytes(uri: str) -> bytes:
    """The file that `picture_uri` has made a URI of."""
    return base64.b64decode(uri.partition(",")[2])


@dataclass(frozen=True)
class ChatDecoding:
    """The decoding parameters, and the names of those that the user has set.

    A server is sent these names alone, so that the others are as it has them.
    """

    params: SamplingParams
    given: Collection[str] = ()


class TerminalModel(Protocol):
    """Answers turns. A base model, one without a chat template, completes each text by itself."""

    name: str
    form: str  # how it computes, in a word or two: the quantisation, or the server
    is_base: bool
    decoding: ChatDecoding  # at the start of a conversation

    def check(self, decoding: ChatDecoding) -> None:
        """Raise BadInput for decoding parameters that it cannot be given."""

    def answer(
        self,
        turn: Turn,
        decoding: ChatDecoding,
        show: Callable[[bool, str], None],
        watch: Callable[[Answer], None],
    ) -> Answer:
        """Stream the answer, see `collect`; a base model shows the text itself before it.

        Raises:
            BadInput: the turn cannot be answered.
        """

    def cache_use(self) -> str:
        """How much of the KV cache is in use; empty where that is not known."""

    def weights(self) -> str:
        """The size of the weights; empty where that is not known."""

    def abort(self) -> None:
        """Stop whatever is still running."""

    def close(self) -> None:
        """Release its memory or connection."""
