"""The generation settings of a checkpoint: the tokens that end an answer, and the defaults of
decoding. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.models.config import ModelConfig, read_eos
from minivllm.models.load.checkpoint import GENERATION
from minivllm.models.load.tokenizer_files import named_token_id
from minivllm.platform.given import LEAST
from minivllm.platform.untrusted import MIB, named, read_object
from minivllm.platform.values import Values

_MAX_BYTES = 4 * MIB


def read_generation(folder: Path | None) -> Values:
    """The object of generation_config.json; an empty one where there is none.

    Raises:
        BadInput: the file cannot be read as one.
    """
    path = Path(GENERATION) if folder is None else folder / GENERATION
    there = folder is not None and named(path)
    values = read_object(path, str(path), "repair or remove it", limit=_MAX_BYTES) if there else {}
    return Values(values, str(path))


def with_ends(config: dict[str, Any], folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """A config.json with all tokens that end an answer as its `eos_token_id`: the one rule, which
    is vLLM's.

    They are those of generation_config.json, or, where it names none, of config.json; and the
    tokenizer's own end.

    Args:
        config: a parsed config.json that `ModelConfig` takes.
        folder: the checkpoint; None where there is none.

    Returns:
        The config, and a warning for ids that the vocabulary lacks, which are left out.

    Raises:
        BadInput: a file names what is no token id.
    """
    model = ModelConfig.from_dict(config)
    named = read_eos(read_generation(folder)) or model.eos_token_ids
    own = None if folder is None else named_token_id(folder, "eos_token")
    every = dict.fromkeys([*named, *(() if own is None else (own,))])
    ends = [token for token in every if token < model.vocab_size]
    beyond = [str(token) for token in every if token >= model.vocab_size]
    lost = (
        f"of the tokens that end an answer, the vocabulary of {model.vocab_size} lacks "
        f"{', '.join(beyond)}"
    )
    return ({**config, "eos_token_id": ends} if ends != [*model.eos_token_ids] else config), [
        lost
    ] * bool(beyond)


def decoding_defaults(folder: Path | None) -> dict[str, Any]:
    """Fields of SamplingParams that generation_config.json sets, as vLLM reads them. A number below
    the least value that SamplingParams allows becomes that value.

    Raises:
        BadInput: a value is of another type, or out of its range.
    """
    values = read_generation(folder)
    defaults = {
        "temperature": values.number("temperature", None, least=0),
        "top_k": values.integer("top_k", None, low=-1),
        "top_p": values.number("top_p", None, high=1),
        "min_p": values.number("min_p", None, least=0, high=1),
        "repetition_penalty": values.number("repetition_penalty", None),
        "max_tokens": values.integer("max_new_tokens", None),
    }
    if values.flag("do_sample", False) and defaults["temperature"] is None:
        defaults["temperature"] = 1.0
    return {
        name: max(value, LEAST[name]) if name in LEAST and value > 0 else value
        for name, value in defaults.items()
        if value is not None
    }


def described(defaults: dict[str, Any]) -> str:
    """One line that names a checkpoint's defaults, with a remark on values that stand for all
    smaller ones; empty where there are none."""
    least = " (the least that is not 0)"
    settings = (f"{k}={v}{least if LEAST.get(k) == v else ''}" for k, v in defaults.items())
    if not defaults:
        return ""
    return (
        f"the model's generation_config.json sets {', '.join(settings)}, which decoding leaves "
        "open; decoding=greedy sets them"
    )


def unset_defaults(
    decoding: dict[str, Any], given: list[str] | None, defaults: dict[str, Any]
) -> dict[str, Any]:
    """The changes of a checkpoint's defaults to a configuration's `decoding`, where the user has
    left knobs unset.

    A checkpoint with settings of sampling defines all of them: filters that an option sets and the
    file does not name are off.

    Args:
        decoding: the resolved group.
        given: knobs that the user set; "decoding" among them, or None, stands for all.
        defaults: from `decoding_defaults`.
    """
    if given is None or "decoding" in given:
        return {}
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if decoding.get("beam_width", 1) > 1:  # which samples nothing
        defaults = {
            name: value for name, value in defaults.items() if name not in ("temperature", *filters)
        }
    elif {"temperature", *filters} & defaults.keys():
        defaults = defaults | {name: off for name, off in filters.items() if name not in defaults}
    return {
        k: v for k, v in defaults.items() if k not in given and k in decoding and decoding[k] != v
    }
