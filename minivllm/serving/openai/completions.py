"""/v1/completions: texts that continue prompts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Piece
from minivllm.serving.errors import ApiError, naming
from minivllm.serving.http.access import Access, access
from minivllm.serving.http.answers import STREAMED, JsonEvent
from minivllm.serving.openai.forms import (
    DEFAULT_MAX_TOKENS,
    MOST_LOGPROBS,
    ChoiceAnswer,
    SamplingFields,
    finish_reason,
)
from minivllm.serving.service import Service

MOST_PROMPTS = 256


class CompletionBody(SamplingFields):
    """The body of a request."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = None
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def paths(self, **forms: Any) -> dict[str, str]:
        """See SamplingFields; with `echo`, tokens of the prompt have log-probabilities, too."""
        return super().paths(**forms) | {"prompt_logprobs": "logprobs"}


class Completion(ChoiceAnswer):
    """One call, while it is answered.

    Args:
        service: answers it.
        body: of the request.
        prompts: token ids of each prompt.
        num_completions: of each prompt.
    """

    PREFIX, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        prompts: list[list[int]],
        num_completions: int,
    ) -> None:
        super().__init__(service, body)
        self.body, self.prompts, self._each = body, prompts, num_completions
        # Characters of each choice so far, for `text_offset`.
        self._offsets = [0] * (len(prompts) * num_completions)
        self._has_begun = [False] * len(self._offsets)
        self._of_prompts: dict[int, list[dict[int, float]]] = {}  # log-probabilities, by prompt

    def choice(self, number: int, pieces: list[Piece]) -> dict[str, Any]:
        """The pieces of one completion as a choice of the answer.

        Args:
            number: of the prompt.
            pieces: of one completion, in order.
        """
        body, last = self.body, pieces[-1]
        index = number * self._each + last.completion
        is_first, self._has_begun[index] = not self._has_begun[index], True
        shown = [] if body.max_tokens == 0 else pieces
        text = "".join(piece.text for piece in shown)
        ids = [piece.token_id for piece in shown if piece.token_id is not None]
        logprobs = None
        if (of_prompt := pieces[0].prompt_logprobs) is not None:
            self._of_prompts[number] = of_prompt  # with completion 0, for the others, too
        if body.logprobs is not None:
            logprobs = self._logprobs(number, index, shown, body.echo and is_first)
        if body.echo and is_first:
            text = self._prompt_text(number) + text
        self._offsets[index] += len(text)
        reason = "length" if body.max_tokens == 0 else finish_reason(last)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        choice |= {"stop_reason": last.stop_reason} if last.stop_reason is not None else {}
        if body.return_token_ids:
            choice |= {"token_ids": ids}
            choice |= {"prompt_token_ids": self.prompts[number]} if is_first else {}
        return choice

    def _prompt_text(self, number: int) -> str:
        return self.service.require_tokenizer().decode(self.prompts[number], False)

    def _logprobs(
        self,
        number: int,
        index: int,
        pieces: list[Piece],
        with_prompt: bool,
    ) -> dict[str, list[Any]]:
        """Tokens with their log-probabilities, in the form of this API; `with_prompt` those of the
        prompt come first."""
        texts = self.service.token_texts()
        found: list[tuple[int, dict[int, float] | None]] = []
        if with_prompt:
            first, *others = self.prompts[number]
            found += [(first, None), *zip(others, self._of_prompts.get(number, ()), strict=False)]
        found += [(p.token_id, p.logprobs) for p in pieces if p.token_id is not None]
        offset = self._offsets[index]
        result: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token_id, logprobs in found:
            result["tokens"].append(texts.label(token_id))
            result["token_logprobs"].append(None if logprobs is None else logprobs[token_id])
            best = sorted((logprobs or {}).items(), key=lambda item: -item[1])
            top = {texts.label(i): p for i, p in best[: self.body.logprobs]}
            result["top_logprobs"].append(None if logprobs is None else top)
            result["text_offset"].append(offset)
            offset += texts.num_characters(token_id)
        return result

    def usage(self) -> dict[str, Any]:
        """The tokens so far; the one that the engine makes where none is wanted is left out."""
        found = super().usage()
        if self.body.max_tokens == 0:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def events(self, number: int, pieces: list[Piece]) -> list[JsonEvent]:
        """One for each token."""
        return [self.chunk([self.choice(number, [piece])]) for piece in pieces]

    def rendered(self) -> dict[str, Any]:
        collected = sorted(self._collected.items())
        choices = [self.choice(number, pieces) for (number, _), pieces in collected]
        return {**self.head, "choices": choices, "usage": self.usage()}


async def _prompts(service: Service, given: Any) -> list[list[int]]:
    """Token ids of each prompt."""
    if isinstance(given, str):
        return [await service.encode(given)]
    if given and isinstance(given[0], int):
        return [list(given)]
    if not 1 <= len(given) <= MOST_PROMPTS:
        raise ApiError(400, f"prompt must be 1 to {MOST_PROMPTS} prompts", param="prompt")
    return [await service.encode(one) if isinstance(one, str) else list(one) for one in given]


def _params(service: Service, body: CompletionBody) -> SamplingParams:
    if body.suffix:
        raise ApiError(
            400, "suffix is not supported: this is no model that fills in", param="suffix"
        )
    if body.best_of not in (None, 1, body.n):
        raise ApiError(400, "best_of is not supported: use n", param="best_of")
    if body.logprobs is not None and not 0 <= body.logprobs <= MOST_LOGPROBS:
        raise ApiError(400, f"logprobs must be in [0, {MOST_LOGPROBS}]", param="logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 needs echo=true", param="max_tokens")
    default = service.info.default_params.max_tokens or DEFAULT_MAX_TOKENS
    most = default if body.max_tokens is None else body.max_tokens or 1  # none is shown of 0
    return body.params(
        service.info.default_params,
        max_tokens=most,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def router(service: Service) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter()

    @routes.post("/v1/completions", responses=STREAMED)
    @access(Access.ENGINE)
    async def completions(body: CompletionBody) -> Response:
        """Continue prompts."""
        body.require_known()
        service.require_model(body.model)
        service.admit()
        with naming(body.paths()):
            params = await service.with_checked(_params(service, body))
            prompts = await _prompts(service, body.prompt)
            answer = Completion(service, body, prompts, params.n).start(prompts, params)
            return await answer.response(body.stream)

    return routes
