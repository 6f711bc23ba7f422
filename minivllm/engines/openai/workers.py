"""The servers of a fleet that engine=openai asks: which of them gets a request, and what each of
them did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from minivllm.bench.metrics.request_trace import COMPLETED
from minivllm.engines.base import EngineOutput
from minivllm.engines.openai.client import Client
from minivllm.engines.openai.stream import Tokens
from minivllm.engines.openai.stream_event import ServerError
from minivllm.engines.peer_process import listeners
from minivllm.errors import BadInput
from minivllm.parallel.options import ParallelOptions, Routers
from minivllm.processes.router import RoutedRequest, make_router

T = TypeVar("T")


class Workers:
    """A client for each of some servers that serve the same model.

    Args:
        urls: of the servers, at least one.
        key: see Client.
        connections: to each of them.
        router: the policy that gives each request to a server.

    Attributes:
        clients: by the number of a server.
        seen: what each server was sent: the length of a prompt, and the answer's stream.

    Raises:
        BadInput: a URL is none.
    """

    def __init__(
        self, urls: Sequence[str], key: str | None, connections: int, router: Routers
    ) -> None:
        self.clients: list[Client] = []
        try:
            for url in urls:
                self.clients.append(Client(url, key, connections))
        except BaseException:
            self.close()
            raise
        self._router = make_router(ParallelOptions(replicas=len(urls), router=router), None)
        self._at: dict[str, int] = {}  # who has each unfinished request
        self.clear()

    def route(
        self, request_id: str, prompt: list[int], tokens: Tokens, wanted: int, session: str | None
    ) -> Client:
        """The client of a request, whose end calls `note`."""
        number = self._router.route(RoutedRequest(request_id, prompt, wanted, session))
        self._at[request_id] = number
        self.seen[number].append((len(prompt), tokens))
        return self.clients[number]

    def client_of(self, request_id: str) -> Client:
        """The client that has an unfinished request."""
        return self.clients[self._at[request_id]]

    def note(self, output: EngineOutput) -> None:
        """Note what has come of a request."""
        if output.finish_reason is None:
            return
        self._router.end(output.request_id)
        if (number := self._at.pop(output.request_id, None)) is not None:
            self._failures[number] += output.finish_reason not in COMPLETED

    def forget(self) -> None:
        """Note that all unfinished requests have ended."""
        for client in self.clients:
            client.wait(asyncio.sleep(0))  # by now none of them says anything any more
        for request_id in list(self._at):
            self._router.end(request_id)
        self._at.clear()

    def clear(self) -> None:
        """Count from 0."""
        self.seen: list[list[tuple[int, Tokens]]] = [[] for _ in self.clients]
        self._failures = [0] * len(self.clients)
        self._router.recount()
        for client in self.clients:
            client.queued_s.clear()

    @property
    def queued_s(self) -> list[float]:
        """How long each request waited that found no free connection."""
        return [waited for client in self.clients for waited in client.queued_s]

    @property
    def connections(self) -> int:
        """To all of them, at most."""
        return sum(client.connections for client in self.clients)

    def each_other(self, ask: Callable[[Client], T]) -> list[T]:
        """What each of them but the first answers.

        Raises:
            BadInput: one does not answer as it should; the line names it.
        """
        answers = []
        for client in self.clients[1:]:
            try:
                answers.append(ask(client))
            except (OSError, ServerError) as error:
                raise BadInput(f"engine.url={client.address('')}: {error}") from error
        return answers

    def context(self, model: str, served: Mapping[str, int | None]) -> int | None:
        """The shortest context of a model; None: no server says one.

        Args:
            model: that all requests name.
            served: the models of the first, with their contexts.

        Raises:
            BadInput: one of the others does not serve it.
        """
        contexts = [served[model]]
        for models, client in zip(self.each_other(Client.served), self.clients[1:], strict=True):
            contexts.append(models[chosen(client, models, model)])
        return min((size for size in contexts if size is not None), default=None)

    def processes(self) -> tuple[int, ...] | None:
        """The processes of this machine that serve; None: one is on another machine."""
        each = [listeners(client.address("")) for client in self.clients]
        if any(found is None for found in each):
            return None
        return tuple(sorted({pid for found in each for pid in found or ()}))

    def empty_caches(self, path: str) -> None:
        """Have all of them empty their prefix caches; see `Client.empty_cache`. Raises BadInput
        where one does not."""
        for client in self.clients:
            try:
                client.wait(client.empty_cache(path))
            except (OSError, ServerError) as error:
                raise BadInput(f"engine.cache_reset={path}: {error}") from None

    def counters(self) -> dict[str, dict[str, float | str]]:
        """What each of several servers did, for the group `parallel` of the liveness as of
        replicas; of one nothing.

        `share` is the part of all requests, `hit_rate` the cached part of the prompt tokens of the
        requests of which the server tells both.
        """
        if len(self.clients) == 1:
            return {}
        total = max(1, sum(self._router.given))
        parallel: dict[str, float | str] = {
            **self._router.report(),
            "placed_at": _listed(client.address("") for client in self.clients),
            "share": _listed(f"{count / total:.3f}" for count in self._router.given),
            "failures": _listed(self._failures),
            "hit_rate": _listed(map(_hit_rate, self.seen)),
        }
        return {"parallel": parallel}

    def close(self) -> None:
        """Close all connections."""
        for client in self.clients:
            client.close()


def chosen(client: Client, served: Mapping[str, int | None], model: str | None) -> str:
    """The model that requests to a server name: the first that it serves, or one of a name. Raises
    BadInput where it does not serve that."""
    if model is None and served:
        return next(iter(served))
    if model is None or model not in served:
        raise BadInput(
            f"engine.model={model}: {client.address('')} does not serve it; "
            f"it serves {', '.join(served)[:300] or 'none'}"
        )
    return model


def _listed(values: Iterable[object]) -> str:
    return " | ".join(map(str, values))


def _hit_rate(seen: Sequence[tuple[int, Tokens]]) -> str:
    known = [
        (one.cached_tokens, one.prompt_tokens)
        for _, one in seen
        if one.cached_tokens is not None and one.prompt_tokens
    ]
    return f"{sum(a for a, _ in known) / sum(b for _, b in known):.3f}" if known else "unknown"
