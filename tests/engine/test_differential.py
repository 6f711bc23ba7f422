"""A random search for configurations that change what a request gets.

Whatever batches, caches, preempts, drafts or overlaps, every request has the tokens, the text, the
end and the log-probabilities that the plainest engine gives it alone: within rounding, or to the
bit where both have kernels that promise it (`runtime.determinism=batch`). Hypothesis draws
configurations and requests, and of those that differ it shows the smallest, each knob at its
plainest value where that still differs: 50 of a fixed seed in each run of the tests, thousands of
fresh ones under --hypothesis-profile=fuzz (make fuzz), with tensor ranks among them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from minivllm.extras.beam import BeamSearch
from minivllm.outputs import CompletionOutput, beam_completions, new_completions
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.traffic import check
from tests.reference import make_checkpoint

FUZZING = settings.get_current_profile_name() == "fuzz"
LONGEST = 64  # tokens of prompt and output
TOLERANCE = 1e-4  # of log-probabilities, in float32
DRAFTS = ("speculative.adaptive=false", "speculative.num_speculative_tokens=4")
Values = list[tuple[str, ...]]  # of a knob, as overrides, the plainest first
BATCHING: Values = [
    (),
    ("batching.prefill_first=true",),
    ("batching.fair_prefill=true",),
    ("batching=static",),
    ("batching=static", "batching.group_by_length=true"),
    ("batching=dynamic", "batching.max_wait_ms=0"),
    ("batching=sequential",),
]
SEQUENCES: Values = [(), ("batching.max_num_seqs=3",)]
CHUNKS: Values = [
    (),
    ("batching.max_num_batched_tokens=7",),
    ("batching.max_num_batched_tokens=16",),
    ("batching.chunked_prefill=false",),
]
PREEMPTION: Values = [(), ("batching.preemption=reserve",), ("batching.preemption=swap",)]
CACHE = ["paged", "paged", "paged", "contiguous", "none"]
PREFIXES: Values = [
    (),
    ("cache.prefix_caching=true",),
    ("cache.prefix_caching=true", "cache.offload_gb=1e-4"),
]
PLAIN_KERNELS = "runtime.cpu_kernels=off"
KERNELS: Values = [
    ("attention=eager", PLAIN_KERNELS),
    ("attention=sdpa", PLAIN_KERNELS),
    ("attention=sdpa", "runtime.native_layers=false"),
    ("attention=cpu",),
    ("attention=invariant", "runtime.determinism=batch"),
]
STEPS: Values = [
    (),
    ("runtime.overlap=true",),
    ("speculative=ngram", "speculative.prompt_lookup_min=1", *DRAFTS),
    ("speculative=suffix", *DRAFTS),
    ("speculative=draft", "quant@speculative.quant=int4", *DRAFTS),
    ("speculative=early_exit", "speculative.exit_layer=1", *DRAFTS),
]
# Processes take seconds to start, so each run of the tests draws none.
RANKS: Values = [()] * 40 + [("parallel.tensor=2",)] * FUZZING
PLAINEST = ("batching=sequential", "cache.num_blocks=64")
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[ab]{1,6}c"},
    {"choice": ["yes", "no", "né"]},
    {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
]


@dataclass(frozen=True)
class Asked:
    """A request, and the step before which it comes."""

    prompt: tuple[int, ...]
    params: dict[str, Any]
    comes: int


@dataclass(frozen=True)
class Served:
    """What a request got: its completions, and the log-probabilities of its prompt."""

    completions: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float]] | None


def of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


BEAMS = st.fixed_dictionaries(
    {"beam_width": of(2, 3), "max_tokens": st.integers(1, 6)},
    optional={
        "n": of(2),
        "length_penalty": of(0.0, 2.0),
        "early_stopping": of(True, "never"),
        "allowed_token_ids": of(tuple(range(60, 70)), (97, 256)),
        "repetition_penalty": of(1.3),
        "prompt_logprobs": of(0, 2),
    },
)
SAMPLES = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 14), "seed": st.integers(0, 99)},
    optional={
        "temperature": of(0.7, 1.0, 2.0),
        "top_k": of(1, 3, 50),
        "top_p": of(0.5, 0.9),
        "min_p": of(0.05),
        "repetition_penalty": of(1.3),
        "presence_penalty": of(0.5),
        "frequency_penalty": of(-0.5, 0.5),
        "logit_bias": of({97: 4.0, 98: 4.0, 256: 3.0}),
        "allowed_token_ids": of(tuple(range(60, 90)), (64, 97, 98, 256)),
        "bad_words": of(("a",), ("ab", "ba")),
        "structured_outputs": st.sampled_from(GRAMMARS),
        "n": of(2, 3),
        "stop": of(("a",), ("ab", "b"), ("é",)),
        "stop_token_ids": of(tuple(range(60, 100))),
        "include_stop_str_in_output": of(True),
        "skip_special_tokens": of(False),
        "ignore_eos": of(True),
        "min_tokens": of(1),
        "logprobs": of(0, 2, -1),
        "prompt_logprobs": of(0, 2),
    },
)


@st.composite
def traffic(draw: st.DrawFn) -> list[Asked]:
    """One to five requests, some with the same beginning."""
    shared = draw(st.lists(st.integers(97, 104), min_size=17, max_size=17))
    asked = []
    for _ in range(draw(st.integers(1, 5))):
        own = draw(st.lists(st.integers(97, 104), min_size=1, max_size=10))
        prompt = (*shared[: draw(of(0, 8, 16, 17))], *own)
        params = draw(st.one_of(SAMPLES, SAMPLES, SAMPLES, BEAMS))
        asked.append(Asked(prompt, params, draw(st.integers(0, 5))))
    return asked


@st.composite
def configurations(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Overrides of the plainest engine and of the one that is compared with it.

    In an 8-bit cache a key half way between two integers is rounded to either side by the last
    bit of a kernel's sum, which changes a log-probability by more than the tolerance. There both
    engines have the kernels whose bits do not depend on the batch, in one rank, as several add
    up in another order.
    """
    batching, cache = draw(st.sampled_from(BATCHING)), draw(st.sampled_from(CACHE))
    one_by_one, paged = "batching=sequential" in batching, cache == "paged"
    is_8_bit = paged and draw(of(False, False, True))
    kernels = draw(st.sampled_from(KERNELS[-1:] if is_8_bit else KERNELS))
    stored = ["cache.kv_dtype=int8"] * is_8_bit
    reference = (*PLAINEST, *(kernels if is_8_bit else KERNELS[0]), *stored)
    chosen = [f"cache={cache}", *batching, *kernels, *stored]
    for values, taken in (
        (SEQUENCES, not one_by_one),
        (CHUNKS[:1] + CHUNKS[3:] if cache == "none" else CHUNKS, True),
        (PREEMPTION if paged else PREEMPTION[:2], not one_by_one),
        (PREFIXES, paged),
        (STEPS[:2] if cache == "none" else STEPS, True),
        (RANKS, not is_8_bit),
    ):
        chosen += draw(st.sampled_from(values)) if taken else ()
    capacity = draw(of(1024, 96, 72))  # tokens
    if paged:
        size = draw(of(16, 1, 4, 8))
        chosen += [f"cache.block_size={size}", f"cache.num_blocks={capacity // size + 1}"]
    elif cache == "contiguous":
        chosen += [f"cache.num_sequences={-(-capacity // LONGEST)}"]
    return reference, tuple(chosen)


class Engines:
    """Engines of one checkpoint, of which the last few are kept."""

    KEPT = 4

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: OrderedDict[tuple[str, ...], LLM] = OrderedDict()

    def get(self, overrides: tuple[str, ...]) -> LLM:
        """Raises BadInput for a configuration that does not exist."""
        if overrides not in self.kept:
            # Groups come before the knobs in them.
            groups = [one for one in overrides if "." not in one.split("=")[0]]
            knobs = [one for one in overrides if one not in groups]
            common = ["runtime.threads=1", f"model.max_model_len={LONGEST}"]
            self.kept[overrides] = LLM(
                str(self.folder), device="cpu", quant="fp32", overrides=[*groups, *common, *knobs]
            )
        self.kept.move_to_end(overrides)
        while len(self.kept) > self.KEPT:
            self.kept.popitem(last=False)[1].close()
        return self.kept[overrides]

    def close(self) -> None:
        while self.kept:
            self.kept.popitem()[1].close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose outputs are not all the same, with a token a byte."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    sizes = {"vocab_size": 264, "num_hidden_layers": 2, "initializer_range": 0.3}
    make_checkpoint(folder, eos_token_id=256, dtype=torch.float32, **sizes)
    byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> Iterator[Engines]:
    made = Engines(checkpoint)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Engines]:
    """Engines that others are compared with."""
    made = Engines(checkpoint)
    yield made
    made.close()


def serve(llm: LLM, asked: Sequence[Asked]) -> list[Served]:
    """What each request gets, the cache being checked after every step.

    Raises:
        BadInput: the engine serves no such request.
    """
    engine, step = llm.engine, 0
    requests: dict[int, Any] = {}
    completions: dict[str, CompletionOutput] = {}
    try:
        while engine.has_unfinished or len(requests) < len(asked):
            for index, one in enumerate(asked):
                if one.comes <= step and index not in requests:
                    params = SamplingParams(**one.params)
                    first = engine.add_request(str(index), list(one.prompt), params)
                    requests[index] = first, dict(new_completions(first, True))
                    completions |= requests[index][1]
            for output in engine.step():
                completions[output.request.request_id].add(output)
            check(engine)
            step += 1
    finally:
        engine.abort_all()
    assert engine.cache.pool.num_used == 0
    served = []
    for index in range(len(asked)):
        first, own = requests[index]
        found = [*own.values()]
        if isinstance(first.group, BeamSearch) and first.finish_reason != "error":
            found = beam_completions(first, first.group, llm.tokenizer)
        served.append(Served(found, first.prompt_logprobs))
    return served


def assert_same(found: Served, expected: Served, tolerance: float) -> None:
    """The same completions, but for a tolerance of log-probabilities."""
    assert len(found.completions) == len(expected.completions)
    for one, other in zip(found.completions, expected.completions, strict=True):
        names = ("token_ids", "text", "finish_reason", "stop_reason")
        mine, theirs = ({name: getattr(c, name) for name in names} for c in (one, other))
        assert mine == theirs
        errors = [
            (type(error), str(error).partition(": ")[2]) for error in (one.error, other.error)
        ]
        assert errors[0] == errors[1]
        assert one.score == pytest.approx(other.score, abs=tolerance)
        assert_close(one.logprobs, other.logprobs, tolerance)
    assert_close(found.prompt_logprobs, expected.prompt_logprobs, tolerance)


def assert_close(
    found: list[dict[int, float]] | None,
    expected: list[dict[int, float]] | None,
    tolerance: float,
) -> None:
    """The same log-probabilities; of equal ones any may be the last that is listed."""
    assert (found is None) == (expected is None)
    for one, other in zip(found or (), expected or (), strict=True):
        values = [sorted(entry.values()) for entry in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=tolerance)
        for token in one.keys() & other.keys():
            assert one[token] == pytest.approx(other[token], abs=tolerance)


# A mask that rejects a draft took a row from the log-probabilities of the next request's prompt.
REJECTED_DRAFT = [
    Asked((102, 104, 99, 99, 102, 104, 104), {"seed": 1}, 5),
    Asked((104, 100, 98, 97, 99, 98, 97, 102), {"structured_outputs": GRAMMARS[1], "seed": 2}, 3),
    Asked((104, 100, 98, 97, 99, 98, 97, 102, 97, 99, 103), {"prompt_logprobs": 0, "seed": 3}, 4),
]


@pytest.mark.fuzz("configurations")
@example(
    (
        (*PLAINEST, *KERNELS[0]),
        ("speculative=draft", "quant@speculative.quant=int4", *DRAFTS, "cache.num_blocks=64"),
    ),
    REJECTED_DRAFT,
)
@settings(
    derandomize=not FUZZING,
    max_examples=settings().max_examples if FUZZING else 50,
    print_blob=True,
)
@given(configuration=configurations(), asked=traffic())
def test_no_configuration_changes_what_a_request_gets(
    engines: Engines,
    plain: Engines,
    configuration: tuple[tuple[str, ...], tuple[str, ...]],
    asked: list[Asked],
) -> None:
    reference, overrides = configuration
    try:
        found = serve(engines.get(overrides), asked)
    except BadInput:
        assume(False)  # what does not exist, or can never be served
    for one, served in zip(asked, found, strict=True):
        (expected,) = serve(plain.get(reference), [Asked(one.prompt, one.params, 0)])
        assert_same(served, expected, 0 if "runtime.determinism=batch" in reference else TOLERANCE)
