"""The knobs of engine=openai, and what it supports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from minivllm.platform.options import knob, option
from minivllm.platform.support import MODEL, RUNTIME, EngineOptions, Knobs, Support


@option("minivllm.engines.openai.engine.OpenAIEngine")
@dataclass(frozen=True)
class OpenAIOptions(EngineOptions):
    """engine=openai.

    Args:
        url: where /completions and /models are below; or several of them, of servers that serve
            the same model, in a list.
        router: of several, which gets a request; see `parallel.router`.
        api: which of /completions, /chat/completions and /responses is asked.
        model: its name on the server; None is the first that it lists.
        command: starts the server; None if it runs already.
        start_timeout_s: how long to wait for it.
        api_key_env: environment variable with the key; none is sent where it is not set.
        prompt: "ids", "text", or "auto" for text only where the server rejects ids.
        max_connections: most requests under way at once, to each server.
        extra: further fields of each request; None asks for the token ids of each chunk.
        cache_reset: path to POST to that empties the server's prefix cache.
        idle_timeout_s: requests are given up where none of those under way has got a token for so
            long.
    """

    support = Support(
        "engine=openai",
        {
            "model": replace(
                MODEL, says="model.* but rope_scaling (its tokenizer, vocabulary and context)"
            ),
            "decoding": Knobs(
                (
                    *("max_tokens", "temperature", "top_p", "seed", "ignore_eos"),
                    *("presence_penalty", "frequency_penalty", "stop"),
                )
            ),
            "runtime": RUNTIME,
            "vision": Knobs(("processor",), says="vision.processor (what the server is set to)"),
        },
        package="aiohttp",
        remote=True,
        several_devices=True,
    )
    url: str | list[str] = "http://127.0.0.1:8000/v1"
    router: Literal["round_robin", "least_tokens", "session"] = knob("round_robin", unasked=True)
    api: Literal["completions", "chat", "responses"] = knob("completions", unasked=True)
    model: str | None = None
    command: str | None = None
    start_timeout_s: float = knob(600.0, above=0)
    api_key_env: str = "OPENAI_API_KEY"
    prompt: Literal["auto", "ids", "text"] = "auto"
    max_connections: int = knob(256, at_least=1)
    extra: dict[str, Any] | None = None
    cache_reset: str | None = None
    idle_timeout_s: float = knob(300.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api != "completions" and self.prompt == "ids":
            raise self.bad("prompt", f"is of engine.api=completions; {self.api} takes messages")
        if not self.urls or not all(re.match(r"https?://[^/]", url) for url in self.urls):
            raise self.bad(
                "url", "must begin with http:// or https://, and end before /completions"
            )
        if len({*self.urls}) < len(self.urls):
            raise self.bad("url", "names a server twice")
        if len(self.urls) > 1 and self.command is not None:
            raise self.bad("command", "starts one server: give one engine.url, or start them all")

    @property
    def urls(self) -> list[str]:
        """The servers, at least one."""
        return [self.url] if isinstance(self.url, str) else self.url

    @classmethod
    def supported(cls, config: Mapping[str, Any]) -> Support:
        """A server that is started here is given OMP_NUM_THREADS, as every worker is; another has
        its own threads. The responses API has fewer fields than the others."""
        knobs = {**cls.support.knobs}
        if config["engine"].get("command") is None:
            knobs["runtime"] = Knobs(("device",))
        if config["engine"].get("api") == "responses":
            knobs["decoding"] = Knobs(("max_tokens", "temperature", "top_p", "ignore_eos"))
        return replace(cls.support, knobs=knobs)
