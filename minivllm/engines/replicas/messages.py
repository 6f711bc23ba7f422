"""What the process that measures and the process of a replica send each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from minivllm.engines.base import EngineInfo, EngineOutput
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.vision.processor import ImageProcessor
from minivllm.processes.router import CacheShape

# ---- to a replica


class Ask(NamedTuple):
    """Call a method of the engine, whose result a `Reply` has."""

    method: str
    arguments: tuple[Any, ...] = ()


# ---- from a replica


class Loading(NamedTuple):
    """How far the weights are."""

    done: int
    total: int


class Built(NamedTuple):
    """The engine is built."""

    info: EngineInfo
    tokenizer: Tokenizer | None
    cache: CacheShape | None  # of its prefixes; None: it caches none
    threads: int
    processor: ImageProcessor | None = None  # of images; None: the model takes none


class Outputs(NamedTuple):
    """What one step of the engine gave."""

    outputs: list[EngineOutput]


class NextTokens(NamedTuple):
    """What a step gave that continued every request by a token, in a fraction of the bytes and of
    the time that `Outputs` takes."""

    request_ids: list[str]
    token_ids: list[int]


def step_message(outputs: list[EngineOutput]) -> Outputs | NextTokens:
    """The message of a step; tokens alone where a request's first output, or last one, says all
    else."""
    if all(map(_is_continued, outputs)):
        return NextTokens(
            [one.request_id for one in outputs], [one.token_ids[0] for one in outputs]
        )
    return Outputs(outputs)


def _is_continued(output: EngineOutput) -> bool:
    """Whether an output of engine=minivllm is one further token. The prompt's cached tokens were
    sent before, with the time of the first step."""
    says_more = output.finish_reason or output.kv_transfer or output.started_s is not None
    return not says_more and len(output.token_ids) == 1


class Reply(NamedTuple):
    """The result of an `Ask`."""

    value: Any
