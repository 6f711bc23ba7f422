"""Prompts and conversations in all accepted forms: text, token ids, tensors, arrays, vLLM's
dictionaries; and the decoding parameters that go with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.models.load.messages import ImageParts, parse_messages
from minivllm.platform.options import knobs_of

# Text or token ids, also as a tensor, an array, {"prompt": text} or {"prompt_token_ids": ids}; the
# latter two perhaps with {"multi_modal_data": {"image": one or several}}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]  # {"role": ..., "content": ...} and further keys of a template


def _plain(value: Any) -> Any:
    """A tensor or an array as numbers and lists; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_batch(prompts: Any) -> list[Any]:
    """A list of prompts, from one prompt or several.

    Raises:
        BadInput: the value is neither.
    """
    prompts = _plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise BadInput(
            f"{prompts!r:.60} is no prompt: give text, a list of token ids, or a list of these"
        )
    batch = list(prompts)
    return [batch] if batch and isinstance(batch[0], Integral) else batch


def text_or_ids(prompt: Any) -> str | list[int]:
    """The text or the token ids of a prompt.

    Raises:
        BadInput: the value is no prompt.
    """
    if isinstance(prompt, Mapping):
        name = next(
            (key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None), None
        )
        if name is None:
            raise BadInput(
                f"a prompt with the keys {', '.join(map(str, prompt))} has neither prompt nor "
                "prompt_token_ids"
            )
        prompt = prompt[name]
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return prompt
    ids = (
        list(prompt)
        if isinstance(prompt, Sequence | range) and not isinstance(prompt, bytes)
        else None
    )
    if ids is None or not all(isinstance(token, Integral) for token in ids):
        raise BadInput(
            f"{prompt!r:.60} is no prompt: it must be text, or token ids, which must be whole "
            "numbers"
        )
    return [int(token) for token in ids]


def images_of(prompt: Any) -> list[Any]:
    """The pictures of a prompt in vLLM's form, `{"multi_modal_data": {"image": ...}}`.

    Raises:
        BadInput: there is other data than images.
    """
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if data is None:
        return []
    if not isinstance(data, Mapping) or not {"image"}.issuperset(data):
        raise BadInput(
            "multi_modal_data must be {'image': a picture or a list of them}; audio and video are "
            "not served"
        )
    images = data.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def template_variables(
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    further: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Variables of a chat template; `further` ones (`chat_template_kwargs`) win.

    Raises:
        BadInput: a name is none, or that of the messages.
    """
    variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    variables |= {} if tools is None else {"tools": list(tools)}
    variables |= further or {}
    if "messages" in variables or not all(isinstance(name, str) for name in variables):
        raise BadInput("chat_template_kwargs must have names of variables, and not messages")
    return variables


def conversations(
    messages: Any, parts: Callable[[], ImageParts | None] = lambda: None
) -> list[tuple[list[dict[str, Any]], ImageParts | None]]:
    """A list of conversations, from one conversation or several, each with its images; see
    `parse_messages`.

    Args:
        messages: of them.
        parts: makes what takes the images of one; None: there may be none.

    Raises:
        BadInput: the value is neither, or a message is wrong.
    """
    given = (
        list(messages) if isinstance(messages, Sequence) and not isinstance(messages, str) else []
    )
    single = bool(given) and isinstance(given[0], Mapping)
    batch = [given] if single else given
    for one in batch or [None]:
        if (
            not isinstance(one, Sequence)
            or not one
            or not all(isinstance(item, Mapping) for item in one)
        ):
            raise BadInput(
                f"{one!r:.60} is no conversation: give a list of messages as {{'role': 'user', "
                "'content': 'text'}, or a list of such lists"
            )
    images = [parts() for _ in batch]
    return [
        (parse_messages(one, "" if single else f"conversation {i}", own), own)
        for i, (one, own) in enumerate(zip(batch, images, strict=True), start=1)
    ]


def params_of(knobs: Mapping[str, Any]) -> SamplingParams:
    """The decoding parameters of a configuration's group `decoding`."""
    return SamplingParams(**knobs_of(knobs))


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
