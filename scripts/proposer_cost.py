"""What the proposers that need no model cost: a proposal, an appended token, a finished request.

    python scripts/proposer_cost.py --output reports/examples/cpu/proposer_cost.json

A request has a context of so many tokens of a text and is given the tokens after it, as a model
that wrote this text would emit them: the draft tokens that agree with it, and one more. A proposal
is timed together with the indexing of what was emitted since the one before. The first proposal
indexes the whole context: its time and memory, over the context's tokens, are those of a token.
Outputs of finished requests fill `suffix`'s store first, and `finished_us` is the time of one more.

Texts: a sentence over and over, the documentation in tokens of the embedded model, random tokens.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from program import CPU, exit_code, new_parser, write_figures

from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.extras.speculative.options import NgramOptions, SuffixOptions
from minivllm.extras.speculative.proposer import Proposer
from minivllm.extras.speculative.proposers.ngram import NgramProposer
from minivllm.extras.speculative.proposers.suffix import SuffixProposer
from minivllm.models.load.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
CONTEXTS = (256, 4_096, 32_768)
LENGTHS = (3, 16)  # most draft tokens
OUTPUT = 256  # tokens of a finished request
STORED = SuffixOptions().max_cached_tokens
VOCABULARY = 32_000  # of random tokens
SENTENCE = "The quick brown fox jumps over the lazy dog. "
PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "ngram": lambda: NgramProposer(NgramOptions()),
    "suffix": lambda: SuffixProposer(SuffixOptions()),
}


def texts(count: int) -> dict[str, list[int]]:
    """So many tokens of each kind of text; one that is too short begins again."""
    tokenizer = Tokenizer(ROOT / "minivllm" / "assets" / "tiny")
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
    draw = random.Random(0)
    return {
        "repeated sentence": list(islice(cycle(tokenizer.encode(SENTENCE)), count)),
        "documentation": list(islice(cycle(tokenizer.encode(pages)), count)),
        "random tokens": [draw.randrange(VOCABULARY) for _ in range(count)],
    }


def request(prompt: list[int], output: list[int]) -> Request:
    """A request with these tokens."""
    made = Request("r", prompt, SamplingParams(), max_num_tokens=1 << 30, seed=0)
    made.token_ids += output
    return made


def timed_us(action: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds of the processor in a call, and what it returns. Other work on the machine adds
    less to them than to wall time; reading the clock adds some 0.5."""
    begin = time.thread_time()
    result = action()
    return 1e6 * (time.thread_time() - begin), result


def finish(proposer: Proposer, outputs: list[int]) -> float:
    """End requests with these outputs; the median microseconds of the last tenth of them."""
    cuts = range(0, len(outputs) - OUTPUT + 1, OUTPUT)
    ended = [request([0], outputs[cut : cut + OUTPUT]) for cut in cuts]
    times = [timed_us(lambda one=one: proposer.finished(one))[0] for one in ended]
    return statistics.median(times[-len(times) // 10 :])


def bytes_of_context(proposer: Proposer, context: list[int]) -> int:
    """Bytes that the index of a context takes."""
    held = request(context, [])
    tracemalloc.start()
    proposer.propose(held, 1)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    proposer.finished(held)
    return size


def measured(
    name: str, text: list[int], context: int, most: int, outputs: list[int]
) -> dict[str, float]:
    """The costs of a proposer.

    Args:
        name: of the proposer.
        text: the context, and the tokens that are emitted after it.
        context: tokens.
        most: draft tokens.
        outputs: of the requests that finished before, one after another.
    """
    proposer = PROPOSERS[name]()
    finished_us = finish(proposer, outputs)
    size = bytes_of_context(PROPOSERS[name](), text[:context])
    growing = request(text[:context], [])
    whole_us, _ = timed_us(lambda: proposer.propose(growing, most))
    times, drafted, accepted = [], 0, 0
    while len(growing.token_ids) + most < len(text):
        spent, draft = timed_us(lambda: proposer.propose(growing, most))
        times.append(spent)
        place = len(growing.token_ids)
        agreeing = 0
        while agreeing < len(draft) and draft[agreeing] == text[place + agreeing]:
            agreeing += 1
        growing.token_ids += text[place : place + agreeing + 1]
        drafted, accepted = drafted + len(draft), accepted + agreeing
    cuts = statistics.quantiles(times, n=100)
    return {
        "p50_us": cuts[49],
        "p99_us": cuts[98],
        "tokens_a_proposal": 1 + accepted / len(times),
        "acceptance": accepted / drafted if drafted else 0.0,
        "context_us_a_token": whole_us / context,
        "context_bytes_a_token": size / context,
        "finished_us": finished_us,
    }


def rows(emitted: int) -> list[dict[str, Any]]:
    """A row for each proposer, text, context and length of draft."""
    longest = max(CONTEXTS) + emitted
    found = []
    for kind, text in texts(longest + STORED).items():
        outputs = text[longest:]
        for name in PROPOSERS:
            for most in LENGTHS:
                for context in CONTEXTS:
                    given = {"proposer": name, "text": kind, "most": most, "context": context}
                    part = text[: context + emitted]
                    found.append({**given, **measured(name, part, context, most, outputs)})
    return found


def table(found: list[dict[str, Any]]) -> str:
    """The rows in columns."""
    lines = [f"{'':24} draft context    p50 us  p99 us  tokens  us/token  bytes/token  finished us"]
    lines += [
        f"{row['proposer']:6} {row['text']:17} {row['most']:5} {row['context']:7,} "
        f"{row['p50_us']:9.1f} {row['p99_us']:7.1f} {row['tokens_a_proposal']:7.2f} "
        f"{row['context_us_a_token']:9.2f} {row['context_bytes_a_token']:12,.0f} "
        f"{row['finished_us']:12,.1f}"
        for row in found
    ]
    return "\n".join(lines)


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, default=CPU / "proposer_cost.json")
    parser.add_argument("--tokens", type=int, default=2_000, help="emitted in each measurement")
    args = parser.parse_args()
    found = rows(args.tokens)
    figures = {
        "what": "proposers that need no model: a proposal, an appended token, a finished request",
        "stored_tokens": STORED,
        "output_tokens": OUTPUT,
        "rows": found,
    }
    write_figures(args.output, figures, command="proposer_cost.py")
    print(table(found))


if __name__ == "__main__":
    sys.exit(exit_code(main))
