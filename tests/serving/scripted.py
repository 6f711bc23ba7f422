"""A server with a scripted engine: its HTTP process is the real one, and the answers are set.

The model reads a context of 200,000 tokens with the embedded tokenizer, and calls tools in the form
of Hermes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.engine.options import SamplingParams
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.parallel.options import ParallelOptions
from minivllm.processes.link import EngineLink
from minivllm.processes.messages import EngineState, Piece, Ready
from minivllm.serving.app import build_app
from minivllm.serving.http.http_server import HttpServer
from minivllm.serving.options import ServeOptions
from minivllm.serving.processes.engine_client import EngineClient
from minivllm.serving.processes.replicas import Replicas
from minivllm.serving.processes.token_stream import Streams, Submission, TokenStream
from minivllm.serving.server import listen
from minivllm.serving.service import EngineService

CONTEXT = 200_000
TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
PIECE = 7  # characters of a token: words, tags and arguments are cut anywhere
Script = Callable[[str], str]  # from the whole prompt to the answer


class Alive:
    """Stands in for the EngineLink of the one engine."""

    number, is_alive, is_wanted = 0, True, True
    state = EngineState(0, 0, 0, None)
    counters: dict[str, float] = {}
    ready = Ready(CONTEXT, 0, (0,), 8, 0, 16, SamplingParams(), [])


class ScriptedClient(Streams):
    """Stands in for an EngineClient: answers each request as a script says, a piece a turn of the
    event loop.

    Args:
        tokenizer: reads the prompts.
        script: makes the answers.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        super().__init__()
        self.replicas = Replicas(ParallelOptions(), lambda _: cast(EngineLink, Alive()))
        self.submitted: list[Callable[[TokenStream], None]] = []
        self._tokenizer, self._script = tokenizer, script
        self._tasks: set[asyncio.Task[None]] = set()
        self.prompts: list[str] = []  # so far

    is_alive = True
    replica_events: dict[str, int] = {}

    def submit_all(self, requests: Submission) -> list[TokenStream]:
        """Begin answers."""
        return [self._submit(ids, requests.params) for ids in requests.prompts]

    def _submit(self, prompt_token_ids: list[int], params: SamplingParams) -> TokenStream:
        name = f"r{len(self.prompts)}"
        self.prompts.append(self._tokenizer.decode(prompt_token_ids, skip_special_tokens=False))
        stream = TokenStream(name, 1, len(prompt_token_ids), 1 << 30, self._end)
        self.streams[name] = stream
        for listener in self.submitted:
            listener(stream)
        task = asyncio.ensure_future(self._answer(stream, self._script(self.prompts[-1]), params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def _end(self, stream: TokenStream) -> None:
        self._forget(stream.request_id)

    async def _answer(self, stream: TokenStream, text: str, params: SamplingParams) -> None:
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        most = params.max_tokens or CONTEXT
        for number, piece in enumerate(pieces[:most], 1):
            reason = "length" if number == most else "stop" if number == len(pieces) else None
            token = (stream.request_id, 0, 5, number, piece, reason)
            stream.push(Piece(*token, None, None, 0, None, None), asyncio.get_running_loop().time())
            await asyncio.sleep(0)
        self._end(stream)


@contextlib.contextmanager
def scripted(folder: Path, script: Script) -> Iterator[tuple[str, ScriptedClient]]:
    """Serve the answers of a script as the model "scripted"; the server's URL, and its engine.

    Args:
        folder: gets the tokenizer and the chat template.
    """
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer(folder)
    size = tokenizer.fast.get_vocab_size()
    info = Ready(CONTEXT, size, (0,), 8, 0, 16, SamplingParams(max_tokens=None), [])
    options = ServeOptions(port=0, view=False)
    listener = listen(options)
    listener.listen()
    client = ScriptedClient(tokenizer, script)
    service = EngineService(options, cast(EngineClient, client), info, tokenizer, "scripted")
    app = build_app(service, NullGpu())
    server = HttpServer(app, service, listener)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", client
    finally:
        server.end()
        thread.join(30)
        listener.close()
