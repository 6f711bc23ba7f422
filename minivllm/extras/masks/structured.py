"""Structured outputs: text that follows a grammar, by llguidance.

A grammar is compiled once. Each request has a matcher of its own, which takes the tokens of its
output, drafts among them, and is rolled back to those that were accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from minivllm.engine.options import StructuredOutputs
from minivllm.engine.request import Request
from minivllm.errors import BadInput
from minivllm.extras.masks.bitmask import allow, forbid, num_bytes, row_from
from minivllm.extras.masks.compiling import WHAT, compiled, guided_tokenizer, reason_of
from minivllm.extras.speculative.verification import common_prefix
from minivllm.extras.stop_strings import StopStrings
from minivllm.models.load.tokenizer import Tokenizer

MOST_GRAMMARS = 32  # that are kept


class Grammars:
    """The grammars of an engine's requests.

    Args:
        tokenizer: of the model; None: no request has a grammar.
        vocab_size: of the model.
        eos_token_ids: of the model.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        # Those that are ordinary text to llguidance; a grammar names a special one by its id.
        self._eos = [token for token in eos_token_ids if token < vocab_size]
        self._lock, self._building = Lock(), Lock()  # a server compiles in a thread
        self._guided: Any = None  # llguidance's tokenizer, once it is needed
        self._compiled: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        # Of requests whose text is being made: StructuredText holds them.
        self._states: WeakValueDictionary[Request, GrammarState] = WeakValueDictionary()
        self.num_compiled = 0
        self.num_masks = 0

    def compile(self, outputs: StructuredOutputs) -> Any:
        """The matcher of a grammar, at its beginning: copies of it share what masks have cost.

        Raises:
            BadInput: the grammar is wrong, too large, or allows nothing; or the tokenizer cannot be
                used.
            NotInstalled: llguidance is missing.
        """
        with self._lock:
            if (found := self._compiled.get(outputs)) is not None:
                self._compiled.move_to_end(outputs)
                return found
        tokenizer = self.tokenizer()
        matcher = compiled(tokenizer, outputs)
        with self._lock:
            self.num_compiled += 1
            self._compiled[outputs] = matcher
            while len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def compiled(self, outputs: StructuredOutputs) -> bool:
        """Whether `compile` takes no time."""
        return outputs in self._compiled

    def tokenizer(self) -> Any:
        """llguidance's tokenizer, made with the first grammar, which takes a second with 150,000
        tokens. Raises BadInput and NotInstalled, see `compile`."""
        if self._tokenizer is None:
            raise BadInput(
                f"{WHAT} needs a tokenizer, and this checkpoint has none; use allowed_token_ids or "
                "token_mask"
            )
        with self._building:
            if self._guided is None:
                self._guided = guided_tokenizer(self._tokenizer)
                self._eos = [
                    token
                    for token in self._eos
                    if token >= self._guided.eos_token or not self._guided.is_special_token(token)
                ]
            return self._guided

    def forget(self, outputs: StructuredOutputs) -> None:
        """Compile a grammar again when it is next needed."""
        with self._lock:
            self._compiled.pop(outputs, None)

    def state(self, request: Request) -> GrammarState:
        """How far a request has come in its grammar."""
        state = self._states.get(request)
        if state is None:
            assert request.params.structured_outputs is not None
            state = self._states[request] = GrammarState(self, request.params.structured_outputs)
        return state

    def mask(self, request: Request, output: Sequence[int]) -> bytearray | None:
        """The tokens that may follow an output, see bitmask.py; None where nothing can follow it,
        and the request ends.

        The tokens that end an output are allowed where the grammar is complete.

        Raises:
            BadInput: the grammar does not allow this output, or has come to a limit.
        """
        self.num_masks += 1
        bits = self.state(request).bits(output)
        if bits is None:
            may_stop = request.may_stop(request.num_prompt_tokens + len(output))
            return None if may_stop else bytearray(num_bytes(self._vocab_size))
        end = self._guided.eos_token
        may_end = bits[end >> 3] >> (end & 7) & 1
        row = row_from(bits, self._vocab_size)
        forbid(row, (token for token in (*self._eos, end) if token < self._vocab_size))
        if may_end:
            allow(row, request.stop_ids)
        return row


class GrammarState:
    """How far one output has come in its grammar.

    Args:
        grammars: compile it.
        outputs: the grammar.
    """

    def __init__(self, grammars: Grammars, outputs: StructuredOutputs) -> None:
        self._grammars, self._outputs = grammars, outputs
        self._matcher = grammars.compile(outputs).deep_copy()
        self._taken: list[int] = []  # tokens that the matcher is behind

    def bits(self, output: Sequence[int]) -> bytes | None:
        """A bit for each token of llguidance's vocabulary; None where nothing can follow.

        Raises:
            BadInput: the grammar does not allow this output, or has come to a limit.
        """
        self._move(output)
        if self._matcher.is_stopped():
            return None
        bits: bytes = self._matcher.compute_bitmask()
        self._require_no_error()
        return bits

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether an output is a whole text of the grammar and nothing can follow it. Where the
        grammar has come to a limit, the next mask says so."""
        try:
            self._move(output)
        except BadInput:
            return False
        return bool(self._matcher.is_stopped())

    def _move(self, output: Sequence[int]) -> None:
        """Be behind the last token of an output."""
        if self._taken != output[: len(self._taken)]:
            same = common_prefix(self._taken, output)
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        further = list(output[len(self._taken) :])
        if further:
            count = self._matcher.try_consume_tokens(further)
            self._require_no_error()
            self._taken += further[:count]
            if count < len(further):
                raise BadInput(f"{WHAT}: the grammar does not allow this output")

    def _require_no_error(self) -> None:
        """Raise BadInput where the grammar has come to a limit, or to an end that is none; the next
        call starts from the beginning."""
        if not self._matcher.is_error():
            return
        reason = reason_of(self._matcher)
        self._grammars.forget(self._outputs)
        self._matcher, self._taken = self._grammars.compile(self._outputs).deep_copy(), []
        raise BadInput(f"{WHAT}: the grammar cannot go on ({reason})")


class StructuredText(StopStrings):
    """The text of an output that ends with its grammar, or at a stop string.

    Args:
        tokenizer: decodes.
        request: has structured outputs.
        grammars: of the engine.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, grammars: Grammars) -> None:
        super().__init__(tokenizer, request.token_ids, request.params)
        self._request, self._state = request, grammars.state(request)

    def push(self, token_id: int, may_stop: bool = True) -> str:
        text = super().push(token_id, may_stop)
        goes_on = self.stop_reason is None and may_stop
        if goes_on and self._state.is_complete(self._request.output_token_ids):
            text += self.finish()
            self.stop_reason = self.stop_reason or ""
        return text
