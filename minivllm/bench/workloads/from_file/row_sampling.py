"""The sampling that a row of a file of prompts asks for its own request."""

from __future__ import annotations

from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.platform.given import whole

# Fields of SamplingParams that a line may set, under these names, as the completions API does.
FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("stop", "stop_token_ids", "bad_words", "allowed_token_ids"),
)
NESTED = "sampling_params"  # where a line may have them all


def line_sampling(row: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Fields of SamplingParams that a line sets, checked; None where it sets none.

    Raises:
        BadInput: starting with `where`: a value is none of that field, a line sets a field twice,
            or it asks for several completions.
    """
    nested = row.get(NESTED)
    nested = nested if isinstance(nested, dict) else {}
    given = {name: row[name] for name in FIELDS if row.get(name) is not None}
    inner = {name: nested[name] for name in FIELDS if nested.get(name) is not None}
    if twice := sorted(given.keys() & inner.keys()):
        raise BadInput(f"{where}: {twice[0]} stands beside {NESTED} and in it; give one")
    count = row.get("n", nested.get("n"))
    if count not in (None, 1):
        raise BadInput(f"{where}: n={count!r:.20}: a measurement takes one completion a request")
    given |= inner
    if not given:
        return None
    given = {name: whole(value) for name, value in given.items()}
    if not isinstance(given.get("ignore_eos", False), bool):
        raise BadInput(f"{where}: ignore_eos={given['ignore_eos']!r:.20} must be true or false")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        SamplingParams(max_tokens=None, **given)
    except BadInput as error:
        raise BadInput(f"{where}: {str(error).replace('decoding.', '')}") from None
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: its sampling cannot be read ({error})") from None
    return given
