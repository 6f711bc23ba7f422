"""The decoding parameters of a configuration, and those that a stream can carry. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput


def params_of(knobs: Mapping[str, Any]) -> SamplingParams:
    """The decoding parameters of a configuration's group `decoding`."""
    return SamplingParams(**{name: value for name, value in knobs.items() if name != "_target_"})


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
