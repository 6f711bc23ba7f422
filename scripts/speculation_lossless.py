"""Whether speculation changes tokens: many ways of serving with drafts, against none.

    python scripts/speculation_lossless.py --output reports/examples/cpu/speculation_lossless.json

Requests of several kinds of text, at temperatures 0, 0.8 and 1, are served once without drafts, one
at a time. Then combinations of proposer, length of drafts, batching policy, chunks of prompts,
preemption, cache and attention, drawn so that each choice comes equally often, serve some of the
requests twice, the second time with the prefixes that their cache then holds. In float32 every
token must be the same, and so must those in bfloat16 under `runtime.determinism=batch`.

In bfloat16 alone a step of several tokens rounds in another way than one of a single token, so that
of two tokens of almost the same score the other one may be chosen. A request is compared up to its
first different token. There the scores of both tokens after noise (in float32, of the same weights)
are compared with what rounding does: the largest difference between a logit in bfloat16 and in
float32 at this position, for each of the two.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from program import CPU, exit_code, new_parser, write_figures

from minivllm import LLM, SamplingParams
from minivllm.config.groups import conf_dir
from minivllm.engine.sampler import exponential_noise
from minivllm.extras.speculative.speculation import Speculator

ROOT = Path(__file__).resolve().parents[1]
TEMPERATURES = (0.0, 0.8, 1.0)
Combination = dict[str, str]
Axes = Mapping[str, Mapping[str, Sequence[str]]]


@dataclass(frozen=True)
class Sizes:
    """What goes by the model.

    Args:
        block_size: tokens a cache block.
        longest: tokens of the longest request.
        exit_layer: layers that draft.
        second: overrides for a second model that drafts.
    """

    block_size: int
    longest: int
    exit_layer: int
    second: tuple[str, ...]


EMBEDDED = Sizes(8, 128, 3, ("model@speculative.model=tiny", "quant@speculative.quant=int4"))


def proposers(sizes: Sizes) -> Axes:
    """The options of `speculative` that draft, each with its ways to, in overrides."""
    exits = ("speculative=early_exit", f"speculative.exit_layer={sizes.exit_layer}")
    ways: dict[str, dict[str, tuple[str, ...]]] = {
        "ngram": {"ngram": ("speculative=ngram", "speculative.prompt_lookup_min=1")},
        "suffix": {"suffix": ("speculative=suffix",)},
        "draft": {
            "draft int4": ("speculative=draft", "quant@speculative.quant=int4"),
            "draft model": ("speculative=draft", *sizes.second),
        },
        "early_exit": {
            "early_exit": exits,
            "early_exit, part of the head": (*exits, "speculative.head_tokens=100"),
        },
    }
    names = sorted(path.stem for path in (conf_dir() / "speculative").glob("*.yaml"))
    others = [name for name in names if name != "none" and name not in ways]
    return ways | {name: {name: (f"speculative={name}",)} for name in others}


def axes(sizes: Sizes) -> Axes:
    """The choices, each with its overrides."""
    block = f"cache.block_size={sizes.block_size}"
    # room for the longest request and little more
    few = (block, f"cache.num_blocks={3 + sizes.longest // sizes.block_size}")
    prefix = "cache.prefix_caching=true"
    offload = (*few, prefix, "cache.offload_gb=2e-3")
    return {
        "proposer": dict(item for ways in proposers(sizes).values() for item in ways.items()),
        "drafts": {
            **{str(n): (f"speculative.num_speculative_tokens={n}",) for n in range(1, 9)},
            "adaptive": ("speculative.adaptive=true",),
        },
        "batching": {
            "sequential": ("batching=sequential",),
            "static": ("batching=static", "batching.max_num_seqs=3"),
            "dynamic": ("batching=dynamic", "batching.max_num_seqs=4", "batching.max_wait_ms=1"),
            "continuous": ("batching=continuous",),
            "prefill first": ("batching=continuous", "batching.prefill_first=true"),
            "fair": ("batching=continuous", "batching.fair_prefill=true"),
        },
        "chunks": {
            "whole": ("batching.chunked_prefill=false",),
            "of 7": ("batching.max_num_batched_tokens=7",),
            "large": (),
        },
        "preemption": {
            "recompute": (),
            "swap": ("batching.preemption=swap",),
            "reserve": ("batching.preemption=reserve",),
        },
        "cache": {
            "paged": (block,),
            "few blocks": few,
            "prefix": (block, prefix),
            "prefix, few blocks": (*few, prefix),
            "offload": offload,
            "offload to disk": (
                *few,
                prefix,
                "cache.offload_gb=3e-4",
                "cache.offload_disk_gb=2e-2",
            ),
            "contiguous": ("cache=contiguous",),
        },
        "attention": {
            "auto": (),
            "sdpa": ("attention=sdpa",),
            "eager": ("attention=eager",),
        },
    }


def possible(one: Combination) -> bool:
    """Whether the options of a combination go together."""
    if one["batching"] == "sequential" and one["preemption"] != "recompute":
        return False
    return one["preemption"] != "swap" or one["cache"] != "contiguous"


def combinations(choices: Axes, count: int, draw: random.Random) -> Iterator[Combination]:
    """So many combinations whose options go together: of many drawn ones always that whose choices
    have come least."""
    shares: Counter[tuple[str, str]] = Counter()
    for _ in range(count):
        drawn = [
            {axis: draw.choice(list(options)) for axis, options in choices.items()}
            for _ in range(CANDIDATES)
        ]
        one = min(filter(possible, drawn), key=lambda one: sum(shares[own] for own in one.items()))
        shares.update({own: len(choices[own[0]]) for own in one.items()})
        yield one


def overrides(choices: Axes, one: Combination) -> list[str]:
    """The overrides of a combination, options before knobs."""
    items = [item for axis, choice in one.items() for item in choices[axis][choice]]
    if one["drafts"] != "adaptive":
        items.append("speculative.adaptive=false")
    return sorted(items, key=lambda item: "." in item.split("=")[0] and "@" not in item)


INVARIANT = ("attention=invariant", "runtime.determinism=batch")
PREFIX_TOKENS, PROMPTS, MOST_TOKENS, MOST_REQUESTS = 20, 8, 48, 6
CANDIDATES = 200  # combinations to take one of
SENTENCE = "The quick brown fox jumps over the lazy dog. "
RECORD = '{"name": "box", "size": [1, 2, 3], "open": true}, '
Asked = tuple[list[int], SamplingParams]


def load(quant: str, *more: str) -> LLM:
    """The embedded model in one thread."""
    items = [*more, "runtime.threads=1", f"model.max_model_len={EMBEDDED.longest}"]
    items.sort(key=lambda item: "." in item.split("=")[0] and "@" not in item)
    return LLM("tiny", device="cpu", quant=quant, overrides=items)


def requests(llm: LLM) -> list[Asked]:
    """Prompts of text, half of which begin alike, of a sentence and of records that come again, at
    each temperature, each with a seed of its own."""
    text = (ROOT / "minivllm" / "assets" / "tiny" / "heldout.txt").read_text(encoding="utf-8")
    tokens = llm.encode(text[:20_000])
    shared = tokens[:PREFIX_TOKENS]
    prompts = []
    for index in range(PROMPTS):
        own = tokens[500 * (index + 1) :][: 4 + 7 * index]
        prompts.append(shared + own[:40] if index % 2 else own)
    prompts += [llm.encode(one * 4)[: 30 + 20 * i] for one in (SENTENCE, RECORD) for i in (0, 1)]
    return [
        (prompt, SamplingParams(temperature=heat, seed=seed, max_tokens=MOST_TOKENS))
        for seed, (prompt, heat) in enumerate((p, t) for p in prompts for t in TEMPERATURES)
    ]


def generate(llm: LLM, asked: Sequence[Asked]) -> list[list[int]]:
    """The output of each request."""
    results = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    return [result.outputs[0].token_ids for result in results]


def differences(found: Sequence[int], expected: Sequence[int]) -> list[int]:
    """The places at which two outputs differ, those that only one has among them."""
    both = min(len(found), len(expected))
    places = [place for place in range(both) if found[place] != expected[place]]
    return places + list(range(both, max(len(found), len(expected))))


class Comparison:
    """Outputs with drafts against those without.

    Args:
        quant: of the target.
        more: overrides of both.
        rounds: tokens may differ by rounding, so that a request is compared up to the first one
            that does.
    """

    def __init__(self, quant: str, more: Sequence[str] = (), rounds: bool = False) -> None:
        self.quant, self.more, self.rounds = quant, more, rounds
        plain = () if more else ("attention=eager",)
        with load(quant, "batching=sequential", *plain, *more) as llm:
            self.asked = requests(llm)
            self.expected = generate(llm, self.asked)
        self.counts: Counter[str] = Counter()
        self.by: dict[tuple[str, str], Counter[str]] = {}
        self.ratios: list[float] = []  # of gaps to rounding, where outputs differ
        self._judge: Callable[[Asked, list[int], int], float] = Judge() if rounds else _no_judge

    def add(self, choices: Axes, one: Combination, chosen: Sequence[int]) -> None:
        """Serve the chosen requests by a combination, twice."""
        with load(self.quant, *overrides(choices, one), *self.more) as llm:
            for _ in ("cold", "warm"):
                outputs = generate(llm, [self.asked[index] for index in chosen])
                for index, output in zip(chosen, outputs, strict=True):
                    self._compare(one, index, output)
            engine = llm.engine
            assert engine.cache.pool.num_used == 0
            engine.cache.pool.check_integrity([])
            speculation = engine.launcher.speculation
            assert isinstance(speculation, Speculator)
            drafts = speculation.counters
            counts = {
                "combinations": 1,
                "draft_tokens": drafts.num_draft_tokens,
                "accepted_tokens": drafts.num_accepted_tokens,
                "preemptions": engine.scheduler.num_preemptions,
                "prefix_tokens_reused": engine.cache.counters.prefix_tokens_reused,
            }
            for counter in (self.counts, *(self._counter(*choice) for choice in one.items())):
                counter.update(counts)

    def _counter(self, axis: str, choice: str) -> Counter[str]:
        return self.by.setdefault((axis, choice), Counter())

    def _compare(self, one: Combination, index: int, output: list[int]) -> None:
        expected, params = self.expected[index], self.asked[index][1]
        places = differences(output, expected)
        compared = max(len(output), len(expected))
        if self.rounds and places:
            places, compared = places[:1], places[0] + 1
            pair = [output[places[0]], expected[places[0]]]
            prompt = self.asked[index][0] + expected[: places[0]]
            self.ratios.append(self._judge((prompt, params), pair, len(prompt)))
        counts = {"requests": 1, "tokens_compared": compared, "tokens_different": len(places)}
        heat = self._counter("temperature", str(params.temperature))
        for counter in (self.counts, heat, *(self._counter(*choice) for choice in one.items())):
            counter.update(counts)

    def result(self) -> dict[str, Any]:
        """What goes into the record."""
        found: dict[str, Any] = {"quant": self.quant, "overrides": list(self.more)}
        found |= {name: self.counts[name] for name in sorted(self.counts)}
        if self.rounds:
            found["within_rounding"] = sum(ratio <= 2 for ratio in self.ratios)
            found["largest_gap_in_roundings"] = max(self.ratios, default=0.0)
        axes_: dict[str, dict[str, dict[str, int]]] = {}
        for (axis, choice), counter in sorted(self.by.items()):
            axes_.setdefault(axis, {})[choice] = dict(sorted(counter.items()))
        return found | {"by": axes_}


def _no_judge(asked: Asked, pair: list[int], position: int) -> float:
    raise AssertionError("nothing rounds")


class Judge:
    """How many times what rounding does to a logit two tokens' scores differ by."""

    def __init__(self) -> None:
        self._rounded, self._exact = load("bf16"), load("fp32")

    def __call__(self, asked: Asked, pair: list[int], position: int) -> float:
        """The gap between the scores after noise of two tokens at a position, in the largest
        difference between a logit in bfloat16 and in float32.

        Args:
            asked: all tokens before the position, and the request's parameters.
            pair: the tokens.
            position: of them.
        """
        tokens, params = asked
        rounded, exact = (llm.logits(tokens)[-1].double() for llm in (self._rounded, self._exact))
        rounding = float((rounded - exact).abs().max())
        scores = exact[pair]
        if params.temperature > 0:
            seeds, places = torch.tensor([params.seed]), torch.tensor([position])
            noise = exponential_noise(seeds, places, torch.tensor([pair]))[0].double()
            scores = scores - params.temperature * noise.log()
        return float((scores[0] - scores[1]).abs()) / rounding


def compare(comparison: Comparison, choices: Axes, count: int) -> dict[str, Any]:
    """Serve so many combinations, the same ones each time."""
    draw = random.Random(0)
    for one in combinations(choices, count, draw):
        comparison.add(choices, one, draw.sample(range(len(comparison.asked)), MOST_REQUESTS))
    return comparison.result()


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, default=CPU / "speculation_lossless.json")
    parser.add_argument(
        "--combinations", type=int, default=36, help="in float32; a third elsewhere"
    )
    args = parser.parse_args()
    choices = axes(EMBEDDED)
    # An invariant head always multiplies the same shape: no part of it can be taken.
    whole = {name: one for name, one in choices["proposer"].items() if "part" not in name}
    fewer = {**choices, "proposer": whole, "attention": {"invariant": ()}}
    third = max(1, args.combinations // 3)
    result = {
        "what": "tokens with speculation against those without, by combinations of options",
        "float32": compare(Comparison("fp32"), choices, args.combinations),
        "invariant": compare(Comparison("bf16", INVARIANT), fewer, third),
        "bfloat16": compare(Comparison("bf16", rounds=True), choices, third),
    }
    write_figures(args.output, result, command="speculation_lossless.py")
    for name in ("float32", "invariant", "bfloat16"):
        print(f"{name}:")
        for what, value in result[name].items():
            if what != "by":
                print(f"  {what}: {value}")
    if result["float32"]["tokens_different"] or result["invariant"]["tokens_different"]:
        raise SystemExit("speculation has changed tokens")


if __name__ == "__main__":
    sys.exit(exit_code(main))
