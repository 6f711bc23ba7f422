"""Interpolations of a configuration: their values, and which of them come from the environment.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.resolvers import oc

from minivllm.errors import BadInput
from minivllm.masking import is_secret
from minivllm.redaction import AS_WRITTEN, redact

# Keys that lead to a value, its text as written, whether it is secret.
AsWritten = tuple[list[Any], str, bool]


def resolve(config: DictConfig) -> tuple[Any, list[AsWritten]]:
    """The configuration as plain data, and those of its values that the environment gave, however
    they are wrapped.

    A value is secret where its own name, a group's around it or the variable's says so, or what it
    holds does, as the URL with a password.

    Raises:
        OmegaConfBaseException: a value is missing or an interpolation leads nowhere.
        BadInput: it has a setting of the name under which the second is kept.
    """
    if AS_WRITTEN in config:
        raise BadInput(f"{AS_WRITTEN} is no setting: leave it out")
    with _watched() as any_variables:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    written: list[AsWritten] = []
    for path, text in _interpolations(config) if any_variables else ():
        with _watched() as variables:
            node: Any = config
            for key in path:
                node = node[key]
        if variables:
            value = (
                OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            )
            named = any(is_secret(str(name)) for name in (*path, *variables))
            written.append((path, text, named or redact(value) != value))
    return plain, written


def _interpolations(node: Node, path: tuple[Any, ...] = ()) -> Iterator[tuple[list[Any], str]]:
    """Every text as it is written that may hold an interpolation, with the keys that lead to it."""
    value = node._value()
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _interpolations(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _interpolations(inner, (*path, index))
    elif isinstance(value, str) and "${" in value:
        yield list(path), value


# Of the thread that resolves: where variables are noted that it reads.
_variables: ContextVar[list[str] | None] = ContextVar("variables", default=None)


def _env(key: str, *default: Any) -> Any:
    """OmegaConf's own resolver of `oc.env`, which also notes the variable. Resolvers are the
    process's, and are pickled for a job by this function's own name, so it must not have the name
    of OmegaConf's."""
    if (variables := _variables.get()) is not None:
        variables.append(key)
    return oc.env(key, *default)


@contextmanager
def _watched() -> Iterator[list[str]]:
    """While it is open: the environment variables that this thread's interpolations have read."""
    OmegaConf.register_new_resolver("oc.env", _env, replace=True)
    variables: list[str] = []
    token = _variables.set(variables)
    try:
        yield variables
    finally:
        _variables.reset(token)
