"""A small server in place of vLLM's, SGLang's or llama.cpp's: it takes their command lines, speaks
OpenAI's API, and counts in its /metrics as they do. `python stand_in.py ARGUMENTS`.

It keeps prefixes where it is told to, runs as many requests at once as it is told, and drafts where
it is told. Arguments that no real one has: --fault-exit (it ends while it starts), --fault-loading
S (it is not ready for so long), --fault-metrics (it has none).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

from tests.engines.fake_server import Handler

STEP_S = 0.001


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """The arguments by name."""
    given: dict[str, Any] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) else "--"
            name = word.removeprefix("--")
            given[name] = True if value.startswith("--") else value
            if name.startswith("no-"):
                given[name.removeprefix("no-")] = False
    return given


def prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y),
        min(len(one), len(other)),
    )


class StandIn:
    """What the server is told and has counted."""

    def __init__(self, words: Sequence[str]) -> None:
        self.given = parsed(words)
        vllm, sglang = "serve" in words, "sglang.launch_server" in words
        self.engine = "vllm" if vllm else "sglang" if sglang else "llamacpp"
        self.began_s = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.resets = 0
        self.prompts: list[list[int]] = []
        self.asked: list[list[int]] = []
        slots = {"vllm": "max-num-seqs", "sglang": "max-running-requests", "llamacpp": "parallel"}
        self.slots = threading.Semaphore(int(self.given[slots[self.engine]]))
        self.lock = threading.Lock()

    @property
    def caches(self) -> bool:
        if self.engine == "sglang":
            return "disable-radix-cache" not in self.given
        name = {"vllm": "enable-prefix-caching", "llamacpp": "cache-prompt"}[self.engine]
        return bool(self.given[name])

    @property
    def drafts(self) -> bool:
        names = ("speculative-config", "speculative-algorithm", "spec-type")
        return any(name in self.given for name in names)

    def take(self, prompt: list[int], output: int) -> int:
        """Count a request; the tokens of its prompt that were cached."""
        with self.lock:
            self.asked.append(prompt)
            cached = max((prefix_length(prompt, seen) for seen in self.prompts), default=0)
            cached = min(cached, len(prompt) - 1) if self.caches else 0
            self.prompts.append(prompt)
            self.counts["queried"] += len(prompt)
            self.counts["cached"] += cached
            self.counts["output"] += output
            self.counts["steps"] += output
            if self.drafts:
                self.counts["drafts"] += 1
                self.counts["drafted"] += 4
                self.counts["accepted"] += 3
            return cached

    def empty(self) -> None:
        self.prompts.clear()
        self.resets += 1

    def metrics(self) -> str:
        """The page of the engine."""
        count = self.counts
        if self.engine == "sglang":
            named = {
                'prompt_tokens_total{model_name="m"}': count["queried"],
                'cached_tokens_total{model_name="m",cache_source="device"}': count["cached"],
                'generation_tokens_total{model_name="m"}': count["output"],
                'num_retracted_requests_total{model_name="m"}': 0,
                'spec_verify_calls_total{model_name="m"}': count["drafts"],
                'queue_time_seconds_sum{model_name="m"}': count["steps"] / 50,
                'queue_time_seconds_count{model_name="m"}': count["steps"],
            }
        elif self.engine == "llamacpp":
            named = {
                "prompt_tokens_total": count["queried"] - count["cached"],
                "prompt_tokens_cached_total": count["cached"],
                "n_decode_total": count["steps"],
                "requests_processing": 0,
                "requests_deferred": 0,
                "spec_decode_num_drafts_total": count["drafts"],
                "spec_decode_num_draft_tokens_total": count["drafted"],
                "spec_decode_num_accepted_tokens_total": count["accepted"],
            }
        else:
            chunk = 512 if self.given["enable-chunked-prefill"] else 2048
            info = f'block_size="16",cache_dtype="{self.given.get("kv-cache-dtype", "auto")}"'
            named = {
                'prefix_cache_queries_total{engine="0"}': count["queried"],
                'prefix_cache_hits_total{engine="0"}': count["cached"],
                'num_preemptions_total{engine="0"}': 0,
                'num_requests_running{engine="0"}': 0,
                'iteration_tokens_total_bucket{engine="0",le="512.0"}': count["steps"]
                * (chunk == 512),
                'iteration_tokens_total_bucket{engine="0",le="2048.0"}': count["steps"],
                'iteration_tokens_total_bucket{engine="0",le="+Inf"}': count["steps"],
                'iteration_tokens_total_count{engine="0"}': count["steps"],
                'request_queue_time_seconds_sum{engine="0"}': count["steps"] / 100,
                'request_queue_time_seconds_count{engine="0"}': count["steps"],
                f"cache_config_info{{{info}}}": 1,
            }
            if self.drafts:
                named |= {
                    "spec_decode_num_drafts_total": count["drafts"],
                    "spec_decode_num_draft_tokens_total": count["drafted"],
                    "spec_decode_num_accepted_tokens_total": count["accepted"],
                }
        return "\n".join(f"{self.engine}:{name} {value}" for name, value in named.items()) + "\n"

    def log(self) -> list[str]:
        """What it prints as it starts."""
        given = self.given
        if self.engine == "llamacpp":
            kind = given.get("cache-type-k", "f16")
            return [
                "build 11434 (0c1e570) with GNU",
                f"flash_attn            = {given.get('flash-attn', 'auto')}",
                f"KV buffer: K ({kind}):    1.00 MiB, V ({kind}):    1.00 MiB",
            ]
        if self.engine == "sglang":
            return [f"server_args=ServerArgs(attention_backend='{given.get('attention-backend')}'"]
        eager = given.get("enforce-eager") is True
        return ["dtype=torch.bfloat16,"] + ["torch.compile took 1.0 s"] * (not eager)


class StandInHandler(Handler):
    """Speaks for a StandIn, which is in its settings."""

    @property
    def stand_in(self) -> StandIn:
        return self.settings["stand_in"]  # type: ignore[no-any-return]

    def do_GET(self) -> None:
        loading = float(self.stand_in.given.get("fault-loading", 0))
        if time.monotonic() - self.stand_in.began_s < loading:
            return self.answer(503, {"error": {"message": "loading model"}})
        if self.route == "/health":
            return self.answer(200, {})
        if self.route == "/metrics" and "fault-metrics" not in self.stand_in.given:
            return self.plain(200, self.stand_in.metrics().encode())
        if self.route == "/v1/models":
            kind = "Q8_0" if "Q8_0" in str(self.stand_in.given.get("model")) else "BF16"
            meta = {"ftype": kind, "size": 1000}
            return self.answer(200, {"data": [{"id": "m", "max_model_len": 512, "meta": meta}]})
        return self.answer(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        if self.route in ("/reset_prefix_cache", "/flush_cache") or "action=erase" in self.path:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.stand_in.empty()
            return self.answer(200, {})
        return super().do_POST()

    def stream(self, body: dict[str, Any], ids: bool) -> None:
        with self.stand_in.slots:
            self.cached = self.stand_in.take(body["prompt"], body["max_tokens"])
            super().stream(body, ids)

    def prompt_usage(self, body: dict[str, Any]) -> dict[str, int]:
        return {"prompt_tokens": len(body["prompt"])}

    def prompt_details(self) -> dict[str, Any]:
        asked = ("enable-prompt-tokens-details", "enable-cache-report")
        if self.stand_in.engine != "llamacpp" and not any(x in self.stand_in.given for x in asked):
            return {}
        return {"prompt_tokens_details": {"cached_tokens": self.cached}}


def serve(stand_in: StandIn, say: Callable[[str], None]) -> ThreadingHTTPServer:
    """A server that listens at the port that it is told; the caller runs it."""
    for line in stand_in.log():
        say(line)
    settings = {"stand_in": stand_in, "step_s": STEP_S}
    handler = type("Settled", (StandInHandler,), {"settings": settings})
    address = ("127.0.0.1", int(stand_in.given["port"]))
    server = ThreadingHTTPServer(address, handler)
    server.daemon_threads = True
    return server


if __name__ == "__main__":
    if "--fault-exit" in sys.argv:
        print("error: unknown model architecture", flush=True)
        sys.exit(1)
    serve(StandIn(sys.argv), lambda line: print(line, flush=True)).serve_forever()
