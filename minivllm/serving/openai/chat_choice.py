"""One choice of a chat completion, whole or as the deltas of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.processes.messages import Piece
from minivllm.serving.answers.token_texts import TokenTexts
from minivllm.serving.openai.forms import finish_reason, logprob_entries
from minivllm.serving.parsing.answers import (
    AnswerParser,
    Event,
    ParsedAnswer,
    ThinkingDelta,
)
from minivllm.serving.parsing.tool_calls import ArgumentsDelta, ContentDelta, ToolCallBegin


class ChatChoice:
    """One completion of a conversation.

    Args:
        index: among the choices.
        parser: takes its text apart.
        texts: of tokens with log-probabilities; None gives none.
        top_logprobs: alternatives of each token.
        with_ids: also give token ids.
    """

    def __init__(
        self,
        index: int,
        parser: AnswerParser,
        texts: TokenTexts | None,
        top_logprobs: int,
        with_ids: bool,
    ) -> None:
        self.index, self.parser = index, parser
        self._texts, self._top, self._with_ids = texts, top_logprobs, with_ids
        self.has_begun = False  # the chunk with its role is out
        self.num_reasoning_tokens = 0

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The choice, from all of its pieces."""
        answer = ParsedAnswer()
        for piece in pieces:
            answer.add(self._events(piece))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if answer.text or not answer.calls else None,
            "refusal": None,
            "annotations": [],
        }
        if answer.thoughts:
            message |= _reasoning(answer.thoughts)
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        return {"index": self.index, "message": message, **self._further(pieces)}

    def role(self) -> dict[str, Any]:
        """The choice in its first chunk."""
        self.has_begun = True
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """The choice in the chunk of a piece; None where the piece adds nothing yet."""
        delta: dict[str, Any] = {}
        for event in self._events(piece):
            match event:
                case ThinkingDelta(text):
                    delta |= _reasoning(delta.get("reasoning", "") + text)
                case ContentDelta(text):
                    delta["content"] = delta.get("content", "") + text
                case ToolCallBegin(index, call_id, name):
                    function = {"name": name, "arguments": ""}
                    call = {"index": index, "id": call_id, "type": "function", "function": function}
                    delta.setdefault("tool_calls", []).append(call)
                case ArgumentsDelta(index, text):
                    calls = delta.setdefault("tool_calls", [])
                    if not calls or calls[-1]["index"] != index:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        further = self._further([piece])
        is_empty = not delta and piece.finish_reason is None
        if is_empty and self._texts is None and not self._with_ids:
            return None
        return {"index": self.index, "delta": delta, **further}

    def _events(self, piece: Piece) -> list[Event]:
        self.num_reasoning_tokens += self.parser.is_thinking and piece.token_id is not None
        events = self.parser.push(piece.text)
        return events + (self.parser.finish() if piece.finish_reason is not None else [])

    def _further(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What a choice has beside its message."""
        last = pieces[-1]
        reason = finish_reason(last)
        if reason == "stop" and self.parser.num_calls:
            reason = "tool_calls"
        given: dict[str, Any] = {"logprobs": None, "finish_reason": reason}
        if self._texts is not None:
            content = logprob_entries(pieces, self._texts, self._top)
            given["logprobs"] = {"content": content, "refusal": None}
        if last.stop_reason is not None:
            given["stop_reason"] = last.stop_reason
        if self._with_ids:
            given["token_ids"] = [p.token_id for p in pieces if p.token_id is not None]
        return given


def _reasoning(text: str) -> dict[str, str]:
    """Thoughts under both names that clients know."""
    return {"reasoning_content": text, "reasoning": text}
