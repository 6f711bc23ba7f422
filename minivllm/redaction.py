"""Secrets: how configurations, commands and texts are stored and shown without any. Torch-free.

A secret is known by the name that it stands under (`api_key`, `--token`, `HF_TOKEN=`,
`Authorization:`, the user and password of a URL), or by its form (`Bearer ...`, `hf_...`). What is
found under a name in a configuration, or in the environment, is remembered (`learn`), so that it is
hidden also where it stands in another text without its name, as in a server's error. Identities,
names and overrides are made without what is remembered, which may differ tomorrow.

Whatever is written or shown goes through here: `shown` for a configuration, `hide` for a text,
`clean` for a value that holds texts, `console` for what is printed; and `overrides.py` for an
override.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, unquote

from minivllm.masking import (
    MASK,
    NOTHING,
    Masking,
    OnSecret,
    from_environment,
    has_signs,
    is_secret,
)

# of a resolved configuration: values from the environment, see `interpolation.py`
AS_WRITTEN = "as_written"
# characters of a secret that is looked for in every text: shorter ones are parts of words
SHORTEST = 6
_STRUCTURE = ("choices", "_target_")  # of what a configuration is made: no word of it is masked
_PLAIN = re.compile(r"[A-Za-z]{1,15}")  # a word like any other, which texts are full of
# What is known is the process's: an error of one engine may repeat a secret that another one's
# configuration has, and exceptions, logs and the console belong to no engine. Secrets are only
# added, so that no engine can uncover another's.
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None  # of all that are known; made when first needed
_lock = threading.Lock()  # of both


# ---- texts


def hide(text: str, strict: bool = False) -> str:
    """A text without secrets.

    Args:
        text: any text.
        strict: whether it is a command or part of a configuration, where also `key=...` is a
            secret's name; in a sentence that may be any key.
    """
    return Masking(strict, _ignore).masked(_hide_known(text))


def suspicious(text: str) -> bool:
    """Whether `hide` has to look closely: of a long text of many, most have nothing that may be a
    secret."""
    return has_signs(text) or _hide_known(text) != text


def _ignore(secret: str) -> None:
    """For who does not ask which secrets there were."""


def clean(value: Any) -> Any:
    """A value of nested dictionaries and lists, with every text in it hidden."""
    if isinstance(value, Mapping):
        return {
            key: redact(item) if key in _STRUCTURE else clean(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return hide(value) if isinstance(value, str) else value


def _hide_known(text: str, mask: str | Callable[[re.Match[str]], str] = MASK) -> str:
    global _pattern
    if not _known:
        return text
    with _lock:
        if _pattern is None:
            words = "|".join(re.escape(word) for word in sorted(_known, key=len, reverse=True))
            _pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])")
        pattern = _pattern
    return pattern.sub(mask, text)


def blank(content: bytes) -> bytes:
    """Bytes of a text with every secret that is known overwritten: of the same length, so that a
    file may stay open."""
    text = content.decode("utf-8", "surrogateescape")
    hidden = _hide_known(
        text, lambda secret: "*" * len(secret[0].encode("utf-8", "surrogateescape"))
    )
    return content if hidden is text else hidden.encode("utf-8", "surrogateescape")


# ---- configurations


def redact(value: Any, name: str = "", on_secret: OnSecret = _ignore) -> Any:
    """A configuration, or a part of one, without secrets: what stands under a secret's name, and
    what texts hold.

    Args:
        value: nested dictionaries and lists.
        name: what it stands under.
        on_secret: is given every secret.
    """
    return _redact(value, is_secret(name), on_secret)


def _redact(value: Any, secret: bool, on_secret: OnSecret) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _redact(item, key != "_target_" and (secret or is_secret(str(key))), on_secret)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        flags = [
            False,
            *(
                isinstance(item, str) and item[:1] == "-" and is_secret(item.lstrip("-"))
                for item in value
            ),
        ]
        return [
            _redact(item, secret or flag, on_secret)
            for item, flag in zip(value, flags, strict=False)
        ]
    if isinstance(value, str):
        if not secret:
            return Masking(True, on_secret, inner=True).masked(value)
        if value.lower() in NOTHING or from_environment(value):
            return value
        on_secret(value)
        return MASK
    # with its quotes, of an override
    if dataclasses.is_dataclass(value) and hasattr(value, "text"):
        return dataclasses.replace(cast(Any, value), text=_redact(value.text, secret, on_secret))
    if secret and isinstance(value, int | float) and not isinstance(value, bool):
        on_secret(str(value))
        return MASK
    return value


def learn(config: Mapping[str, Any]) -> None:
    """Remember the secrets of a resolved configuration and of the environment, so that `hide` finds
    them in any text.

    What is a plain word there, as `ollama`, or names a part of this package is none: texts would
    lose what they say.
    """
    redact(config, on_secret=_remember)
    for path, _, secret in config.get(AS_WRITTEN) or ():
        if secret:
            redact({"secret": _leaf(config, path)}, on_secret=_remember)
    named = (config.get("engine") or {}).get("api_key_env")
    for name, value in os.environ.items():
        if (name == named or is_secret(name)) and not _PLAIN.fullmatch(value.strip()):
            _remember(value)


def _remember(value: str) -> None:
    global _pattern
    value = value.strip().strip("'\"")
    if value in _structure():
        return
    forms = {value, unquote(value), quote(value, safe="")}
    new = {
        form
        for form in forms
        if len(form) >= SHORTEST and form.lower() not in NOTHING and MASK not in form
    }
    with _lock:
        if not new <= _known:
            _known.update(new)
            _pattern = None


@functools.cache
def _structure() -> frozenset[str]:
    """The names of what configurations consist of: groups, options, and the modules of their
    `_target_`."""
    package = Path(__file__).resolve().parent
    folders = (package, package / "conf", package.parent / "conf")
    paths = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in ("", ".py", ".yaml")
    ]
    return frozenset((package.name, *(path.stem for path in paths)))


def forget() -> None:
    """Forget every secret that was learned."""
    global _pattern
    with _lock:
        _known.clear()
        _pattern = None


def shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration as it is stored and shown: values from the environment as written,
    secrets masked."""
    return cast(dict[str, Any], clean(redact(_written(config, lambda secret: True))))


def anonymous(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration as it counts for an identity: values from the environment count
    unless they are secret."""
    return cast(dict[str, Any], redact(_written(config, lambda secret: secret)))


def _written(config: Mapping[str, Any], wanted: Callable[[bool], bool]) -> dict[str, Any]:
    """The configuration with those values as written that are wanted."""
    entries = [(path, raw) for path, raw, secret in config.get(AS_WRITTEN) or () if wanted(secret)]
    result = {key: value for key, value in config.items() if key != AS_WRITTEN}
    result = copy.deepcopy(result) if entries else result
    for path, raw in entries:
        if (parent := _leaf(result, path[:-1])) is not None and _leaf(result, path) is not None:
            parent[path[-1]] = raw
    return result


def _leaf(node: Any, path: list[Any]) -> Any:
    """What lies at a path of keys and indices; None where nothing does."""
    for key in path:
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError):
            return None
    return node


# ---- the console


class _Hiding:
    """A stream that hides secrets in all that is printed."""

    def __init__(self, stream: Any, hide_text: Callable[[str], str]) -> None:
        self._stream, self._hide = stream, hide_text

    def write(self, text: str) -> int:
        """Print it; returns its length, as every stream does."""
        self._stream.write(self._hide(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Print each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def console(whole: bool = False) -> Iterator[None]:
    """While it is open, nothing secret that is known is printed. For a process's main thread: the
    streams are the process's.

    Args:
        whole: whether configurations are printed, in which secrets are also found by name; not for
            a model's answers.
    """
    saved = sys.stdout, sys.stderr
    if whole:
        learn({})  # the environment's, which may be resolved
    hiding = (lambda text: hide(text, strict=True)) if whole else _hide_known
    sys.stdout, sys.stderr = (cast(Any, _Hiding(stream, hiding)) for stream in saved)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = saved
