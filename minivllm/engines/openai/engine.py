"""engine=openai: any server that speaks OpenAI's completions, chat or responses API, behind the
interface of every engine."""

from __future__ import annotations

import asyncio
import os
import queue
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from minivllm.bench.hardware.gpu import visible_devices
from minivllm.config.groups import Config
from minivllm.config.support import is_remote
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import Adapter, EngineInfo, EngineOutput
from minivllm.engines.engine_pictures import SentPictures, TakesImages
from minivllm.engines.openai.bodies import COUNTING, PATHS, SENT, Bodies
from minivllm.engines.openai.counters import stream_counters
from minivllm.engines.openai.options import OpenAIOptions
from minivllm.engines.openai.stream import Tokens, read_stream
from minivllm.engines.openai.stream_event import (
    ServerError,
    read_event,
    read_response_event,
    server_words,
)
from minivllm.engines.peer_process import Child, StartedProcess, peer_environment
from minivllm.engines.supported_knobs import require_supported
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.source import resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.support import INSTALL

if TYPE_CHECKING:
    from minivllm.engines.openai.client import Client

PATIENCE_S = 120.0  # for the answer to a probe: a server may compile at its first request
LOOK_S = 0.5  # between two looks at whether a server has started
GRACE_S = 15.0
TOKEN_IDS = {"return_token_ids": True}  # a server that knows it tells the ids of each chunk
PROBE = (1, 2, 3, 4)
STRICT = (400, 422)  # statuses by which a server rejects a field
NOTES = (
    "the server's batching, cache and precision are its own; no memory, breakdown or use of "
    "bandwidth is known",
    "first tokens include the way over HTTP",
)
KEEPS = (
    "the server's prefix cache was not emptied, and has what earlier measurements have shown it "
    "of these prompts (the warm-up shows it others): start it without one, or set "
    "engine.cache_reset"
)


class OpenAIEngine(TakesImages, Adapter):
    """Sends every request as a stream of its own, from an event loop in a thread.

    Attributes:
        name: of the engine, in records.
        starter: what starts the server, for messages.
        notes: what every record says of it.

    Args:
        config: the resolved configuration; `model` is what the server serves, as far as prompts
            need to know.
        options: the knobs of `engine`.

    Raises:
        BadInput: a knob is set that is not supported, the server cannot be reached, or it rejects
            such requests.
    """

    name = "openai"
    starter = "engine.command"
    notes: tuple[str, ...] = NOTES
    pictures: SentPictures | None

    def __init__(self, config: Mapping[str, Any], options: OpenAIOptions) -> None:
        require_supported(config)
        view = Config.of(config)
        try:
            from minivllm.engines.openai.workers import Workers, chosen
        except ImportError as error:
            raise BadInput(f"engine={self.name} needs aiohttp ({error}): {INSTALL}") from error
        source, remote = resolve(config["model"], allow_random=False)[1], is_remote(config)
        sizes = ModelConfig.from_dict(source.config)
        self.tokenizer = Tokenizer.load(source.folder)
        pictures = SentPictures.of_source(source, self.tokenizer, view.vision)
        self.pictures = None if options.api == "completions" else pictures  # messages may have some
        self._gpus = visible_devices(view.runtime.device)
        self._api, self._bodies = options.api, Bodies(options.api, self.tokenizer)
        ids = {} if options.api == "responses" else TOKEN_IDS
        self._extra = ids if options.extra is None else options.extra
        self._counting: dict[str, Any] = {}  # the one of COUNTING that the server takes
        self._reset_path, self._idle_s = options.cache_reset, options.idle_timeout_s
        self._keep_prefixes = view.measure.prefix_cache == "warm"
        self._tasks: dict[str, tuple[Future[None], Tokens]] = {}  # of unfinished requests
        self._heard_s = 0.0  # when a token or an end last came, or the first request was sent
        self._results: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._child: StartedProcess | None = None
        key = os.environ.get(options.api_key_env)
        self._workers = Workers(options.urls, key, options.max_connections, options.router)
        self._client = self._workers.clients[0]
        self._clear()
        try:
            begin = time.monotonic()
            served = self._reach(options.command, options.start_timeout_s)
            self._model = chosen(self._client, served, options.model)
            limit = view.model.max_model_len or sizes.max_position_embeddings
            self.info = EngineInfo(
                name=self.name,
                weights=None if remote else source.weights,
                fingerprint=source.fingerprint,
                vocab_size=sizes.vocab_size,
                max_model_len=min(limit, self._workers.context(self._model, served) or limit),
                eos_token_ids=sizes.eos_token_ids,
                max_num_seqs=self._workers.connections,
                load_s=time.monotonic() - begin,
                served_model=self._model if remote else None,
                warnings=[*source.warnings, *self.notes],
                computes_here=False,
                keeps_prefixes=self._reset_path is None,
                takes_chat=self._api != "completions",
                servers=self._workers.processes() if options.command is None else None,
            )
            self.info.warnings += [KEEPS] * (self.info.keeps_prefixes > self._keep_prefixes)
            self._probe(options.prompt)
            if self._reset_path is not None:
                self._empty_cache()
        except BaseException:
            self.close()
            raise

    # ---- reaching the server

    def _reach(self, command: str | None, timeout_s: float) -> dict[str, int | None]:
        """The models that the server lists with their contexts, once it is started and answers."""
        where = self._client.address("")
        if command is None:
            try:
                return self._models()
            except (OSError, ServerError) as error:
                raise BadInput(
                    f"engine.url={where}: no server answers there as it should ({error}); start "
                    "it, or have it started with engine.command"
                ) from error
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise BadInput(f"engine.command cannot be read as a command line ({error})") from None
        if not words:
            raise BadInput(
                "engine.command is empty: give the program that starts the server, or null"
            )
        self._child = self._start(words)
        deadline, last = time.monotonic() + timeout_s, "nothing"
        while time.monotonic() < deadline:
            if self._child.process.poll() is not None:
                raise BadInput(f"{self.starter}: the server {self._child.exit_reason()}")
            try:
                return self._models()
            except (OSError, ServerError) as error:
                last = str(error)
            time.sleep(LOOK_S)
        raise BadInput(
            f"{self.starter}: {where} did not answer within engine.start_timeout_s={timeout_s:g} "
            f"({last}); the server {self._child.exit_reason()}"
        )

    def _start(self, words: list[str]) -> StartedProcess:
        """Run the command that starts the server."""
        return Child(words, self._environment(), knob=self.starter, listen=self._listen)

    def _environment(self) -> dict[str, str]:
        """Of a server that is started."""
        return peer_environment(self._gpus)

    def _listen(self, line: str) -> None:
        """A line that a started server has printed."""

    def _models(self) -> dict[str, int | None]:
        return self._client.served()

    def _probe(self, prompt: str) -> None:
        """Find out with short requests whether prompts go as ids or text, and how tokens can be
        counted."""
        rejections: list[str] = []
        ways = {"auto": (False, True), "ids": (False,), "text": (True,)}[prompt]
        bodies = self._bodies
        for bodies.as_text in (True,) if self.info.takes_chat else ways:
            if bodies.as_text and self.tokenizer is None:
                rejections.append("as text they need a tokenizer, which this model option has not")
            elif (tokens := self._first_answer(rejections)) is not None:
                break
        else:
            raise BadInput(
                f"engine.url={self._client.address('')}: the server rejects requests as this "
                f"engine sends them: {'; '.join(dict.fromkeys(rejections))}"
            )
        self.info.warnings += [SENT[self._api]] * self._bodies.as_text
        self.info.tells_ids = tokens.by_ids
        countings = () if tokens.by_ids or self._api == "responses" else (*COUNTING, {})
        for self._counting in countings:
            try:
                if not self._counting or self._ask(2).sizes_known:
                    break
            except (OSError, ServerError):
                continue  # it does not take that
        self._workers.each_other(lambda client: self._ask(1, client))

    def _first_answer(self, rejections: list[str]) -> Tokens | None:
        """The answer to a short request; where a strict server rejects it, to one with fewer of the
        fields that are none of OpenAI's. None where it rejects all, with what it says of each."""
        wanted = self._extra
        fewer = {} if wanted is TOKEN_IDS else wanted
        for self._extra, past_end in ((wanted, True), (fewer, True), (fewer, False)):
            self._bodies.past_end = past_end
            try:
                return self._ask(1)
            except (OSError, ServerError) as error:
                rejections.append(str(error))
                if getattr(error, "status", None) not in STRICT:
                    break
        self._extra = wanted
        return None

    def _ask(self, max_tokens: int, client: Client | None = None) -> Tokens:
        """One short request to its end. Raises ServerError where that is none, BadInput where it
        does not come."""
        outputs: list[EngineOutput] = []
        tokens = self._tokens("probe", outputs.append, max_tokens)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        body = self._with_own_fields(self._bodies.body(list(PROBE), max_tokens, params))
        patience, client = min(PATIENCE_S, self._idle_s), client or self._client
        try:
            client.wait(asyncio.wait_for(self._stream(client, body, tokens), patience))
        except TimeoutError:
            raise BadInput(
                f"engine.url={client.address('')}: no whole answer to a request for "
                f"{max_tokens} token{'s' * (max_tokens > 1)} within {patience:g} s"
            ) from None
        if outputs[-1].error is not None:
            raise ServerError(outputs[-1].error)
        return tokens

    def _empty_cache(self) -> None:
        self._workers.empty_caches(self._reset_path or "")

    # ---- requests

    def require_servable(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> int:
        """See CheckingEngine. Returns how many tokens it may have."""
        max_tokens = self.tokens_wanted(request_id, prompt_token_ids, params, self._tasks)
        self._bodies.require_sendable(request_id, params)
        if params.ignore_eos and not self._bodies.past_end:
            raise BadInput(
                f"request {request_id}: workload.ignore_eos=true, and the server rejects "
                "ignore_eos: set workload.ignore_eos=false"
            )
        return max_tokens

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.submit_chat(request_id, None, prompt_token_ids, params)

    def submit_chat(
        self,
        request_id: str,
        chat: Mapping[str, Any] | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        max_tokens = self.require_servable(request_id, prompt_token_ids, params)
        pictures = self.pictures
        content = None if pictures is None else pictures.content(request_id, prompt_token_ids)
        body = self._with_own_fields(
            self._bodies.body(prompt_token_ids, max_tokens, params, chat, content)
        )
        tokens = self._tokens(request_id, self._results.put, max_tokens)
        session = self._sessions.pop(request_id, None)
        client = self._workers.route(request_id, prompt_token_ids, tokens, max_tokens, session)
        if not self._tasks:
            self._heard_s = time.monotonic()
        self._tasks[request_id] = client.start(self._serve(client, body, tokens)), tokens

    def note_session(self, request_id: str, session: str) -> None:
        self._sessions[request_id] = session

    def _with_own_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """A body with what every request has."""
        return {"model": self._model, **body, **self._counting, **self._extra}

    def _tokens(
        self, request_id: str, deliver: Callable[[EngineOutput], None], max_tokens: int
    ) -> Tokens:
        tokenizer = self.tokenizer
        count = None if tokenizer is None else lambda text: len(tokenizer.encode(text, False))
        read = read_response_event if self._api == "responses" else read_event
        return Tokens(request_id, deliver, max_tokens, count, self.info.vocab_size, read)

    async def _serve(self, client: Client, body: dict[str, Any], tokens: Tokens) -> None:
        """One request; whatever happens, an output says that it has ended."""
        try:
            await self._stream(client, body, tokens)
        except ServerError as error:
            tokens.fail(str(error))
        except Exception as error:
            tokens.fail(f"{type(error).__name__}: {server_words(str(error))}")

    async def _stream(self, client: Client, body: dict[str, Any], tokens: Tokens) -> None:
        async with aclosing(client.lines(PATHS[self._api], body)) as lines:
            await read_stream(lines, tokens)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Wait for the next tokens; see BenchEngine."""
        outputs: list[EngineOutput] = []
        patience = None if timeout_s is None else max(timeout_s, 0)
        try:
            outputs.append(self._results.get(timeout=patience))
            while not self._results.empty():
                outputs.append(self._results.get())
        except queue.Empty:
            if self._child is not None and self._child.process.poll() is not None:
                raise RuntimeError(
                    f"{self.starter}: the server {self._child.exit_reason()}"
                ) from None
        if outputs:
            self._heard_s = time.monotonic()
        elif self._tasks and time.monotonic() - self._heard_s > self._idle_s:
            for request_id, (task, tokens) in self._tasks.items():
                self._workers.client_of(request_id).wait(self._give_up(task, tokens))
        for output in outputs:
            self._workers.note(output)
            if output.finish_reason is not None:
                self._tasks.pop(output.request_id, None)
        return outputs

    async def _give_up(self, task: Future[None], tokens: Tokens) -> None:
        """End a request under way, in the thread of its client: the server has gone silent."""
        task.cancel()
        tokens.fail(
            "the server has sent no token of any request for "
            f"engine.idle_timeout_s={self._idle_s:g} s"
        )

    def reset(self) -> None:
        """See BenchEngine. Requests are ended by closing their connections."""
        for task, _ in self._tasks.values():
            task.cancel()
        self._workers.forget()
        self._tasks.clear()
        if self.pictures is not None:
            self.pictures.reset()
        while not self._results.empty():
            self._results.get()
        if self._reset_path is not None and hasattr(self, "info") and not self._keep_prefixes:
            self._empty_cache()
        self._clear()

    def recount(self) -> None:
        """See PrimedEngine; no request is under way."""
        self._clear()

    def _clear(self) -> None:
        self._sessions: dict[str, str] = {}  # of requests that are to come
        self._workers.clear()

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """What the server reported of the requests, and how well tokens could be counted; see
        BenchEngine."""
        workers, as_text = self._workers, self._bodies.as_text
        sent_as = "messages" if self.info.takes_chat else "text" if as_text else "ids"
        own = workers.queued_s, workers.connections, self.tokenizer
        seen = [one for each in workers.seen for one in each]
        return stream_counters(seen, sent_as, *own) | workers.counters()

    def close(self) -> None:
        for task, _ in self._tasks.values():
            task.cancel()
        self._workers.close()
        if self._child is not None:
            self._child.stop(GRACE_S)
