"""Secrets: what is one, and how configurations, commands and texts are stored and shown without any. Torch-free.

A secret is known by the name that it stands under (`api_key`, `--token`, `HF_TOKEN=`, `Authorization:`, the user and
password of a URL), or by its form (`Bearer ...`, `hf_...`). What is found under a name in a configuration, or in the
environment, is remembered (`learn`), so that it is hidden also where it stands in another text without its name, as in
a server's error. Identities, names and overrides are made without what is remembered, which may differ tomorrow.

Whatever is written or shown goes through here: `shown` for a configuration, `hide` for a text, `clean` for a value
that holds texts, `console` for what is printed; and `overrides.py` for an override.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, unquote

MASK = "***"
AS_WRITTEN = "as_written"  # of a resolved configuration: values from the environment, see `interpolation.py`
SHORTEST = 6  # characters of a secret that is looked for in every text: shorter ones are parts of words
_UNNAMED = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-.]")
_SECRET = re.compile(
    r"(?:^|_)(?:[a-z0-9]*(?:apikey|password|passwd|secret|accesskey|secretkey|privatekey|authtoken|accesstoken)s?"
    r"|(?:api|[a-z]+)_keys|[a-z]+_pwd|key|passphrase|passcode|pass|pat|token|authorization|authentication|auth"
    r"|credentials?|cookies?|bearer|signature|sig|dsn|connection_string)(?:_?\d+)?$"
)
_HARMLESS = re.compile(
    r"(?:^|_)(?:eos|bos|pad|unk|mask|sep|cls|stop|end|start|image|video|audio|think|special|tool|vision|output|input"
    r"|prompt|first|last|next|per|each|new|max|min|decoder_start)_token$"
    r"|(?:^|_)(?:sort|cache|prefix|group|primary|foreign|public|hash|partition)_key$|^pwd$|^oldpwd$"
)
_WEAK = (
    "key",
    "pass",
    "pat",
    "auth",
    "sig",
    "token",
    "signature",
    "cookie",
    "cookies",
    "bearer",
    "credential",
)
_BARE = ("key", "pat", "sig", "auth")  # of the weak ones: in a value they are mostly a word of something else
_STRUCTURE = ("choices", "_target_")  # of what a configuration is made: no word of it is masked
_PLAIN = re.compile(r"[A-Za-z]{1,15}")  # a word like any other, which texts are full of
_NOTHING = ("", "null", "none", "true", "false", MASK)
_ENV = re.compile(r"\$\{oc\.env:([^,{}]+)(?:,([^{}]*))?\}")
_INTERPOLATION = r"\$\{(?:[^{}]|\$\{[^{}]*\}){0,500}\}"
_QUOTED = r"\"(?:[^\"\\]|\\.){0,4000}\"|'(?:[^'\\]|\\.){0,4000}'"
_NAME = r"[A-Za-z_][\w.\-]*+"
# The patterns take time in proportion to a text, whatever is in it: names begin at an edge and are not tried again.
# name=value, in overrides, environments, options and queries
_ASSIGNED = re.compile(rf"([?&]?)(?<![\w.\-])(-{{0,2}})({_NAME})\s?=\s?")
_ASSIGNED_VALUE = re.compile(rf"{_QUOTED}|\[[^\]]{{0,2000}}\]|{_INTERPOLATION}|[^\s&;}}\]'\"]+")
# name: value, in headers, YAML, JSON and Python
_MAPPED = re.compile(
    rf"(^[ \t]*+(?:-[ ]++)*+|[{{,]\s*+)?(?<![\w.\-])([\"']?)({_NAME})\2[ \t]*+:[ \t]*+", re.MULTILINE
)
_MAPPED_VALUE = re.compile(
    rf"{_QUOTED}|{_INTERPOLATION}|{{(?:[^{{}}]|{{[^{{}}]{{0,500}}}}){{0,500}}}}"
    r"|(?!//)[^\s,{}\[\]'\"][^,{}\[\]'\"\n]{0,2000}(?=}|,\s{0,9}[\w.\-]{1,99}:)"  # words up to the next name
    r"|(?:(?:Bearer|Basic|Token)\s+)?(?!//)[^\s,{}\[\]'\"][^\s,}\]'\"]*"
)
# --name value ..., also as a list of words
_FLAGGED = re.compile(
    rf"(?<![\w-])(--?[A-Za-z][\w-]*+)((?:\s++|[\"'],\s*+(?=[\"'])))"
    rf"({_QUOTED}|[^\s'\"-][^\s'\"]*+)((?:\s++[^\s'\"-][^\s'\"]*+)*+)"
)
_USER = re.compile(r"(?<![\w-])(-u|--user)(\s+|=)([^\s'\":]+:[^\s'\"]+)")
# One of these is in every text that may hold a secret which is not yet known.
_SIGNS = (
    *("key", "pass", "pwd", "pat", "secret", "auth", "access", "sig", "credential", "cookie", "bearer"),
    *("basic", "dsn", "connection", "@", "-u", "sk-", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    *("xox", "akia", "eyj"),
)
_URL = re.compile(r"(?<![A-Za-z0-9+.\-])([A-Za-z][A-Za-z0-9+.\-]*+://)([^\s/?#'\"]+)@")
_SCHEME = re.compile(
    r"\b(Bearer\s+)((?=\S*[\d._~+/=-])[^\s'\",]{6,})|\b(Basic\s+)((?=\S*[A-Z0-9=])[A-Za-z0-9+/=]{8,})"
)
_SHAPES = re.compile(
    r"(?<![\w-])(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|glpat-[\w-]{16,}|xox[baprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}+\.[\w-]{10,}+\.[\w-]{5,})"
)

Found = Callable[[str], None]  # is given each secret that is masked
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None  # of all that are known; made when first needed


def is_secret(name: str) -> bool:
    """Whether what stands under such a name is secret: api_key, X-Api-Key, hf_token; but not eos_token, max_tokens."""
    plain = _UNNAMED.sub("_", name).lower().strip("_")
    return bool(_SECRET.search(plain)) and not _HARMLESS.search(plain)


# ---- texts


def hide(text: str, strict: bool = False) -> str:
    """A text without secrets.

    Args:
        text: any text.
        strict: whether it is a command or part of a configuration, where also `key=...` is a secret's name; in a
            sentence that may be any key.
    """
    return _hide(_hide_known(text), strict, _ignore)


def suspicious(text: str) -> bool:
    """Whether `hide` has to look closely: of a long text of many, most have nothing that may be a secret."""
    return bool(_known) or _signs(text)


def _signs(text: str) -> bool:
    small = text.lower()
    tokens = small.count("token") > small.count("tokens")  # which are counted and no secrets
    return tokens or any(sign in small for sign in _SIGNS)


def _ignore(secret: str) -> None:
    """For who does not ask which secrets there were."""


def clean(value: Any) -> Any:
    """A value of nested dictionaries and lists, with every text in it hidden."""
    if isinstance(value, Mapping):
        return {key: redact(item) if key in _STRUCTURE else clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return hide(value) if isinstance(value, str) else value


def _hide(text: str, strict: bool, found: Found, inner: bool = False) -> str:
    """See `hide`; `inner` says that it is a value of a configuration, whose beginning is no name."""

    def mask(value: str) -> str:
        """The mask in a value's own quotes; what is nothing, or is taken from the environment, stays."""
        quotes = value[0] if value[:1] in ("'", '"') and value[-1:] == value[:1] else ""
        content = value[1:-1] if quotes else value
        if content.lower() in _NOTHING or _from_environment(content) or not re.search(r"\w", content):
            return value
        found(content)
        return f"{quotes}{MASK}{quotes}"

    def assigned(head: re.Match[str]) -> bool:
        query, dashes, name = head.groups()
        secret = [part.lower() for part in name.split(".") if is_secret(part)]
        if query or not all(part in _WEAK for part in secret):
            return bool(secret)
        if not secret or text[max(head.start() - 1, 0) : head.start()] in (
            "/",
            "\\",
            "=",
        ):  # as in data/key=3/part.jsonl
            return False
        if inner and name in _BARE:
            return bool(dashes)
        return strict or name.lower() != "key"

    def mapped(head: re.Match[str]) -> bool:
        before, quotes, name = head.groups()
        if not is_secret(name):
            return False
        braces = before is not None and before.startswith(("{", ",")) and "{" in text
        if quotes or braces or name.lower() not in _WEAK:
            return True
        if name.lower() in _BARE:
            return strict and not inner and before is not None
        return strict

    def flagged(match: re.Match[str]) -> str:
        flag, space, value, more = match.groups()
        if not is_secret(flag.lstrip("-")):
            return match[0]
        if "api" in flag:  # takes several
            for word in more.split():
                found(word)
            more = ""
        return f"{flag}{space}{mask(value)}{more}"

    def url(match: re.Match[str]) -> str:
        if match[2] == MASK or _ENV.search(match[2]):
            return match[0]
        user, _, password = match[2].partition(":")
        found(match[2])
        found(password or user)
        found(base64.b64encode(unquote(match[2]).encode()).decode())
        return f"{match[1]}{MASK}@"

    def scheme(match: re.Match[str]) -> str:
        word, value = match[1] or match[3], match[2] or match[4]
        found(value)
        return f"{word}{MASK}"

    if not _signs(text):
        return text
    text = _URL.sub(url, text)
    text = _USER.sub(lambda m: f"{m[1]}{m[2]}{mask(m[3])}", text)
    text = _replace(text, _ASSIGNED, _ASSIGNED_VALUE, assigned, mask)
    text = _FLAGGED.sub(flagged, text)
    text = _replace(text, _MAPPED, _MAPPED_VALUE, mapped, mask)
    text = _SCHEME.sub(scheme, text)
    return _SHAPES.sub(MASK, text)


def _replace(
    text: str,
    heads: re.Pattern[str],
    values: re.Pattern[str],
    wanted: Callable[[re.Match[str]], bool],
    mask: Callable[[str], str],
) -> str:
    """The text with the value behind each wanted head masked; what no head is wanted for is looked through, too."""
    parts, end = [], 0
    for head in heads.finditer(text):
        if head.end() > end and wanted(head) and (value := values.match(text, head.end())):
            parts += [text[end : value.start()], mask(value[0])]
            end = value.end()
    return "".join((*parts, text[end:]))


def _from_environment(value: str) -> bool:
    """Whether a text is an interpolation that says where a secret is and not what it is, not even as a default."""
    found = _ENV.findall(value)
    return bool(found) and value[:2] == "${" and all(default.lower() in _NOTHING for _, default in found)


def _hide_known(text: str, mask: str | Callable[[re.Match[str]], str] = MASK) -> str:
    global _pattern
    if not _known:
        return text
    if _pattern is None:
        words = "|".join(re.escape(word) for word in sorted(_known, key=len, reverse=True))
        _pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])")
    return _pattern.sub(mask, text)


def blank(content: bytes) -> bytes:
    """Bytes of a text with every secret that is known overwritten: of the same length, so that a file may stay open."""
    text = content.decode("utf-8", "surrogateescape")
    hidden = _hide_known(text, lambda secret: "*" * len(secret[0].encode("utf-8", "surrogateescape")))
    return content if hidden is text else hidden.encode("utf-8", "surrogateescape")


# ---- configurations


def redact(value: Any, name: str = "", found: Found = _ignore) -> Any:
    """A configuration, or a part of one, without secrets: what stands under a secret's name, and what texts hold.

    Args:
        value: nested dictionaries and lists.
        name: what it stands under.
        found: is given every secret.
    """
    return _redact(value, is_secret(name), found)


def _redact(value: Any, secret: bool, found: Found) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _redact(item, key != "_target_" and (secret or is_secret(str(key))), found)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        flags = [
            False,
            *(isinstance(item, str) and item[:1] == "-" and is_secret(item.lstrip("-")) for item in value),
        ]
        return [_redact(item, secret or flag, found) for item, flag in zip(value, flags, strict=False)]
    if isinstance(value, str):
        if not secret:
            return _hide(value, True, found, inner=True)
        if value.lower() in _NOTHING or _from_environment(value):
            return value
        found(value)
        return MASK
    if dataclasses.is_dataclass(value) and hasattr(value, "text"):  # with its quotes, of an override
        return dataclasses.replace(cast(Any, value), text=_redact(value.text, secret, found))
    if secret and isinstance(value, int | float) and not isinstance(value, bool):
        found(str(value))
        return MASK
    return value


def learn(config: Mapping[str, Any]) -> None:
    """Remember the secrets of a resolved configuration and of the environment, so that `hide` finds them in any text.

    What is a plain word there, as `ollama`, or names a part of this package is none: texts would lose what they say.
    """
    redact(config, found=_remember)
    for path, _, secret in config.get(AS_WRITTEN) or ():
        if secret:
            redact({"secret": _leaf(config, path)}, found=_remember)
    named = (config.get("engine") or {}).get("api_key_env")
    for name, value in os.environ.items():
        if (name == named or is_secret(name)) and not _PLAIN.fullmatch(value.strip()):
            _remember(value)


def _remember(value: str) -> None:
    global _pattern
    value = value.strip().strip("'\"")
    if value in _structure():
        return
    for form in {value, unquote(value), quote(value, safe="")}:
        if len(form) >= SHORTEST and form.lower() not in _NOTHING and MASK not in form and form not in _known:
            _known.add(form)
            _pattern = None


@functools.cache
def _structure() -> frozenset[str]:
    """The names of what configurations consist of: groups, options, and the modules of their `_target_`."""
    package = Path(__file__).resolve().parent
    folders = (package, package / "conf", package.parent / "conf")
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in ("", ".py", ".yaml")]
    return frozenset((package.name, *(path.stem for path in paths)))


def forget() -> None:
    """Forget every secret that was learned."""
    global _pattern
    _known.clear()
    _pattern = None


def shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration as it is stored and shown: values from the environment as written, secrets masked."""
    return cast(dict[str, Any], clean(redact(_written(config, lambda secret: True))))


def anonymous(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration as it counts for an identity: values from the environment count unless they are secret."""
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
    """While it is open, nothing secret that is known is printed.

    Args:
        whole: whether configurations are printed, in which secrets are also found by name; not for a model's answers.
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
