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
    """engine=openai."""

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
    """Base URL of /completions, /chat/completions, /responses; /v1 where it has no path; several
    servers of the same model in a list."""
    router: Literal["round_robin", "least_tokens", "session"] = knob("round_robin", unasked=True)
    """Of several URLs, the one that gets a request, as with parallel.router."""
    api: Literal["completions", "chat", "responses"] = knob("completions", unasked=True)
    """The API that is called; chat and responses are sent messages."""
    model: str | None = None
    """The model's name on the server; null: the first in the server's list."""
    command: str | None = None
    """Command that starts the server, e.g. "vllm serve Qwen/Qwen3-0.6B --port 8000"; null: it runs
    already."""
    start_timeout_s: float = knob(600.0, above=0)
    """Longest wait for the started server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key, if the server needs one."""
    prompt: Literal["auto", "ids", "text"] = "auto"
    """ids: token ids; text; auto: token ids, or text where the server rejects them."""
    max_connections: int = knob(256, at_least=1)
    """Most requests in flight to each URL; others wait in the client, which counts as latency."""
    extra: dict[str, Any] | None = None
    """Further fields of each request; null: {return_token_ids: true}, left out where a server
    rejects it (responses: none)."""
    cache_reset: str | None = None
    """A path to POST to before measuring, e.g. /reset_prefix_cache (vLLM) or /flush_cache
    (SGLang)."""
    idle_timeout_s: float = knob(300.0, above=0)
    """Longest time without a token for any request in flight."""

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
