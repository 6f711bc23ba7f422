"""Structured outputs: text that follows a grammar, by llguidance.

A grammar is compiled once. Each request has a matcher of its own, which takes the tokens of its
output, drafts among them, and is rolled back to those that were accepted.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from minivllm.engine.options import StructuredOutputs
from minivllm.engine.request import Request
from minivllm.engine.scheduler import SchedulingRule
from minivllm.errors import BadInput
from minivllm.extras.masks.bitmask import allow, forbid, num_bytes, row_from
from minivllm.extras.masks.json_schema import guidance, guided_schema
from minivllm.extras.speculative.verification import common_prefix
from minivllm.extras.stop_strings import StopStrings
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.tokenizer_files import as_bad_input

MOST_GRAMMARS = 32  # that are kept
# States of a grammar's lexer, of 1 to 2 kB each. llguidance's other limits bound the time of a
# compilation (1,000,000 units, some 20 ms a lexeme) and of a mask (200,000 units, some 15 ms).
MOST_LEXER_STATES = 50_000
WHAT = "decoding.structured_outputs"


class Grammars(SchedulingRule):
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
        self._states: dict[Request, GrammarState] = {}
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
        tokenizer, package = self.tokenizer(), guidance()
        limits = package.LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
        matcher = package.LLMatcher(tokenizer, _grammar(outputs), log_level=0, limits=limits)
        _require_no_error(matcher, outputs)
        first = matcher.deep_copy()
        first.compute_bitmask()
        _require_no_error(first, outputs)
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
                tokens = GuidedTokens(self._tokenizer)
                self._guided = guidance().LLTokenizer(tokens)
                tokens.tokens.clear()
                self._eos = [
                    token
                    for token in self._eos
                    if token >= self._guided.eos_token or not self._guided.is_special_token(token)
                ]
            return self._guided

    def forget(self, outputs: StructuredOutputs) -> None:
        """Compile a grammar anew when it is next asked for."""
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

    def ended(self, request: Request) -> None:
        self._states.pop(request, None)


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
        call begins anew."""
        if not self._matcher.is_error():
            return
        reason = _reason(self._matcher)
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


class GuidedTokens:
    """A tokenizer for llguidance, by its own. It has one token more, whose bit says that a text may
    end.

    Its own may cut a text such as "<tool_call>" into the special token that reads so, and then
    allow no token where the text has to come: such a text is cut into other tokens.

    Args:
        tokenizer: of the model.

    Raises:
        BadInput: llguidance does not know this kind.
        NotInstalled: llguidance is missing.
    """

    is_tokenizer_wrapper = True
    eos_token_id = bos_token_id = None  # llguidance adds the token of the end

    def __init__(self, tokenizer: Tokenizer) -> None:
        package = guidance()
        fast = type(tokenizer.fast).from_str(tokenizer.fast.to_str())
        fast.no_padding()
        fast.no_truncation()
        try:
            self._own = package.LLTokenizer(fast.to_str())
        except BaseException as error:
            raise as_bad_input(
                f"{WHAT}: llguidance cannot use this checkpoint's tokenizer", error
            ) from None
        every = range(self._own.vocab_size)
        self.tokens = [self._own.decode_bytes([token]) for token in every]
        self.special_token_ids = [token for token in every if self._own.is_special_token(token)]
        self._special = set(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text, none of them special."""
        ids: list[int] = self._own.tokenize_str(text)
        return ids if self._special.isdisjoint(ids) else list(self._own.greedy_tokenize(text))


def _grammar(outputs: StructuredOutputs) -> str:
    """llguidance's form of a grammar."""
    matcher = guidance().LLMatcher
    if outputs.json is not None:
        return _of_schema(str(outputs.json))
    if outputs.json_object:
        return _of_schema('{"type": "object"}')
    if outputs.regex is not None:
        return str(matcher.grammar_from_regex(outputs.regex))
    if outputs.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in outputs.choice)
        return str(matcher.grammar_from_lark(f"start: {texts}"))
    return str(matcher.grammar_from_lark(outputs.grammar))


def _of_schema(text: str) -> str:
    try:
        return str(guidance().LLMatcher.grammar_from_json_schema(guided_schema(text)))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{WHAT}.json: {error}") from None


def _require_no_error(matcher: Any, outputs: StructuredOutputs) -> None:
    if matcher.is_error():
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        kind = next(kind for kind in kinds if getattr(outputs, kind) not in (None, False))
        raise BadInput(f"{WHAT}.{kind}: {_reason(matcher)}")


def _reason(matcher: Any) -> str:
    """Why a matcher has failed, in one line."""
    text = re.split("<(?:state|grammar|backtrace)>", str(matcher.get_error()))[0]
    line = " ".join(text.split())[:500]
    return "it allows no output" if line.startswith("NoExtension") else line
