"""Who may call what: the access that a route declares beside itself, keys of clients, and the names
of the server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.routing import Route, WebSocketRoute, compile_path

from minivllm.redaction import hide
from minivllm.serving.errors import ApiError
from minivllm.serving.options import ServeOptions, is_loopback

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.routing import BaseRoute
    from starlette.types import Scope

F = TypeVar("F", bound=Callable[..., Any])
_GETS = {"GET", "HEAD"}


class Access(Flag):
    """What a route needs of those who call it, and what the server does for it. By default it needs
    a key where the server has keys, and its calls are logged."""

    DEFAULT = 0
    OPEN = auto()  # needs no key
    COMMAND = auto()  # changes the server: pages of other sites cannot call it
    ENGINE = auto()  # is for the engine: refused before its body is read where the queue is full
    QUIET = auto()  # is called every few seconds, and not logged


def access(kind: Access) -> Callable[[F], F]:
    """Declare the access of the function that answers a route: a decorator below the route's."""

    def mark(endpoint: F) -> F:
        endpoint.access = kind  # type: ignore[attr-defined]
        return endpoint

    return mark


# The access of routes by their methods and paths; a WebSocket's method is "WEBSOCKET".
Accesses = Mapping[tuple[str, str], Access]


def accesses(routes: Iterable[BaseRoute]) -> Accesses:
    """What routes declare."""
    found: dict[tuple[str, str], Access] = {}
    for route in routes:
        if isinstance(route, Route | WebSocketRoute):
            kind = getattr(route.endpoint, "access", Access.DEFAULT)
            methods = (route.methods or ()) if isinstance(route, Route) else ("WEBSOCKET",)
            found |= {(method, route.path): kind for method in methods}
    return found


class RouteAccess:
    """The access of the routes of an application.

    Args:
        accesses: of its routes, and of those that another process answers.
    """

    def __init__(self, accesses: Accesses) -> None:
        self._plain = {place: kind for place, kind in accesses.items() if "{" not in place[1]}
        # A route of the user's own may have a secret in its path.
        self._paths = frozenset(path for _, path in self._plain if hide(path) == path)
        self._patterns = [
            (method, compile_path(path)[0], kind)
            for (method, path), kind in accesses.items()
            if "{" in path and kind is not Access.DEFAULT
        ]

    def has(self, path: str) -> bool:
        """Whether a route has this very path, whatever the method, without a secret in it."""
        return path in self._paths

    def of(self, scope: Scope) -> Access:
        """The access of the route that a call is for."""
        path = scope["path"]
        method = scope["method"] if scope["type"] == "http" else "WEBSOCKET"
        method = "GET" if method in _GETS else method
        if (kind := self._plain.get((method, path))) is not None:
            return kind
        found = (kind for one, regex, kind in self._patterns if one == method and regex.match(path))
        return next(found, Access.DEFAULT)


class ApiKeys:
    """The keys that open the server, compared in a time that does not depend on them.

    Args:
        keys: none opens it to all.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def fit(self, key: str) -> bool:
        """Whether this is one of them."""
        given = digest(key)
        return any([hmac.compare_digest(given, one) for one in self._digests])

    def given(self, headers: Headers) -> list[str]:
        """What a client sends as its key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = [token.strip()] if scheme.lower() == "bearer" else []
        return [*bearer, *headers.getlist("x-api-key")]


def digest(key: str) -> bytes:
    """What is compared and kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class OwnNames:
    """The names that a server without keys goes by: those of the machine itself, the address that
    it listens on, and `task.allowed_hosts`.

    Args:
        options: of the server.
        address: of this machine, to which a client has connected.
    """

    def __init__(self, options: ServeOptions, address: str) -> None:
        self._known = {*map(str.lower, (options.host, address, *options.allowed_hosts))}

    def has(self, name: str) -> bool:
        """Whether this is one of them."""
        return name in self._known or "*" in self._known or is_loopback(name)


def unauthorized() -> ApiError:
    """A client without a key that fits."""
    return ApiError(
        401,
        "an API key is missing or wrong: Authorization: Bearer KEY",
        kind="authentication_error",
        code="invalid_api_key",
    )
