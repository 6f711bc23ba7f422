"""What structured outputs cost: masks, their application, their share of a step, and compiling.

    python scripts/structured_cost.py --output reports/examples/cpu/structured_cost.json

1. Masks: microseconds of one mask on the embedded model's tokenizer, along random outputs, by form;
   after a first walk, whose masks find the states of the grammar's lexer.
2. Application: microseconds for 32 rows of logits, as a bitmask in one operation and row by row as
   masks of booleans.
3. Steps: 32 requests of the embedded model, each with the JSON schema; the part of the time of
   their steps that goes into masks and into their application, and the time of the steps of as many
   requests without a form.
4. Compiling: milliseconds, with the first mask, by schema and kilobytes; the steps of 32 requests
   without a form while a thread compiles the largest; and llguidance's tokenizer of the embedded
   model, and of as many tokens as Qwen3 has.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from program import CPU, exit_code, finish, new_parser
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from minivllm import LLM, SamplingParams
from minivllm.engine.options import StructuredOutputs
from minivllm.engine.request import Request
from minivllm.extras.adjust_logits import Adjustments
from minivllm.extras.masks.bitmask import apply_bitmask, row_of
from minivllm.extras.masks.structured import Grammars
from minivllm.models.load.tokenizer import Tokenizer

ROWS = 32
QWEN3 = 151_936  # tokens
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 20},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "zip": {"type": "string", "pattern": "^\\d{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "json_object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex="([A-Z][a-z]{2,12} ){1,40}"),
    "choice": StructuredOutputs(choice=tuple(f"the answer {i} of many" for i in range(200))),
}


def microseconds(work: Callable[[], object], times: int) -> float:
    """Median of the time that `work` takes."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        taken.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(taken)


def masks(grammars: Grammars, form: str, vocab_size: int, walks: int) -> dict[str, Any]:
    """Time of one mask, along random outputs of a form."""
    params = SamplingParams(structured_outputs=FORMS[form])
    taken: list[float] = []
    for walk in range(walks + 1):
        rng, output = random.Random(max(walk, 1)), []
        request = Request(f"{walk}", [1], params, max_num_tokens=400, seed=0)
        state = grammars.state(request)  # which ends when nobody holds it
        while len(output) < 200:
            begin = time.perf_counter()
            row = grammars.mask(request, output)
            if walk:
                taken.append(1e6 * (time.perf_counter() - begin))
            allowed = [i for i in range(vocab_size) if row and row[i >> 3] >> (i & 7) & 1]
            if not allowed:
                break
            output.append(rng.choice(allowed))
        del state
    cuts = statistics.quantiles(taken, n=100)
    return {
        "form": form,
        "masks": len(taken),
        "mean_us": statistics.fmean(taken),
        **{f"p{percent}_us": cuts[percent - 1] for percent in (50, 90, 99)},
    }


def application(vocab_size: int, times: int) -> dict[str, Any]:
    """Time to mask `ROWS` rows of logits."""
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand(ROWS, vocab_size, generator=generator) < 0.5
    logits = torch.randn(ROWS, vocab_size, generator=generator)
    bits = bytearray(b"".join(map(row_of, allowed)))

    def row_by_row() -> None:
        for row, mask in zip(logits, allowed, strict=True):
            row.masked_fill_(~mask, -torch.inf)

    return {
        "rows": ROWS,
        "vocab_size": vocab_size,
        "bitmask_us": microseconds(lambda: apply_bitmask(logits, range(ROWS), bits), times),
        "booleans_us": microseconds(row_by_row, times),
    }


@contextmanager
def timed(owner: Any, name: str, total: list[float]) -> Iterator[None]:
    """Add the seconds of every call of a function to `total`."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            total.append(time.perf_counter() - begin)

    with mock.patch.object(owner, name, call):
        yield


def steps(llm: LLM, outputs: StructuredOutputs | None, tokens: int) -> dict[str, float]:
    """Mean milliseconds of a decoding step of `ROWS` requests, and of its parts."""
    params = SamplingParams(
        max_tokens=tokens, temperature=1.0, ignore_eos=True, structured_outputs=outputs
    )
    engine = llm.engine
    masking: list[float] = []
    applying: list[float] = []
    taken: list[float] = []
    for number in range(ROWS):
        engine.add_request(f"{number}", [5, 6, 7, number + 8], params)
    engine.step()
    with (
        timed(engine.launcher.extensions, "adjust_logits", masking),
        timed(Adjustments, "apply", applying),
    ):
        while len(engine.scheduler.running) == ROWS:
            begin = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - begin)
    engine.abort_all()
    mean = 1e3 * statistics.fmean(taken)
    parts = {
        "masks_ms": 1e3 * sum(masking) / len(taken),
        "apply_ms": 1e3 * sum(applying) / len(taken),
    }
    return {"steps": len(taken), "step_ms": mean, **parts, "share": sum(parts.values()) / mean}


def large_schema(objects: int, fields: int = 30) -> dict[str, Any]:
    """A schema of so many objects, each with so many strings of a pattern."""
    texts = {
        f"field_{i}": {"type": "string", "pattern": f"^[a-z]+[0-9]{{2,{3 + i % 5}}}$"}
        for i in range(fields)
    }
    one = {"type": "object", "properties": texts, "required": [*texts][: fields // 2]}
    return {"type": "object", "properties": {f"part_{i}": one for i in range(objects)}}


def compiling(
    tokenizer: Tokenizer, vocab_size: int, sizes: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Time to compile schemas, with their first mask."""
    found = []
    for name, schema in [
        ("of the masks", SCHEMA),
        *((f"{n} objects", large_schema(n)) for n in sizes),
    ]:
        outputs = StructuredOutputs(json=schema)
        grammars = Grammars(tokenizer, vocab_size)
        grammars.compile(StructuredOutputs(regex="a"))  # the tokenizer is there
        begin = time.perf_counter()
        grammars.compile(outputs)
        taken = 1e3 * (time.perf_counter() - begin)
        found.append({"schema": name, "kb": len(str(outputs.json)) / 1e3, "ms": taken})
    return found


def beside(llm: LLM, objects: int) -> dict[str, Any]:
    """The steps of `ROWS` requests while a thread compiles a schema of so many objects."""
    extensions: Any = llm.engine.launcher.extensions
    params = SamplingParams(max_tokens=2000, temperature=1.0, ignore_eos=True)
    for number in range(ROWS):
        llm.engine.add_request(f"{number}", [5, 6, 7, number + 8], params)
    llm.engine.step()
    outputs = StructuredOutputs(json=large_schema(objects))
    thread = threading.Thread(target=extensions.grammars.compile, args=(outputs,))
    taken: list[float] = []
    begin = time.perf_counter()
    thread.start()
    while thread.is_alive():
        started = time.perf_counter()
        llm.engine.step()
        taken.append(1e3 * (time.perf_counter() - started))
    compiled_ms = 1e3 * (time.perf_counter() - begin)
    llm.engine.abort_all()
    return {
        "kb": len(str(outputs.json)) / 1e3,
        "compiled_ms": compiled_ms,
        "steps": len(taken),
        "median_step_ms": statistics.median(taken),
        "longest_step_ms": max(taken),
    }


def large_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer of so many random tokens."""
    alphabet, rng = sorted(pre_tokenizers.ByteLevel.alphabet()), random.Random(0)
    words = dict.fromkeys(alphabet)
    while len(words) < vocab_size:
        words["".join(rng.choices(alphabet, k=rng.randint(2, 8)))] = None
    fast = FastTokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def building(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Time until the first grammar is compiled, which is that of llguidance's tokenizer."""
    grammars = Grammars(tokenizer, vocab_size)
    begin = time.perf_counter()
    grammars.compile(StructuredOutputs(regex="a"))
    return {"vocab_size": vocab_size, "ms": 1e3 * (time.perf_counter() - begin)}


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, default=CPU / "structured_cost.json")
    args = parser.parse_args()
    with LLM("tiny", overrides=["runtime.threads=1", "runtime.device=cpu"]) as llm:
        tokenizer, vocab_size = llm.tokenizer, llm.engine.loaded.config.vocab_size
        assert tokenizer is not None
        grammars = Grammars(tokenizer, vocab_size)
        with tempfile.TemporaryDirectory() as folder:
            large = large_tokenizer(Path(folder), QWEN3)
        steps(llm, FORMS["json"], 50)  # the first time finds the lexer's states
        figures: dict[str, Any] = {
            "what": "structured outputs: masks, steps, compiling",
            "masks": [masks(grammars, form, vocab_size, 20) for form in FORMS],
            "application": [application(vocab_size, 200), application(QWEN3, 30)],
            "structured_steps": steps(llm, FORMS["json"], 100),
            "plain_steps": steps(llm, None, 100),
            "compiling": compiling(tokenizer, vocab_size, (40, 400)),
            "steps_beside_compiling": beside(llm, 400),
            "tokenizers": [building(tokenizer, vocab_size), building(large, QWEN3)],
        }
    finish(args.output, figures, "structured_cost.py", "runtime.threads=1")


if __name__ == "__main__":
    sys.exit(exit_code(main))
