"""What OpenAI's APIs share: fields of bodies and what they mean to the engine, answers of choices,
and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput, meant
from minivllm.processes.messages import Piece
from minivllm.serving.answers.structured import structured_outputs
from minivllm.serving.answers.token_texts import TokenTexts
from minivllm.serving.errors import ApiError, form_paths
from minivllm.serving.http.answers import ApiAnswer, JsonEvent, event
from minivllm.serving.http.calls import ignore
from minivllm.serving.http.first_error import FirstErrorModel
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import Service

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's
MOST_LOGPROBS = 20  # alternatives of a token, as OpenAI's
MOST_WORDS = 1024  # stop strings, or bad words: the engine reads them while others wait
# Fields that say who asks or how a service bills and stores, which changes no answer here.
_WITHOUT_MEANING = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "request_id", "moderation"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "client_metadata"}
)


class Body(FirstErrorModel):
    """A body whose unknown fields are errors: one that is ignored would be a wrong answer.

    Attributes:
        IGNORED: fields that change no answer here, or that a server may leave out: they are read by
            nobody, and the call's line in the log names them.
    """

    model_config = ConfigDict(extra="allow")
    IGNORED: ClassVar[frozenset[str]] = _WITHOUT_MEANING

    def require_known(self, where: str = "") -> None:
        """Raise ApiError for a field that this server does not know. `where` the part stands in the
        body ends with a dot."""
        for name, value in (self.model_extra or {}).items():
            if value is None:
                continue
            if name not in self.IGNORED:
                question = meant(name[:100], type(self).model_fields, cutoff=0.75)
                what = "; ".join(filter(None, (f"unknown field {where + name!r:.100}", question)))
                path = f"{where}{name:.100}"
                raise ApiError(400, what, param=path, code="unknown_parameter")
            ignore(f"{where}{name}")
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), Body):
                value.require_known(f"{where}{name}.")


class StreamOptions(Body):
    """`stream_options`."""

    IGNORED = frozenset({"include_obfuscation"})
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ReasoningFields(Body):
    """`reasoning`. Thoughts are shown as they are: there are no summaries of them."""

    IGNORED = frozenset({"generate_summary", "context"})
    effort: str | None = None
    summary: str | None = None


class SamplingFields(Body):
    """How tokens are chosen; what is not given is as the configuration's `decoding` says."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    return_token_ids: bool = False

    def paths(self, **forms: Any) -> dict[str, str]:
        """The paths of fields of this body, by the parameters of the engine that they set where
        these have other names; see `naming`.

        Args:
            forms: what further asks for the form of the answer, by its path; None: it does not.
        """
        given = {**forms, "response_format": self.response_format}
        path = " and ".join(name for name, value in given.items() if value is not None)
        given_here = self.structured_outputs
        own = {f"structured_outputs.{kind}" for kind in given_here or ()}
        own |= set() if given_here is None else {"structured_outputs"}
        return {k: v for k, v in form_paths(path).items() if path and k not in own}

    def params(self, defaults: SamplingParams, **further: Any) -> SamplingParams:
        """The parameters for the engine.

        Args:
            defaults: of what is not given.
            further: parameters that have other names in a body.

        Raises:
            ApiError: a value is out of range, or needs another.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        names = {name for name in SamplingFields.model_fields if hasattr(defaults, name)}
        given = {name: getattr(self, name) for name in names}
        if self.response_format is not None or self.structured_outputs is not None:
            given["structured_outputs"] = structured_outputs(
                self.response_format, self.structured_outputs
            )
        chosen = {name: value for name, value in given.items() if value is not None} | further
        if isinstance(chosen.get("stop"), str):
            chosen["stop"] = (chosen["stop"],)
        for name in ("stop", "stop_token_ids", "bad_words"):
            if name in chosen:
                chosen[name] = tuple(chosen[name])
        for name in ("stop", "bad_words"):
            if len(chosen.get(name, ())) > MOST_WORDS:
                raise ApiError(400, f"{name}: at most {MOST_WORDS} texts", param=name)
        try:
            if "logit_bias" in chosen:
                chosen["logit_bias"] = {int(k): v for k, v in chosen["logit_bias"].items()}
            return replace(defaults, **chosen)
        except BadInput as error:
            raise ApiError.of(error) from None
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"logit_bias must map token ids to numbers ({error})") from None


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


class ChoiceAnswer(ApiAnswer):
    """An answer of choices, each a completion of a prompt.

    Args:
        service: computes it.
        body: of the request.
    """

    PREFIX: ClassVar[str]  # of its id
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]  # the object that a chunk of it is
    TAIL = event("[DONE]")

    def __init__(self, service: Service, body: SamplingFields) -> None:
        super().__init__(service)
        self.head = {
            "id": f"{self.PREFIX}-{uuid.uuid4().hex}",
            "object": self.OBJECT,
            "created": int(time.time()),
            "model": service.model,
        }
        self._options = body.stream_options or StreamOptions()
        # Of each choice, by the numbers of its request and of its completion.
        self._collected: dict[tuple[int, int], list[Piece]] = {}

    def usage(self) -> dict[str, Any]:
        return usage(self.streams)

    def collect(self, number: int, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._collected.setdefault((number, piece.completion), []).append(piece)

    def chunk(self, choices: list[dict[str, Any]], **further: Any) -> JsonEvent:
        """An event with some choices."""
        used = {"usage": self.usage()} if self._options.continuous_usage_stats else {}
        return {**self.head, "object": self.CHUNK, "choices": choices, **used, **further}

    def closing(self) -> list[JsonEvent]:
        with_usage = self._options.include_usage
        return [self.chunk([], usage=self.usage())] if with_usage else []

    def failed(self, error: ApiError) -> bytes:
        return event(error_body(error)) + self.TAIL


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
