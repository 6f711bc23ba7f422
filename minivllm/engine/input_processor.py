"""Request validation: a prompt and its parameters become a request with all members of its
group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral

from minivllm.engine.extension import Extensions
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Group, Request
from minivllm.errors import BadInput
from minivllm.models.load.tokenizer import Tokenizer


def sample_seed(seed: int, index: int) -> int:
    """The seed of a request's sample: the first has the request's own, the others have hashes, so
    that neighbouring seeds share no draw. (A hash of three numbers differs from the seeds that the
    engine derives for requests without one.)"""
    return hash((seed, index, 0)) & (2**63 - 1) if index else seed


class InputProcessor:
    """Checks prompts and makes requests of them.

    Args:
        vocab_size: token ids are below it.
        max_model_len: the context's length.
        eos_token_ids: end an output.
        tokenizer: None where prompts are token ids only.
        seed: seeds of requests that bring none are derived from it.
        now: the scheduler's clock, seconds.
        extensions: make joint groups, and prepare parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        seed: int,
        now: Callable[[], float],
        extensions: Extensions,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # Some checkpoints name a token outside of their vocabulary, which no mask could forbid.
        self.eos_token_ids = tuple(token for token in eos_token_ids if token < vocab_size)
        self.tokenizer = tokenizer
        self.seed = seed
        self.now = now
        self.extensions = extensions
        self._num_requests = 0

    def request(self, request_id: str, prompt: list[int], params: SamplingParams) -> Request:
        """A request; where `params` ask for several samples or beams it is the first of a group of
        them.

        Raises:
            BadInput: the prompt is empty, too long or holds unknown ids; stop strings or structured
                outputs without a tokenizer; a grammar is wrong.
        """
        self._check(request_id, prompt, params)
        if params.reads_text or params.bad_words:
            params = self.extensions.prepare_params(params, self.tokenizer)
        request = self._make(request_id, prompt, params)
        members = [request]
        for index in range(1, max(params.n, params.beam_width)):
            seed = None if params.seed is None else sample_seed(params.seed, index)
            own = replace(params, seed=seed, prompt_logprobs=None)
            members.append(self._make(f"{request_id}.{index}", prompt, own))
        if params.beam_width > 1:
            self.extensions.joint.group(members)
        elif len(members) > 1:
            Group(members)
        return request

    def _make(self, request_id: str, prompt: list[int], params: SamplingParams) -> Request:
        allowed = self.max_model_len - len(prompt)
        seed = (
            params.seed
            if params.seed is not None
            else hash((self.seed, self._num_requests)) & (2**63 - 1)
        )
        self._num_requests += 1
        return Request(
            request_id,
            prompt,
            params,
            max_num_tokens=len(prompt) + min(params.max_tokens or allowed, allowed),
            seed=seed,
            eos_token_ids=self.eos_token_ids,
            arrival_s=self.now(),
        )

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise BadInput(f"request {request_id} has an empty prompt; give at least one token")
        if len(prompt) >= self.max_model_len:
            raise BadInput(
                f"request {request_id}: the prompt has {len(prompt)} tokens and the context is "
                f"{self.max_model_len}, which leaves no room for output; shorten the prompt or "
                "raise model.max_model_len if it is below the model's own"
            )
        self.check_ids(f"request {request_id}: prompt token ids", prompt)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_ids(f"request {request_id}: {name}", tuple(getattr(params, name) or ()))

    def check_ids(self, what: str, token_ids: Sequence[int]) -> None:
        """Raises BadInput unless the model knows all these ids."""
        if not all(type(token) is int or isinstance(token, Integral) for token in token_ids):
            raise BadInput(f"{what} must be whole numbers")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise BadInput(f"{what} must be in [0, {self.vocab_size})")
