"""Parts of answers that OpenAI's APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.serving.answers.token_texts import TokenTexts
from minivllm.serving.errors import ApiError
from minivllm.serving.http.answers import event
from minivllm.serving.processes.messages import Piece
from minivllm.serving.processes.token_stream import TokenStream


def usage(streams: Sequence[TokenStream]) -> dict[str, Any]:
    """How many tokens a call took."""
    prompt = sum(stream.num_prompt_tokens for stream in streams)
    output = sum(stream.num_output_tokens for stream in streams)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(stream.num_cached_tokens for stream in streams)
        },
    }


def finish_reason(piece: Piece) -> str | None:
    """Why a completion ended, in OpenAI's words; None while it goes on."""
    return "stop" if piece.finish_reason == "abort" else piece.finish_reason


def logprob_entries(pieces: Sequence[Piece], texts: TokenTexts, top: int) -> list[dict[str, Any]]:
    """The log-probabilities of tokens, each with its alternatives.

    Args:
        pieces: with the tokens.
        texts: of tokens.
        top: alternatives of each.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = texts.data(token_id)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    entries = []
    for piece in pieces:
        if piece.token_id is None or piece.logprobs is None:
            continue
        best = sorted(piece.logprobs.items(), key=lambda item: -item[1])[:top]
        found = entry(piece.token_id, piece.logprobs[piece.token_id])
        entries.append({**found, "top_logprobs": [entry(*item) for item in best]})
    return entries


def _object(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}


_TEXT: dict[str, Any] = {"type": "string"}
_TEXT_OR_NULL: dict[str, Any] = {"type": ["string", "null"]}
ERROR_SCHEMA = _object(
    error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)
)


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in OpenAI's form, see ERROR_SCHEMA."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_event(error: ApiError) -> bytes:
    """An error after the headers of a stream, and the end of it."""
    return event(error_body(error)) + event("[DONE]")
