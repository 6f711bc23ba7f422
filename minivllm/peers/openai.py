"""engine=openai: any server that speaks OpenAI's completions API, behind the interface of every engine."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shlex
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from minivllm.bench.adapter import Adapter
from minivllm.bench.engine import EngineInfo, EngineOutput
from minivllm.engine.params import SamplingParams
from minivllm.engine.tokenizer import Tokenizer
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.source import resolve
from minivllm.peers.child import Child
from minivllm.peers.presence import INSTALL
from minivllm.peers.stream import Tokens, read_stream
from minivllm.peers.tables import OPENAI, OPENAI_WITH_COMMAND

ASK_S = 30.0  # for an answer that should not take any computing
PATIENCE_S = 120.0  # for the very first token: a server may compile when it is first asked
LINE_BYTES = 1 << 23  # longest event: some repeat the prompt
LOOK_S = 0.5  # between two looks at whether a server has started
GRACE_S = 15.0
TOKEN_IDS = {"return_token_ids": True}  # a server that knows it tells the ids of each chunk
PROBE = (1, 2, 3, 4)
NOTES = (
    "the server's batching, cache and precision are its own; no memory, breakdown or use of bandwidth is known",
    "first tokens include the way over HTTP",
)
KEEPS = (
    "the server's prefix cache was not emptied, and the warm-up has shown it the prompts: start it without one, or "
    "set engine.cache_reset"
)


class OpenAIEngine(Adapter):
    """Sends every request as a stream of its own, from an event loop in a thread.

    Args:
        config: the resolved configuration; `model` is what the server serves, as far as prompts need to know.
        url: where /completions and /models are below.
        model: its name on the server; None is the first that it lists.
        command: starts the server; None if it runs already.
        start_timeout_s: how long to wait for it.
        api_key_env: environment variable with the key; none is sent where it is not set.
        prompt: "ids", "text", or "auto" for text only where the server refuses ids.
        max_connections: most requests under way at once.
        extra: further fields of each request; None is TOKEN_IDS.
        cache_reset: path to POST to that empties the server's prefix cache.

    Raises:
        BadInput: a knob is set that is not honoured, the server cannot be reached, or it refuses such requests.
    """

    def __init__(
        self,
        config: dict[str, Any],
        url: str = "http://127.0.0.1:8000/v1",
        model: str | None = None,
        command: str | None = None,
        start_timeout_s: float = 600.0,
        api_key_env: str = "OPENAI_API_KEY",
        prompt: str = "auto",
        max_connections: int = 256,
        extra: Mapping[str, Any] | None = None,
        cache_reset: str | None = None,
    ) -> None:
        (OPENAI if command is None else OPENAI_WITH_COMMAND).check(config)
        try:
            import aiohttp
        except ImportError as error:
            raise BadInput(f"engine=openai needs aiohttp ({error}): {INSTALL}") from error
        source = resolve(config["model"], allow_random=False)[1]
        sizes = ModelConfig.from_dict(source.config)
        self.tokenizer = Tokenizer.load(source.folder)
        self._aiohttp, self._url = aiohttp, url.rstrip("/")
        self._extra = TOKEN_IDS if extra is None else dict(extra)
        self._reset_path = cache_reset
        self._tasks: dict[str, Future[None]] = {}  # of unfinished requests
        self._results: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._child: Child | None = None
        self._clear()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._session = self._await(self._open(os.environ.get(api_key_env), max_connections))
        try:
            begin, self._as_text = time.monotonic(), False
            served = self._reach(command, start_timeout_s)
            self._model = self._chosen(served, model)
            limit = config["model"].get("max_model_len") or sizes.max_position_embeddings
            self.info = EngineInfo(
                name="openai",
                weights=source.weights,
                fingerprint=source.fingerprint,
                vocab_size=sizes.vocab_size,
                max_model_len=min(limit, served[self._model].get("max_model_len") or limit),
                eos_token_ids=sizes.eos_token_ids,
                max_num_seqs=max_connections,
                load_s=time.monotonic() - begin,
                warnings=[*source.warnings, *NOTES, *([KEEPS] if cache_reset is None else [])],
            )
            self._as_text = self._probe(prompt)
            if cache_reset is not None:
                self._empty_cache()
        except BaseException:
            self.close()
            raise

    # ---- reaching the server

    async def _open(self, key: str | None, connections: int) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=ASK_S)
        connector = self._aiohttp.TCPConnector(limit=connections)
        return self._aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector, read_bufsize=LINE_BYTES
        )

    def _await(self, coroutine: Any) -> Any:
        """Run it in the loop's thread and wait for what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _reach(self, command: str | None, timeout_s: float) -> dict[str, dict[str, Any]]:
        """The models that the server lists, once it is started and answers."""
        if command is None:
            try:
                return self._await(self._models())
            except (OSError, TimeoutError, self._aiohttp.ClientError, ValueError) as error:
                raise BadInput(
                    f"engine.url={self._url}: no server answers there ({error or type(error).__name__}); start it, "
                    "or have it started with engine.command"
                ) from error
        words = shlex.split(command)
        if not words:
            raise BadInput("engine.command is empty: give the program that starts the server, or null")
        # PYTHONPATH leads to this project's packages, which the server's must not meet.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._child = Child(words, kept)
        deadline, last = time.monotonic() + timeout_s, "nothing"
        while time.monotonic() < deadline:
            if self._child.process.poll() is not None:
                raise BadInput(f"engine.command: the server {self._child.last_words()}")
            try:
                return self._await(self._models())
            except (OSError, TimeoutError, self._aiohttp.ClientError, ValueError) as error:
                last = str(error) or type(error).__name__
            time.sleep(LOOK_S)
        raise BadInput(
            f"engine.command: {self._url} did not answer within engine.start_timeout_s={timeout_s:g} ({last}); "
            f"the server {self._child.last_words()}"
        )

    async def _models(self) -> dict[str, dict[str, Any]]:
        timeout = self._aiohttp.ClientTimeout(total=ASK_S)
        async with self._session.get(f"{self._url}/models", timeout=timeout) as response:
            if response.status != 200:
                raise ValueError(f"GET /models: HTTP {response.status}: {_line(await response.text())}")
            entries = (await response.json(content_type=None)).get("data") or []
            return {str(entry["id"]): entry for entry in entries}

    def _chosen(self, served: dict[str, Any], model: str | None) -> str:
        if model is None and served:
            return next(iter(served))
        if model not in served:
            raise BadInput(
                f"engine.model={model}: {self._url} does not serve it; it serves {', '.join(served) or 'none'}"
            )
        return model

    def _probe(self, prompt: str) -> bool:
        """Whether prompts go as text: one short request shows whether the server takes such ones at all."""
        refusal = ""
        for as_text in {"auto": (False, True), "ids": (False,), "text": (True,)}[prompt]:
            if as_text and self.tokenizer is None:
                refusal = f"{refusal}; as text they need a tokenizer, which this model option has not".strip(
                    "; "
                )
                continue
            self._as_text = as_text
            body = self._body(list(PROBE), 1, SamplingParams(max_tokens=1, ignore_eos=True))
            try:
                self._await(self._ask(body))
            except (OSError, TimeoutError, self._aiohttp.ClientError, ValueError) as error:
                refusal = f"{refusal}; {error or type(error).__name__}".strip("; ")
                continue
            if as_text:
                self.info.warnings.append(
                    "prompts were sent as text: the server may cut them into other tokens"
                )
            return as_text
        raise BadInput(
            f"engine.url={self._url}: the server refuses requests as this engine sends them: {refusal}"
        )

    async def _ask(self, body: dict[str, Any]) -> None:
        """One request to its end, for nobody. Raises ValueError where it does not come to one."""
        outputs: list[EngineOutput] = []
        await asyncio.wait_for(self._stream(body, Tokens("probe", outputs.append)), PATIENCE_S)
        if outputs[-1].error is not None:
            raise ValueError(outputs[-1].error)

    def _empty_cache(self) -> None:
        root = self._url.removesuffix("/v1")
        path = f"{root}/{(self._reset_path or '').lstrip('/')}"
        status, text = self._await(self._post(path))
        if status >= 400:
            raise BadInput(
                f"engine.cache_reset={self._reset_path}: POST {path} gives HTTP {status}: {_line(text)}"
            )

    async def _post(self, path: str) -> tuple[int, str]:
        timeout = self._aiohttp.ClientTimeout(total=ASK_S)
        async with self._session.post(path, timeout=timeout) as response:
            return response.status, await response.text()

    # ---- requests

    def _body(self, prompt: list[int], wanted: int, params: SamplingParams) -> dict[str, Any]:
        optional = {
            "seed": None if params.greedy else params.seed,
            "presence_penalty": params.presence_penalty or None,
            "frequency_penalty": params.frequency_penalty or None,
            "ignore_eos": params.ignore_eos or None,
        }
        return {
            "model": self._model,
            "prompt": self.text(prompt) if self._as_text else prompt,
            "max_tokens": wanted,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value is not None},
            **self._extra,
        }

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """See BenchEngine."""
        wanted = self.tokens_wanted(request_id, prompt_token_ids, params, self._tasks)
        body = self._body(prompt_token_ids, wanted, params)
        tokens = Tokens(request_id, self._results.put)
        self._seen.append((len(prompt_token_ids), tokens))
        self._tasks[request_id] = asyncio.run_coroutine_threadsafe(self._serve(body, tokens), self._loop)

    async def _serve(self, body: dict[str, Any], tokens: Tokens) -> None:
        """One request; whatever happens, an output says that it has ended."""
        try:
            await self._stream(body, tokens)
        except Exception as error:
            tokens.fail(f"{type(error).__name__}: {_line(str(error))}")

    async def _stream(self, body: dict[str, Any], tokens: Tokens) -> None:
        async with self._session.post(f"{self._url}/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {_line(await response.text())}")
            await read_stream(response.content, tokens)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Wait for the next tokens; see BenchEngine."""
        outputs: list[EngineOutput] = []
        try:
            outputs.append(self._results.get(timeout=None if timeout_s is None else max(timeout_s, 0)))
            while not self._results.empty():
                outputs.append(self._results.get())
        except queue.Empty:
            if self._child is not None and self._child.process.poll() is not None:
                raise RuntimeError(f"engine.command: the server {self._child.last_words()}") from None
        for output in outputs:
            if output.finish_reason is not None:
                self._tasks.pop(output.request_id, None)
        return outputs

    def reset(self) -> None:
        """See BenchEngine. Requests are ended by closing their connections."""
        for task in self._tasks.values():
            task.cancel()
        self._await(asyncio.sleep(0))  # by now none of them says anything any more
        self._tasks.clear()
        while not self._results.empty():
            self._results.get()
        if self._reset_path is not None and hasattr(self, "info"):
            self._empty_cache()
        self._clear()

    def _clear(self) -> None:
        self._seen: list[tuple[int, Tokens]] = []

    def steps(self) -> list[dict[str, Any]]:
        """None: a server's steps cannot be seen."""
        return []

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """What the server said of the requests, and how well tokens could be told apart; see BenchEngine."""
        tokens = [tokens for _, tokens in self._seen]
        other = sum(t.prompt_tokens not in (None, length) for length, t in self._seen)
        return {
            "engine": {
                "requests": float(len(tokens)),
                "prompts": "text" if self._as_text else "ids",
                "chunks": float(sum(t.chunks for t in tokens)),
                "tokens_counted_late": float(sum(t.late for t in tokens)),
                "prompts_of_other_length": float(other),
            },
            "cache": {"cached_prompt_tokens": float(sum(t.cached_tokens for t in tokens))},
        }

    def close(self) -> None:
        """See BenchEngine."""
        for task in self._tasks.values():
            task.cancel()
        self._await(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._child is not None:
            self._child.stop(GRACE_S)


def _line(text: str) -> str:
    """An error's text, which servers like to wrap in JSON, as one line."""
    try:
        parsed = json.loads(text)
        error = parsed.get("error", parsed)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300] or "no text"
