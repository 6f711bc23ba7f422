"""The decoding parameters of a configuration, and those that a stream can carry. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput


def params_of(knobs: Mapping[str, Any]) -> SamplingParams:
    """The decoding parameters of a configuration's group `decoding`."""
    return SamplingParams(**{name: value for name, value in knobs.items() if name != "_target_"})


def params_of_each(
    count: int,
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: Callable[[], SamplingParams],
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts, given one for all, one a prompt, or None for the
    default. Raises BadInput for another number of them."""
    if not isinstance(params, Sequence):
        return [params or default()] * count
    if len(params) != count:
        raise BadInput(
            f"{count} prompts and {len(params)} SamplingParams; give one, or one a prompt"
        )
    return list(params)


def check_streamable(params: SamplingParams) -> None:
    """Raise BadInput for parameters whose output one stream of tokens cannot carry."""
    if params.n != 1 or params.prompt_logprobs is not None:
        raise BadInput(
            "a stream is one completion: decoding.n must be 1 and decoding.prompt_logprobs null"
        )
    if params.beam_width != 1:
        raise BadInput(
            "a beam search knows its tokens only at its end and cannot be streamed: "
            "decoding.beam_width must be 1, or use generate"
        )
