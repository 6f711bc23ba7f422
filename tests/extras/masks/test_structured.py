"""Structured outputs of random models: every finished output is what was asked for."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from minivllm import LLM, SamplingParams
from minivllm.engine.options import StructuredOutputs
from minivllm.engine.request import Request
from minivllm.errors import BadInput, NotInstalled
from minivllm.extras.masks import compiling
from minivllm.extras.masks.structured import MOST_GRAMMARS, Grammars, GrammarState
from minivllm.models.load.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.traffic import Asked, serve
from tests.extras.speculative.drafting import load, plainly, same, speculator
from tests.reference import make_checkpoint

END = 256  # the token that ends an output
VOCAB = 264  # more than the tokenizer has
DRAWN = SamplingParams(temperature=1.0, max_tokens=300)
TAG = {"type": "string", "minLength": 2, "maxLength": 6}
# https://github.com/guidance-ai/llguidance/issues/265, with shorter texts.
SCORES = {
    "type": "object",
    "properties": {
        "score": {"type": "integer", "multipleOf": 5, "maximum": 1000},
        "tags": {"type": "array", "items": TAG, "maxItems": 3},
    },
    "required": ["score", "tags"],
    "additionalProperties": False,
    "patternProperties": {"^score$": {"type": "integer", "minimum": 20}},
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["leaf", 'é"\\', None, 3]},
                "next": {"$ref": "#/$defs/node"},
            },
            "required": ["kind"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
MAP = {
    "type": "object",
    "patternProperties": {"^[ab]{1,2}$": {"type": "boolean"}},
    "additionalProperties": False,
    "minProperties": 1,
}
SCHEMAS = {"scores": SCORES, "tree": TREE, "map": MAP, "any number": {"type": "number"}}


def of_schema(schema: Any) -> StructuredOutputs:
    return StructuredOutputs(json=schema)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab_size=VOCAB, eos_token_id=END, max_position_embeddings=512)
    byte_tokenizer(path)
    return path


def open_model(folder: Path, *overrides: str) -> LLM:
    return load(folder, "model.max_model_len=400", *overrides)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_model(folder) as made:
        yield made


def texts(llm: LLM, outputs: StructuredOutputs, count: int = 12, **params: Any) -> list[str]:
    """The outputs that have ended by themselves, at least half of them."""
    asked = replace(DRAWN, structured_outputs=outputs, n=count, seed=5, **params)
    found = llm.generate("Write: ", asked)[0].outputs
    ended = [one for one in found if one.finish_reason == "stop"]
    assert len(ended) >= count / 2
    assert len({one.text for one in ended}) > 1
    return [str(one.text) for one in ended]


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_satisfies_its_schema(llm: LLM, name: str) -> None:
    for text in texts(llm, of_schema(SCHEMAS[name])):
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_other_forms(llm: LLM, ignore_eos: bool) -> None:
    """A text that nothing can follow ends its request, if the model's end may come or not."""
    for text in texts(llm, StructuredOutputs(json_object=True), ignore_eos=ignore_eos):
        assert isinstance(json.loads(text), dict)
    for text in texts(llm, StructuredOutputs(regex="[ab]{3,9};|é+!"), ignore_eos=ignore_eos):
        assert re.fullmatch("[ab]{3,9};|é+!", text)
    choice = ('yes"\n', "yeah", "não😀")
    assert {*texts(llm, StructuredOutputs(choice=choice), 24, ignore_eos=ignore_eos)} <= {*choice}
    grammar = 'start: "f(" call? ")"\ncall: "x" | start'
    for text in texts(llm, StructuredOutputs(grammar=grammar), ignore_eos=ignore_eos):
        assert re.fullmatch(r"(f\()+x?\)+", text) and text.count("(") == text.count(")")


def test_an_end_of_sequence_comes_where_the_text_may_end(llm: LLM) -> None:
    found = {text for text in texts(llm, StructuredOutputs(regex="(ab)+"), 24)}
    assert len(found) > 2 and all(re.fullmatch("(ab)+", text) for text in found)
    digits = StructuredOutputs(regex="[0-9]+")
    ended = llm.generate("x", replace(DRAWN, structured_outputs=digits, ignore_eos=True))
    assert ended[0].outputs[0].finish_reason == "length"
    stops = replace(DRAWN, structured_outputs=digits, ignore_eos=True, stop_token_ids=(5,))
    output = llm.generate("x", stops)[0].outputs[0]
    assert output.stop_reason == 5 and str(output.text).isdecimal()


def test_texts_go_with_stop_strings_and_other_masks(llm: LLM) -> None:
    outputs = StructuredOutputs(regex="[abc]{6};!")
    assert all("c" not in text for text in texts(llm, outputs, bad_words=("c",)))
    # What may be the beginning of a stop string is not held back at the end.
    whole = texts(llm, outputs, stop=("!?", "zz"))
    assert all(len(text) == 8 for text in whole)
    cut = texts(llm, outputs, stop=(";",))
    assert all(re.fullmatch("[abc]{6}", text) for text in cut)


def test_more_tokens_than_a_grammar_has_are_an_error(llm: LLM) -> None:
    params = replace(DRAWN, structured_outputs=StructuredOutputs(choice=("ab",)), min_tokens=5)
    with pytest.raises(BadInput, match="allow no token after 2 generated ones"):
        llm.generate("x", params, on_error="raise")


PROMPT = b'{"kind": "leaf", "next": {"kind": 3}} {"score": 25, "tags": ["abab", "abab"]}'
MIXED = [
    Asked([*PROMPT, *b" again: "][start:], replace(DRAWN, **params), comes=start % 3)
    for start, params in enumerate(
        [
            {"structured_outputs": of_schema(TREE)},
            {"structured_outputs": of_schema(TREE), "temperature": 0.0},
            {"structured_outputs": of_schema(SCORES), "n": 2},
            {"structured_outputs": StructuredOutputs(regex='("abab", )+"end"')},
            {"structured_outputs": StructuredOutputs(json_object=True), "max_tokens": 80},
            {"max_tokens": 40},
            {"structured_outputs": of_schema(MAP), "repetition_penalty": 1.2},
        ]
    )
]


@pytest.mark.parametrize(
    "proposer",
    [
        ["speculative=ngram", "speculative.prompt_lookup_min=1"],
        ["speculative=draft", "quant@speculative.quant=int4"],
        ["speculative=early_exit", "speculative.exit_layer=2"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_drafts_change_no_token(folder: Path, llm: LLM, proposer: list[str]) -> None:
    with open_model(folder, *proposer, "speculative.adaptive=false") as drafting:
        found = same(drafting.engine, llm.engine, MIXED)
        counters = speculator(drafting.engine).counters
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert sum(reason == "stop" for one in found for _, reason in one) >= 4


@pytest.mark.parametrize("verify", ["rejection", "given"])
def test_other_verdicts_on_drafts_keep_the_form(folder: Path, verify: str) -> None:
    knobs = {
        "rejection": ["speculative.verify=rejection"],
        "given": ["speculative.acceptance=0.7"],
    }[verify]
    draft = ["speculative=ngram", "speculative.prompt_lookup_min=1", *knobs]
    with open_model(folder, *draft) as llm:
        for text in texts(llm, of_schema(TREE)):
            jsonschema.validate(json.loads(text), TREE)


@pytest.mark.parametrize(
    "overrides",
    [
        ["batching.max_num_seqs=2"],
        ["batching.max_num_batched_tokens=7"],
        ["cache.num_blocks=101", "batching.max_num_seqs=8"],
        ["runtime.overlap=true"],
        ["cache=none"],
        ["batching=static", "batching.max_num_seqs=3"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_no_way_of_serving_changes_a_token(folder: Path, llm: LLM, overrides: list[str]) -> None:
    with open_model(folder, *overrides) as other:
        assert serve(other.engine, MIXED) == plainly(llm.engine, MIXED)
        extensions: Any = other.engine.launcher.extensions
        assert extensions.grammars._states == {}
        if "cache.num_blocks=101" in overrides:
            assert other.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "(a"}, "regex: .*unclosed group"),
        ({"regex": "a(?=b)"}, "look-ahead"),
        ({"json": {"type": "strin"}}, "json: Invalid type: strin"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {"$ref": "http://example.com/x"}}, "json: .*example.com"),
        ({"json": {"$ref": "#"}}, "json: it allows no output"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "json: Unsatisfiable"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json": {"minProperties": 4}}, "json: minProperties=4"),
        ({"grammar": "start: x"}, 'grammar: .*unknown name: "x"'),
        ({"grammar": "stat: /a/"}, "grammar: "),
    ],
)
def test_what_cannot_be_followed_is_bad_input(llm: LLM, given: Any, message: str) -> None:
    params = replace(DRAWN, structured_outputs=StructuredOutputs(**given))
    with pytest.raises(BadInput, match=message) as caught:
        llm.generate("x", params)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
    assert llm.generate("x", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_a_limit_while_decoding_is_an_error_of_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MOST_LEXER_STATES", 40)
    asked = [
        replace(DRAWN, structured_outputs=outputs)
        for outputs in (
            StructuredOutputs(choice=("Yes", "No")),
            StructuredOutputs(regex="([ab]c){60}"),
        )
    ]
    first = llm.engine.add_request("few states", [65], asked[0])
    second = llm.engine.add_request("many states", [65], asked[1])
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert first.finish_reason == "stop" and first.error is None
    assert second.error is not None and "grammar cannot go on" in str(second.error)


def test_needs(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = StructuredOutputs(regex="ab")
    with pytest.raises(BadInput, match=r"needs a tokenizer"):
        Grammars(None, VOCAB).compile(outputs)
    said = r"^decoding\.structured_outputs=\{'regex': 'ab'\} with beam_width=2 must be null"
    with pytest.raises(BadInput, match=said):
        SamplingParams(beam_width=2, structured_outputs=outputs)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(NotInstalled, match="structured outputs need llguidance"):
        Grammars(Tokenizer(folder), VOCAB).compile(outputs)


def test_a_wrong_field_is_named_as_it_was_given() -> None:
    with pytest.raises(
        BadInput, match=r"^decoding\.structured_outputs\.regexp: no such field; did"
    ):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(BadInput, match=r"choice=\[\] must be a list of texts, at least one"):
        SamplingParams(structured_outputs={"choice": []})


def test_the_configuration_may_hold_them(folder: Path) -> None:
    knobs = ["decoding.structured_outputs={regex: '[ab]{2}'}", "decoding.temperature=1"]
    with open_model(folder, *knobs) as llm:
        found = llm.generate(["x"] * 4)
        extensions: Any = llm.engine.launcher.extensions
        assert extensions.grammars.num_masks >= 8
    assert all(re.fullmatch("[ab]{2}", str(one.outputs[0].text)) for one in found)


# ---- matchers


class Matched:
    """A request whose output is made by its masks alone."""

    def __init__(self, grammars: Grammars, outputs: StructuredOutputs) -> None:
        params = SamplingParams(max_tokens=None, structured_outputs=outputs)
        self.request = Request("r", [65], params, max_num_tokens=4000, seed=0, eos_token_ids=(END,))
        self.grammars, self.output = grammars, list[int]()

    def allowed(self) -> list[int] | None:
        row = self.grammars.mask(self.request, self.output)
        if row is None:
            return None
        return [token for token in range(VOCAB) if row[token >> 3] >> (token & 7) & 1]

    def text(self, rng: random.Random, most: int = 600) -> str | None:
        """A random text of the grammar; None where it does not end."""
        for _ in range(most):
            allowed = self.allowed()
            assert allowed is None or allowed, "a dead end"
            if allowed is None or (END in allowed and rng.random() < 0.5):
                return bytes(self.output_bytes()).decode()
            closing = [token for token in allowed if token in CLOSING]
            several = [token for token in allowed if token != END] or allowed
            self.output.append(rng.choice(closing if closing and rng.random() < 0.4 else several))
        return None

    def output_bytes(self) -> list[int]:
        return [BYTES[token] for token in self.output]


def byte_of_tokens() -> dict[int, int]:
    """The byte of each token of the tokenizer, whose alphabet is sorted by other characters."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    of = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    of |= {chr(256 + index): byte for index, byte in enumerate(others)}
    return {token: of[character] for token, character in enumerate(alphabet)}


BYTES = byte_of_tokens()
CLOSING = {token for token, byte in BYTES.items() if chr(byte) in '"]},:'}


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(Tokenizer(folder), VOCAB, (END,))


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0, "exclusiveMaximum": 50},
        {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
        {"type": ["number", "null"], "maximum": 1, "minimum": -9.5, "multipleOf": 3},
        {"type": "number", "minimum": -0.25, "exclusiveMaximum": 0},
        {"type": "boolean"},
        {"type": ["null", "boolean"]},
        {"const": {"b": [1, None]}},
        {"enum": ["x", 1, None, '\n"', {}]},
        {"type": "string", "maxLength": 4},
        {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-c]*$"},
        {"type": "string", "pattern": '^[^"]{1,4}$'},
        {"type": "string", "pattern": r"^[^\\x]{1,4}$"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "ipv4"},
    ]
)
NAMES = st.sampled_from(["a", "b", "ab", 'q"', "é"])
PATTERNS = st.sampled_from(["^a$", "^(a|b)$", "^[ab]+$", "^x", "b$"])


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = draw(st.lists(NAMES, unique=True, max_size=2))
    schema["additionalProperties"] = draw(st.sampled_from([False, False, {"type": "null"}]))
    if draw(st.booleans()):
        schema["patternProperties"] = {draw(PATTERNS): draw(inner)}
    if draw(st.booleans()):
        schema["minProperties"] = draw(st.integers(0, 2))
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": draw(inner), "maxItems": 3}
    schema["minItems"] = draw(st.integers(0, 2))
    if draw(st.booleans()):
        schema["prefixItems"] = [draw(inner)]
    return schema


SCHEMA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        st.lists(objects(inner), min_size=2, max_size=2).map(lambda some: {"allOf": some}),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=150)
@given(schema=SCHEMA, seed=st.integers(0, 1000))
def test_any_schema_is_refused_or_satisfied(
    grammars: Grammars, schema: dict[str, Any], seed: int
) -> None:
    outputs = of_schema(schema)
    try:
        grammars.compile(outputs)
    except BadInput:
        return
    for number in range(3):
        text = Matched(grammars, outputs).text(random.Random(seed + number))
        if text is not None:
            jsonschema.validate(
                json.loads(text), schema, format_checker=jsonschema.FormatChecker(["ipv4", "date"])
            )


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_matcher_goes_back_and_on(grammars: Grammars, data: st.DataObject) -> None:
    """Whatever it was asked before, its mask is that of a new one."""
    outputs = data.draw(st.sampled_from([of_schema(TREE), StructuredOutputs(regex="(ab?){1,9}c")]))
    rng = random.Random(data.draw(st.integers(0, 1000)))
    asked = [Matched(grammars, outputs) for _ in range(2)]
    for one in asked:
        one.text(rng)
    state = GrammarState(grammars, outputs)
    for _ in range(8):
        output = data.draw(st.sampled_from(asked)).output
        output = output[: data.draw(st.integers(0, len(output)))]
        wrong = data.draw(st.booleans())
        if wrong:
            with pytest.raises(BadInput, match="does not allow"):
                state.bits([*output, 0])
        assert state.bits(output) == GrammarState(grammars, outputs).bits(output)


def test_a_grammar_may_name_the_end_of_sequence(llm: LLM) -> None:
    """As a tool call does that ends with a token of its own."""
    outputs = StructuredOutputs(grammar=f'start: "a" <[{END}]>')
    output = llm.generate("x", replace(DRAWN, structured_outputs=outputs))[0].outputs[0]
    assert output.token_ids[1:] == [END] and output.finish_reason == "stop"
    assert output.text == "a"


@pytest.mark.parametrize("special", [False, True])
def test_texts_may_hold_what_an_added_token_reads_as(folder: Path, special: bool) -> None:
    tokenizer = Tokenizer(folder)
    tokenizer.fast.add_tokens([AddedToken("<tag>", special=special)])
    grammars = Grammars(tokenizer, VOCAB, (END,))
    matched = Matched(grammars, StructuredOutputs(regex="a<tag>b"))
    assert matched.text(random.Random(0)) == "a<tag>b"


def test_a_grammar_is_compiled_once_and_the_oldest_is_dropped(folder: Path) -> None:
    grammars = Grammars(Tokenizer(folder), VOCAB)
    made = [StructuredOutputs(regex=f"a{{{number}}}") for number in range(1, MOST_GRAMMARS + 2)]
    for outputs in [*made, *made[1:]]:
        grammars.compile(outputs)
    assert grammars.num_compiled == len(made)
    assert not grammars.compiled(made[0]) and grammars.compiled(made[-1])


def test_what_is_asked_crosses_processes() -> None:
    for outputs in (of_schema(TREE), StructuredOutputs(choice=["a", "b"])):  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(outputs)) == outputs
        assert hash(outputs) == hash(pickle.loads(pickle.dumps(outputs)))
