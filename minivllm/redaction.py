"""Storing and showing of configurations, commands and texts without secrets. Torch-free.

A secret is recognised by its name (`api_key`, `--token`, `HF_TOKEN=`,
`Authorization:`, the user and password of a URL), or by its form (`Bearer ...`, `hf_...`). The
named secrets of configurations and of the environment are remembered (`learn`), and masked also in
texts without the name, such as a server's error; they are looked for when the next text is masked,
since most configurations come before none. Identities, names and overrides do not depend on
the remembered secrets, which may change.

Everything written or shown passes one of these: `shown` for a configuration, `hide` for a text,
`clean` for a value that holds texts, `console` for printed text, and `overrides.py` for overrides.
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
from collections.abc import Callable, Collection, Iterator, Mapping
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

# The key in a resolved configuration of its values from the environment, see `interpolation.py`.
AS_WRITTEN = "as_written"
# Least characters of a remembered secret: shorter ones are parts of words.
SHORTEST = 6
_STRUCTURE = ("choices", "_target_")  # structure of a configuration, never masked
_PLAIN = re.compile(r"[A-Za-z]{1,15}")  # an ordinary word, common in texts
# The remembered secrets belong to the process: an error of one engine may repeat a secret of
# another one's configuration, and exceptions, logs and the console belong to no engine. Secrets
# are only added, so that no engine can uncover those of another.
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None  # matches all remembered secrets; None until it is needed
# A signal handler may print, and so mask, while its own thread holds these.
_lock = threading.RLock()  # guards _known and _pattern
_reading = threading.RLock()  # held while _unread is read
MOST_UNREAD = 64


@dataclasses.dataclass(frozen=True, eq=False)
class _Unread:
    """A configuration whose secrets were not yet looked for, with the environment of its time."""

    config: Mapping[str, Any]
    environment: Mapping[str, str]


_unread: list[_Unread] = []


# ---- texts


def hide(text: str, strict: bool = False) -> str:
    """The text with its secrets masked.

    Args:
        text: any text.
        strict: whether the text is a command or part of a configuration, in which `key=...` is a
            secret's name, too; in a sentence it may be any key.
    """
    return Masking(strict, _ignore).masked(_hide_known(text))


def suspicious(text: str) -> bool:
    """Whether a text may hold a secret, so that `hide` has to search it."""
    return has_signs(text) or _hide_known(text) != text


def _ignore(secret: str) -> None:
    """The default `on_secret`, which does nothing."""


def clean(value: Any) -> Any:
    """Nested dictionaries and lists with the secrets of every text masked."""
    if isinstance(value, Mapping):
        return {
            key: redact(item) if key in _STRUCTURE else clean(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return hide(value) if isinstance(value, str) else value


def _hide_known(text: str, mask: str | Callable[[re.Match[str]], str] = MASK) -> str:
    global _pattern
    _read()
    if not _known:
        return text
    with _lock:
        if _pattern is None:
            words = "|".join(re.escape(word) for word in sorted(_known, key=len, reverse=True))
            _pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])")
        pattern = _pattern
    return pattern.sub(mask, text)


def blank(content: bytes) -> bytes:
    """Bytes of a text with every remembered secret overwritten, of the same length, so that a file
    may stay open."""
    text = content.decode("utf-8", "surrogateescape")
    hidden = _hide_known(
        text, lambda secret: "*" * len(secret[0].encode("utf-8", "surrogateescape"))
    )
    return content if hidden is text else hidden.encode("utf-8", "surrogateescape")


# ---- configurations


def redact(value: Any, name: str = "", on_secret: OnSecret = _ignore) -> Any:
    """A configuration, or a part of one, with its secrets masked: by name, and within texts.

    Args:
        value: nested dictionaries and lists.
        name: the key of the value.
        on_secret: receives every secret.
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
    # A quoted text of an override.
    if dataclasses.is_dataclass(value) and hasattr(value, "text"):
        return dataclasses.replace(cast(Any, value), text=_redact(value.text, secret, on_secret))
    if secret and isinstance(value, int | float) and not isinstance(value, bool):
        on_secret(str(value))
        return MASK
    return value


def learn(config: Mapping[str, Any]) -> None:
    """Have `hide` mask the secrets of a resolved configuration and of the environment, both as they
    are now, in any text. They are looked for when the next text is masked.

    A plain word, such as `ollama`, or the name of a part of this package is no secret, since
    masking it would garble texts.
    """
    # A class of the user's own may take a secret out of the configuration that it is given.
    _unread.append(_Unread(copy.deepcopy(config), dict(os.environ)))
    if len(_unread) > MOST_UNREAD:
        _read()


def _read() -> None:
    """Look for the secrets of the configurations since the last time. Another thread that does so
    is waited for."""
    if not _unread:
        return
    with _reading:
        for entry in tuple(_unread):
            try:
                _remember_all(entry.config, entry.environment)
            except Exception:  # a later text is masked without it
                _is_read(entry)
                raise
            _is_read(entry)


def _is_read(entry: _Unread) -> None:
    """Take an entry off, unless a signal handler that masked a text meanwhile has done so."""
    with contextlib.suppress(ValueError):
        _unread.remove(entry)


def _remember_all(config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """See `learn`."""
    redact(config, on_secret=_remember)
    for path, _, secret in config.get(AS_WRITTEN) or ():
        if secret:
            redact({"secret": _leaf(config, path)}, on_secret=_remember)
    engine = config.get("engine")  # of any kind, since it was not validated yet
    named = engine.get("api_key_env") if isinstance(engine, Mapping) else None
    for name, value in environment.items():
        if (name == named or is_secret(name)) and not _PLAIN.fullmatch(value.strip()):
            _remember(value)


def _remember(value: str) -> None:
    value = value.strip().strip("'\"")
    if value in _structure():
        return
    forms = {value, unquote(value), quote(value, safe="")}
    new = {
        form
        for form in forms
        if len(form) >= SHORTEST and form.lower() not in NOTHING and MASK not in form
    }
    learn_known(new)


@functools.cache
def _structure() -> frozenset[str]:
    """The names in the structure of configurations: groups, options, and modules of `_target_`s."""
    package = Path(__file__).resolve().parent
    folders = (package, package / "conf", package.parent / "conf")
    paths = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in ("", ".py", ".yaml")
    ]
    return frozenset((package.name, *(path.stem for path in paths)))


def known() -> frozenset[str]:
    """Every secret that was learned, for another process that reads texts for this one."""
    _read()
    with _lock:
        return frozenset(_known)


def learn_known(secrets: Collection[str]) -> None:
    """Remember what another process has as `known`."""
    global _pattern
    with _lock:
        if not _known.issuperset(secrets):
            _known.update(secrets)
            _pattern = None


def forget() -> None:
    """Forget all remembered secrets."""
    global _pattern
    _unread.clear()
    with _lock:
        _known.clear()
        _pattern = None


def shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration for storing and showing: values from the environment as written,
    secrets masked."""
    return cast(dict[str, Any], clean(redact(_written(config, lambda secret: True))))


def anonymous(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration for an identity: with values from the environment, unless they are
    secret."""
    return cast(dict[str, Any], redact(_written(config, lambda secret: secret)))


def _written(config: Mapping[str, Any], applies: Callable[[bool], bool]) -> dict[str, Any]:
    """The configuration with its environment values as written where `applies(is secret)` is
    true."""
    entries = [(path, raw) for path, raw, secret in config.get(AS_WRITTEN) or () if applies(secret)]
    result = {key: value for key, value in config.items() if key != AS_WRITTEN}
    result = copy.deepcopy(result) if entries else result
    for path, raw in entries:
        if (parent := _leaf(result, path[:-1])) is not None and _leaf(result, path) is not None:
            parent[path[-1]] = raw
    return result


def _leaf(node: Any, path: list[Any]) -> Any:
    """The value at a path of keys and indices, or None."""
    for key in path:
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError):
            return None
    return node


# ---- the console


class _Hiding:
    """An output stream that masks secrets."""

    def __init__(self, stream: Any, hide_text: Callable[[str], str]) -> None:
        self._stream, self._hide = stream, hide_text

    def write(self, text: str) -> int:
        """Write a text with its secrets masked; returns its length, as every stream does."""
        self._stream.write(self._hide(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line with its secrets masked."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def console(whole: bool = False) -> Iterator[None]:
    """Mask remembered secrets on stdout and stderr while the context is open; for the main thread,
    since the streams belong to the process.

    Args:
        whole: whether configurations are printed, in which names show secrets, too; not for a
            model's answers.
    """
    saved = sys.stdout, sys.stderr
    if whole:
        learn({})  # the secrets of the environment, which a printed configuration may resolve
    hiding = (lambda text: hide(text, strict=True)) if whole else _hide_known
    sys.stdout, sys.stderr = (cast(Any, _Hiding(stream, hiding)) for stream in saved)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = saved
