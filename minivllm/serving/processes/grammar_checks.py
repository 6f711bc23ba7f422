"""Grammars of clients, composed and compiled for trial in child processes: what ends a child, or
takes it too long, is an error of the client that asked for it, and does not reach the engine."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import pickle
from collections import OrderedDict
from heapq import heappop, heappush
from typing import Any, NamedTuple

from minivllm.engine.options import StructuredOutputs
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.processes.mortal import Died, MortalProcess, TookTooLong
from minivllm.serving.errors import ApiError, overloaded
from minivllm.serving.openai.tools import Tools
from minivllm.serving.parsing.tool_forms import ToolForm

PROCESSES = 2
CHILD = "minivllm.serving.processes.grammar_child"
CPU_SECONDS = 5.0  # of a processor, for one grammar
SECONDS = 60.0  # for an answer of a child that other processes leave no time
LARGE = 1 << 15  # bytes of a grammar, for which one process is kept free
MOST_WAITING = 256
MOST_KEPT, LARGEST_KEPT = 64, 1 << 20  # grammars that were right, and bytes of one


class Asked(NamedTuple):
    """What a client asks of the text of an answer.

    Args:
        form: see `answer_grammar`; without `is_chat` the text itself.
        is_chat: the answer may have thoughts and calls around the form.
    """

    form: StructuredOutputs | None
    is_chat: bool = False
    tools: Tools | None = None
    calls: ToolForm | None = None
    begins_thinking: bool = False
    field: str = ""


class GrammarChecks:
    """Child processes that take grammars in turns: of the client that had the least of them done,
    its smallest first. A large one never takes the last free process.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._free = [MortalProcess(CHILD, lambda: _packed(tokenizer)) for _ in range(PROCESSES)]
        self._processes = [*self._free]
        self._waiting: dict[str, list[tuple[int, int, _Waiting]]] = {}  # heaps, by client
        self._done: dict[str, int] = {}  # bytes of each client that waits
        self._running: set[asyncio.Task[None]] = set()
        self._right: OrderedDict[bytes, StructuredOutputs | None] = OrderedDict()
        self._count = 0

    def stop(self) -> None:
        """End the child processes."""
        for process in self._processes:
            process.stop()

    async def outputs(self, asked: Asked, client: str) -> StructuredOutputs | None:
        """What the engine is to follow, which a child has compiled; None: any text.

        Args:
            asked: by the client.
            client: whose turn it is.

        Raises:
            ApiError: it is wrong, or ended the child; or too many wait.
        """
        if self._tokenizer is None:
            raise ApiError(
                400,
                "structured_outputs needs a tokenizer, and this checkpoint has none; use "
                "allowed_token_ids",
                param="structured_outputs",
            )
        question = _packed(asked)
        key = hashlib.sha256(question).digest()
        if key in self._right:
            self._right.move_to_end(key)
            return self._right[key]
        if sum(map(len, self._waiting.values())) >= MOST_WAITING:
            raise overloaded("too many grammars wait to be compiled: try again later", 1)
        outputs = _outputs(await self._turn(question, client))
        if len(question) <= LARGEST_KEPT:
            self._right[key] = outputs
            while len(self._right) > MOST_KEPT:
                self._right.popitem(last=False)
        return outputs

    async def _turn(self, question: bytes, client: str) -> dict[str, Any]:
        """The answer of a child, once it is this client's turn."""
        waiting = _Waiting(question, asyncio.get_running_loop().create_future())
        if client not in self._waiting:
            self._waiting[client] = []
            self._done[client] = min(self._done.values(), default=0)
        self._count += 1
        heappush(self._waiting[client], (len(question), self._count, waiting))
        self._go_on()
        return await waiting.answer

    def _go_on(self) -> None:
        """Give free processes what waits."""
        while self._free and (next_one := self._next()) is not None:
            task = asyncio.ensure_future(self._run(self._free.pop(), next_one))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _next(self) -> _Waiting | None:
        for client in sorted(self._waiting, key=self._done.__getitem__):
            heap = self._waiting[client]
            while heap and heap[0][2].answer.done():  # its client has left
                heappop(heap)
            if heap and (heap[0][0] < LARGE or len(self._free) > 1):
                size, _, found = heappop(heap)
                self._done[client] += size
            else:
                found = None
            if not heap:
                del self._waiting[client], self._done[client]
            if found is not None:
                return found
        return None

    async def _run(self, process: MortalProcess, waiting: _Waiting) -> None:
        try:
            answer = await asyncio.to_thread(_answer, process, waiting.question)
            if not waiting.answer.done():
                waiting.answer.set_result(answer)
        except Exception as error:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        finally:
            self._free.append(process)
            self._go_on()


class _Waiting(NamedTuple):
    question: bytes
    answer: asyncio.Future[dict[str, Any]]


def _packed(value: Any) -> bytes:
    return base64.b64encode(pickle.dumps(value))


def _answer(process: MortalProcess, question: bytes) -> dict[str, Any]:
    """What a child says to a question, or its end."""
    try:
        answer: dict[str, Any] = json.loads(process.ask(question, SECONDS))
        return answer
    except Died:
        words = f"the grammar takes more than {CPU_SECONDS:g} s, or more memory than it may"
    except TookTooLong:
        words = f"the grammar was not compiled within {SECONDS:g} s"
    return {"error": [400, f"{words}: make it smaller", "invalid_request_error", None]}


def _outputs(answer: dict[str, Any]) -> StructuredOutputs | None:
    """What is in an answer. Raises ApiError."""
    if (error := answer.get("error")) is not None:
        status, message, kind, param = error
        raise ApiError(status, message, kind=kind, param=param)
    given = answer["outputs"]
    return None if given is None else StructuredOutputs.of(given)
