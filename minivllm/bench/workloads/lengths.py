"""Lengths of prompts and outputs, as a number or a distribution; what fits a context, and how large
a workload may be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import BadInput
from minivllm.platform.text_files import read_text_lines
from minivllm.platform.untrusted import place
from minivllm.platform.values import is_number

# What each distribution needs, and what it may have besides.
PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fixed": (("value",), ()),
    "uniform": (("min", "max"), ()),
    "normal": (("mean", "std"), ("min", "max")),
    "lognormal": (("mean", "std"), ("min", "max")),
    "empirical": ((), ("values", "weights", "path")),
}
LONGEST = 2**31 - 1
MOST_REQUESTS = 5_000_000  # of a workload; each takes about a kilobyte
MOST_TOKENS = 1 << 28  # of its prompts; each takes up to 36 bytes
NAMES = ("value", "mean", "std", "min", "max", "values", "weights", "path")


@dataclass(frozen=True)
class Lengths:
    """A distribution over whole numbers of tokens.

    `fixed` is `value`; `uniform` takes every length from `min` to `max`, both included; `normal`
    and `lognormal` have the given `mean` and `std` in tokens before they are rounded and clipped to
    [`min`, `max`] (1 and unbounded where not given); `empirical` draws from `values`, each as often
    as its entry in `weights` says beside the others (all as often where not given).
    """

    distribution: str
    value: int | None = None
    mean: float | None = None
    std: float | None = None
    min: int | None = None
    max: int | None = None
    values: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    @classmethod
    def parse(cls, knob: str, spec: int | Mapping[str, Any]) -> Lengths:
        """Read a length knob: a whole number, or a mapping with `distribution` and its parameters.

        Parameters that are None count as not given, so that an option file can show them all. An
        empirical length has its `values` there, or in the file `path`, one a line.

        Raises:
            BadInput: naming `knob` and what is wrong with it.
        """
        if not isinstance(spec, Mapping):
            return cls("fixed", value=_tokens(knob, spec))
        given = {str(key): value for key, value in spec.items() if value is not None}
        name = given.pop("distribution", None)
        if not isinstance(name, str) or name not in PARAMETERS:
            raise BadInput(f"{knob}.distribution={name!r} must be one of {', '.join(PARAMETERS)}")
        required, optional = PARAMETERS[name]
        surplus = [key for key in given if key not in required + optional]
        if surplus:
            unknown = [key for key in surplus if key not in NAMES]
            hint = (
                f"it takes {', '.join(required + optional)}"
                if unknown or name != "fixed"
                else f"write {knob}={given.get('value', 128)}"
            )
            raise BadInput(f"{knob}: a {name} length has no {', '.join(surplus)}; {hint}")
        missing = [key for key in required if key not in given]
        if missing:
            raise BadInput(f"{knob}: a {name} length also needs {', '.join(missing)}")
        for key in ("value", "min", "max"):
            if key in given:
                _tokens(f"{knob}.{key}", given[key])
        for key, least in (("mean", 1.0), ("std", 0.0)):
            if key in given and not (is_number(given[key]) and least <= given[key] <= LONGEST):
                raise BadInput(
                    f"{knob}.{key}={given[key]!r} must be a number of tokens, at least {least:g}"
                )
        if "min" in given and "max" in given and given["min"] > given["max"]:
            raise BadInput(f"{knob}.min={given['min']} is above {knob}.max={given['max']}")
        if name == "empirical":
            return cls(name, **_sample(knob, **given))
        return cls(name, **given)

    def sample(self, rng: np.random.Generator, n: int) -> list[int]:
        """Draw `n` lengths, each at least 1."""
        if self.value is not None:
            return [self.value] * n
        if self.distribution == "uniform":
            assert self.min is not None and self.max is not None
            return [
                int(length) for length in rng.integers(self.min, self.max, size=n, endpoint=True)
            ]
        if self.distribution == "empirical":
            shares = np.array(self.weights) / math.fsum(self.weights) if self.weights else None
            return [int(length) for length in rng.choice(self.values, size=n, p=shares)]
        assert self.mean is not None and self.std is not None
        if self.distribution == "normal":
            drawn = rng.normal(self.mean, self.std, size=n)
        else:  # the parameters of ln(length) that give this mean and standard deviation
            variance = math.log1p((self.std / self.mean) ** 2)
            drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), size=n)
        low, high = self.min or 1, self.max or LONGEST
        return [int(length) for length in np.clip(np.rint(drawn), low, high)]

    @property
    def typical(self) -> float:
        """About the mean of the lengths that are drawn."""
        if self.distribution == "empirical":
            return float(np.average(self.values, weights=self.weights or None))
        if self.distribution == "uniform":
            assert self.min is not None and self.max is not None
            return (self.min + self.max) / 2
        return float(self.mean or self.value or 1)

    @property
    def longest(self) -> int | None:
        """The greatest length that can be drawn; None if there is no bound."""
        if self.distribution == "empirical":
            return max(self.values)
        return self.value if self.distribution == "fixed" else self.max


def _sample(knob: str, values: Any = None, weights: Any = None, path: Any = None) -> dict[str, Any]:
    """Values and weights of an empirical length, checked."""
    if (values is None) == (path is None):
        raise BadInput(f"{knob}: an empirical length needs values or path, one of them")
    if path is not None:
        values = _read(knob, place(str(path), f"{knob}.path={path}"))
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise BadInput(f"{knob}.values={values!r} must be a list of lengths, at least one")
    for value in values:
        _tokens(f"{knob}.values", value)
    if weights is None:
        return {"values": tuple(values)}
    if (
        not isinstance(weights, Sequence)
        or len(weights) != len(values)
        or not all(is_number(weight) and 0 <= weight < math.inf for weight in weights)
        or not 0 < math.fsum(weights) < math.inf
    ):
        raise BadInput(
            f"{knob}.weights={weights!r} must be {len(values)} numbers, none negative, not all 0"
        )
    return {"values": tuple(values), "weights": tuple(map(float, weights))}


def _read(knob: str, path: Path) -> list[int]:
    """A length a line; blank lines are skipped."""
    lengths: list[int] = []
    for number, line in enumerate(read_text_lines(path, f"{knob}.path={path}"), start=1):
        check_amount(f"{knob}.path={path}", len(lengths), 0, "give fewer lengths")
        if text := line.strip():
            if not re.fullmatch("[0-9]{1,10}", text):
                raise BadInput(f"{path}:{number}: {text!r:.40} is not a number of tokens")
            # int() strips fewer kinds of space
            lengths.append(_tokens(f"{path}:{number}", int(text)))
    return lengths


def _tokens(knob: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LONGEST:
        raise BadInput(f"{knob}={value!r} must be a whole number of tokens, at least 1")
    return value


def check_fits(
    what: str, prompt_len: int, output_len: int, max_model_len: int, advice: str
) -> None:
    """Raise BadInput, with `advice`, if prompt and output are together longer than the context."""
    if prompt_len + output_len > max_model_len:
        raise BadInput(
            f"{what} has {prompt_len} prompt + {output_len} output = {prompt_len + output_len} "
            f"tokens, and the context holds {max_model_len}: {advice}"
        )


def check_amount(what: str, requests: int, tokens: float, advice: str) -> None:
    """Raise BadInput, with `advice`, if a workload of so many requests and prompt tokens is more
    than memory should hold."""
    if requests > MOST_REQUESTS or tokens > MOST_TOKENS:
        raise BadInput(
            f"{what}: {requests:,} requests with about {tokens:.3g} prompt tokens, and a "
            f"workload has at most {MOST_REQUESTS:,} with {MOST_TOKENS:.3g}; {advice}"
        )
