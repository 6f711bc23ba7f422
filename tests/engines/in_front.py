"""engine=openai in front of servers of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from minivllm.config.compose import build, compose
from tests.engines import fake_server

Build = Callable[[Sequence[Mapping[str, Any]], Sequence[str], Mapping[str, Any]], Any]


@contextmanager
def engines() -> Iterator[Build]:
    """Makes an engine in front of servers: the settings of each, overrides, and knobs of the
    engine; all of them end with the context."""
    with ExitStack() as closing:

        def build_one(
            each: Sequence[Mapping[str, Any]], overrides: Sequence[str], knobs: Mapping[str, Any]
        ) -> Any:
            urls = []
            for settings in each:
                server, url = fake_server.in_thread(**settings)
                closing.callback(server.shutdown)
                urls.append(url)
            config = compose(["engine=openai", *overrides])
            config["engine"] |= {"url": urls if len(urls) > 1 else urls[0], **knobs}
            engine = build(config["engine"], config=config)
            closing.callback(engine.close)
            return engine

        yield build_one
