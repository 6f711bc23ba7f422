"""Grammars of structured outputs, compiled by llguidance. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from minivllm.engine.options import StructuredOutputs
from minivllm.errors import BadInput
from minivllm.extras.masks.chains import STACK, require_short_grammar
from minivllm.extras.masks.json_schema import guidance, guided_schema
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.tokenizer_files import as_bad_input
from minivllm.platform.threads import with_stack

# States of a grammar's lexer, of 1 to 2 kB each. llguidance's other limits bound the time of a
# compilation (1,000,000 units, some 20 ms a lexeme) and of a mask (200,000 units, some 15 ms).
MOST_LEXER_STATES = 50_000
WHAT = "decoding.structured_outputs"


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


def guided_tokenizer(tokenizer: Tokenizer) -> Any:
    """llguidance's tokenizer, which takes a second with 150,000 tokens. Raises BadInput and
    NotInstalled, see `GuidedTokens`."""
    tokens = GuidedTokens(tokenizer)
    guided = guidance().LLTokenizer(tokens)
    tokens.tokens.clear()
    return guided


def compiled(tokenizer: Any, outputs: StructuredOutputs, stack: int = STACK) -> Any:
    """The matcher of a grammar, at its beginning.

    Args:
        tokenizer: llguidance's.
        outputs: the grammar.
        stack: bytes of it that the compilation has.

    Raises:
        BadInput: the grammar is wrong, too large, or allows nothing.
        NotInstalled: llguidance is missing.
    """
    return with_stack(stack, lambda: _compiled(tokenizer, outputs))


def _compiled(tokenizer: Any, outputs: StructuredOutputs) -> Any:
    package = guidance()
    limits = package.LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
    matcher = package.LLMatcher(tokenizer, _grammar(outputs), log_level=0, limits=limits)
    _require_no_error(matcher, outputs)
    first = matcher.deep_copy()
    first.compute_bitmask()
    _require_no_error(first, outputs)
    return matcher


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
        return str(matcher.grammar_from_lark("\n".join(choice_rules("start", outputs.choice))))
    try:
        require_short_grammar(str(outputs.grammar))
    except BadInput as error:
        raise BadInput(f"{WHAT}.grammar: {error}") from None
    return str(matcher.grammar_from_lark(outputs.grammar))


def choice_rules(name: str, texts: Sequence[str]) -> list[str]:
    """Rules of a Lark grammar with `name`, one of these texts. They are one terminal: 50,000
    terminals take half a minute to compile, one of 50,000 texts two seconds."""
    return [f"{name}: CHOICE", f"CHOICE: {' | '.join(map(quoted, texts))}"]


def quoted(text: str) -> str:
    """A text as a Lark rule has it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _of_schema(text: str) -> str:
    try:
        return str(guidance().LLMatcher.grammar_from_json_schema(guided_schema(text)))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{WHAT}.json: {error}") from None


def _require_no_error(matcher: Any, outputs: StructuredOutputs) -> None:
    if matcher.is_error():
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        kind = next(kind for kind in kinds if getattr(outputs, kind) not in (None, False))
        raise BadInput(f"{WHAT}.{kind}: {reason_of(matcher)}")


def reason_of(matcher: Any) -> str:
    """Why a matcher has failed, in one line."""
    text = re.split("<(?:state|grammar|backtrace)>", str(matcher.get_error()))[0]
    line = " ".join(text.split())[:500]
    return "it allows no output" if line.startswith("NoExtension") else line
