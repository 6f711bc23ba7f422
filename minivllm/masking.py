"""Masking of secrets in texts, recognised by the name of a value or by its form. Torch-free."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable
from urllib.parse import unquote

MASK = "***"
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
# Names of secrets that are ordinary words, too.
_WEAK = (
    *("key", "pass", "pat", "auth", "sig", "token", "signature", "cookie", "cookies", "bearer"),
    "credential",
)
# Weak names that are mostly ordinary words within a value.
_BARE = ("key", "pat", "sig", "auth")
NOTHING = ("", "null", "none", "true", "false", MASK)
_ENV = re.compile(r"\$\{oc\.env:([^,{}]+)(?:,([^{}]*))?\}")
_INTERPOLATION = r"\$\{(?:[^{}]|\$\{[^{}]*\}){0,500}\}"
_QUOTED = r"\"(?:[^\"\\]|\\.){0,4000}\"|'(?:[^'\\]|\\.){0,4000}'"
_NAME = r"[A-Za-z_][\w.\-]*+"
# The patterns take linear time on any text: names begin at an edge and never backtrack.
# name=value, in overrides, environments, options and queries.
_ASSIGNED = re.compile(rf"([?&]?)(?<![\w.\-])(-{{0,2}})({_NAME})\s?=\s?")
_ASSIGNED_VALUE = re.compile(rf"{_QUOTED}|\[[^\]]{{0,2000}}\]|{_INTERPOLATION}|[^\s&;}}\]'\"]+")
# name: value, in headers, YAML, JSON and Python.
_MAPPED = re.compile(
    rf"(^[ \t]*+(?:-[ ]++)*+|[{{,]\s*+)?(?<![\w.\-])([\"']?)({_NAME})\2[ \t]*+:[ \t]*+",
    re.MULTILINE,
)
_MAPPED_VALUE = re.compile(
    rf"{_QUOTED}|{_INTERPOLATION}|{{(?:[^{{}}]|{{[^{{}}]{{0,500}}}}){{0,500}}}}"
    # Words up to the next name.
    r"|(?!//)[^\s,{}\[\]'\"][^,{}\[\]'\"\n]{0,2000}(?=}|,\s{0,9}[\w.\-]{1,99}:)"
    r"|(?:(?:Bearer|Basic|Token)\s+)?(?!//)[^\s,{}\[\]'\"][^\s,}\]'\"]*"
    # A list of YAML, an item a line.
    r"|(?:\r?\n[ \t]*+- [^\r\n]*+)++"
)
_ITEM = re.compile(r"(\n[ \t]*+- )([^\r\n]*+)")
# --name value ..., also as a list of words.
_FLAGGED = re.compile(
    rf"(?<![\w-])(--?[A-Za-z][\w-]*+)((?:\s++|[\"'],\s*+(?=[\"'])))"
    rf"({_QUOTED}|[^\s'\"-][^\s'\"]*+)((?:\s++[^\s'\"-][^\s'\"]*+)*+)"
)
_USER = re.compile(r"(?<![\w-])(-u|--user)(\s+|=)([^\s'\":]+:[^\s'\"]+)")
# Every text with a secret that is not yet known has one of these.
_SIGNS = (
    *("key", "pass", "pwd", "pat", "secret", "auth", "access", "sig", "credential", "cookie"),
    *("bearer", "basic", "dsn", "connection", "@", "-u", "sk-", "hf_", "xox", "akia", "eyj"),
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
)
_URL = re.compile(r"(?<![A-Za-z0-9+.\-])([A-Za-z][A-Za-z0-9+.\-]*+://)([^\s/?#'\"]+)@")
_SCHEME = re.compile(
    r"\b(Bearer\s+)((?=\S*[\d._~+/=-])[^\s'\",]{6,})|\b(Basic\s+)((?=\S*[A-Z0-9=])[A-Za-z0-9+/=]{8,})"
)
_SHAPES = re.compile(
    r"(?<![\w-])(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|glpat-[\w-]{16,}|xox[baprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}+\.[\w-]{10,}+\.[\w-]{5,})"
)

OnSecret = Callable[[str], None]  # receives each masked secret


def is_secret(name: str) -> bool:
    """Whether a name is that of a secret: api_key, X-Api-Key, hf_token; but not eos_token,
    max_tokens."""
    plain = _UNNAMED.sub("_", name).lower().strip("_")
    return bool(_SECRET.search(plain)) and not _HARMLESS.search(plain)


def has_signs(text: str) -> bool:
    """Whether a text has any sign of a secret; the others need no search."""
    small = text.lower()
    tokens = small.count("token") > small.count("tokens")  # max_tokens and its like are no secrets
    return tokens or any(sign in small for sign in _SIGNS)


@dataclasses.dataclass(frozen=True, slots=True)
class Masking:
    """Masks the secrets of a text that a name or a form shows.

    Args:
        strict: see `hide`.
        on_secret: receives each secret.
        inner: whether the text is a value of a configuration, which begins with no name.
    """

    strict: bool
    on_secret: OnSecret
    inner: bool = False

    def masked(self, text: str) -> str:
        """The text with its secrets masked."""
        if not has_signs(text):
            return text
        text = _URL.sub(self._url, text)
        text = _USER.sub(lambda m: f"{m[1]}{m[2]}{self._value(m[3])}", text)
        text = _replace(text, _ASSIGNED, _ASSIGNED_VALUE, self._is_assigned, self._value)
        text = _FLAGGED.sub(self._flagged, text)
        text = _replace(text, _MAPPED, _MAPPED_VALUE, self._is_mapped, self._value)
        text = _SCHEME.sub(self._scheme, text)
        return _SHAPES.sub(MASK, text)

    def _value(self, value: str) -> str:
        """The mask in the quotes of the value; an empty value, or one from the environment, is
        unchanged."""
        if value[:1] in ("\n", "\r"):
            return _ITEM.sub(lambda item: item[1] + self._value(item[2]), value)
        quotes = value[0] if value[:1] in ("'", '"') and value[-1:] == value[:1] else ""
        content = value[1:-1] if quotes else value
        if content.lower() in NOTHING or from_environment(content) or not re.search(r"\w", content):
            return value
        self.on_secret(content)
        return f"{quotes}{MASK}{quotes}"

    def _is_assigned(self, head: re.Match[str]) -> bool:
        """Whether a secret follows `name=`."""
        query, dashes, name = head.groups()
        secret = [part.lower() for part in name.split(".") if is_secret(part)]
        if query or not all(part in _WEAK for part in secret):
            return bool(secret)
        before = head.string[max(head.start() - 1, 0) : head.start()]
        if not secret or before in ("/", "\\", "="):  # as in data/key=3/part.jsonl
            return False
        if self.inner and name in _BARE:
            return bool(dashes)
        return self.strict or name.lower() != "key"

    def _is_mapped(self, head: re.Match[str]) -> bool:
        """Whether a secret follows `name:`."""
        before, quotes, name = head.groups()
        if not is_secret(name):
            return False
        braces = before is not None and before.startswith(("{", ",")) and "{" in head.string
        if quotes or braces or name.lower() not in _WEAK:
            return True
        if name.lower() in _BARE:
            return self.strict and not self.inner and before is not None
        return self.strict

    def _flagged(self, match: re.Match[str]) -> str:
        """An option with its values, which are masked if the option is a secret's."""
        flag, space, value, more = match.groups()
        if not is_secret(flag.lstrip("-")):
            return match[0]
        if "api" in flag:  # such options take several values
            for word in more.split():
                self.on_secret(word)
            more = ""
        return f"{flag}{space}{self._value(value)}{more}"

    def _url(self, match: re.Match[str]) -> str:
        """The start of a URL, with its user and password masked."""
        if match[2] == MASK or _ENV.search(match[2]):
            return match[0]
        user, _, password = match[2].partition(":")
        self.on_secret(match[2])
        self.on_secret(password or user)
        self.on_secret(base64.b64encode(unquote(match[2]).encode()).decode())
        return f"{match[1]}{MASK}@"

    def _scheme(self, match: re.Match[str]) -> str:
        """An authentication scheme, with its credentials masked."""
        word, value = match[1] or match[3], match[2] or match[4]
        self.on_secret(value)
        return f"{word}{MASK}"


def _replace(
    text: str,
    heads: re.Pattern[str],
    values: re.Pattern[str],
    applies: Callable[[re.Match[str]], bool],
    mask: Callable[[str], str],
) -> str:
    """The text with the value behind each head masked for which `applies` is true; the search goes
    on within the values of other heads."""
    parts, end = [], 0
    for head in heads.finditer(text):
        if head.end() > end and applies(head) and (value := values.match(text, head.end())):
            parts += [text[end : value.start()], mask(value[0])]
            end = value.end()
    return "".join((*parts, text[end:]))


def from_environment(value: str) -> bool:
    """Whether a text is an interpolation of environment variables without a secret default."""
    references = _ENV.findall(value)
    return (
        bool(references)
        and value[:2] == "${"
        and all(default.lower() in NOTHING for _, default in references)
    )
