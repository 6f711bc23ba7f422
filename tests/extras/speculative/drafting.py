"""Small engines that draft, and drafts that a test foresees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from minivllm import LLM
from minivllm.engine.engine import Engine
from minivllm.engine.request import Request
from minivllm.extras.speculative.options import SpeculativeOptions
from minivllm.extras.speculative.proposer import Proposer
from minivllm.extras.speculative.speculation import Speculator, speculate
from minivllm.extras.speculative.verification import Verifier
from tests.engine.traffic import Asked, serve
from tests.scripts.load import load_script

LONGEST = 96
script = load_script("speculation_lossless")
# Each option that drafts, in the first of its ways, for models of four layers.
PROPOSERS = {
    name: next(iter(ways.values()))
    for name, ways in script.proposers(script.Sizes(4, LONGEST, 2, ())).items()
}
Served = list[list[tuple[list[int], str | None]]]


def load(folder: Path, *overrides: str, quant: str = "fp32") -> LLM:
    """A model of small blocks in one thread, with options before knobs."""
    common = [f"model.max_model_len={LONGEST}", "runtime.threads=1"]
    if not any(item.startswith("cache=") for item in overrides):
        common.append("cache.block_size=4")
    items = [*common, *overrides]
    items.sort(key=lambda item: "." in item.split("=")[0] and "@" not in item)
    return LLM(str(folder), device="cpu", quant=quant, overrides=items)


class Scripted(Proposer):
    """Drafts what a function of the request says.

    Args:
        draft: from a request to tokens, of which the first `most` are taken.
        knobs: of SpeculativeOptions; every draft is as long as it may be.
    """

    name = "scripted"

    def __init__(self, draft: Callable[[Request], Sequence[int]], **knobs: Any) -> None:
        self.draft = draft
        self.options = SpeculativeOptions(**{"adaptive": False, **knobs})
        self.ended: list[Request] = []

    def propose(self, request: Request, most: int) -> list[int]:
        return list(self.draft(request))[:most]

    def finished(self, request: Request) -> None:
        """Remember it."""
        self.ended.append(request)


def foreseen(
    texts: Sequence[Sequence[int]], wrong_every: int = 0, after: int = 9
) -> Callable[[Request], list[int]]:
    """Drafts that are right but for the tokens at each `wrong_every`-th position.

    Args:
        texts: prompts with their outputs; none begins with the other.
        wrong_every: 0: all are right.
        after: what is drafted after the end of a text.
    """

    def draft(request: Request) -> list[int]:
        known = request.token_ids
        text = next((text for text in texts if list(text[: len(known)]) == known), known)
        tokens = [*text[len(known) :], *[after] * 9]
        return [
            token ^ 1 if wrong_every and (len(known) + index) % wrong_every == 0 else token
            for index, token in enumerate(tokens)
        ]

    return draft


def speculator(engine: Engine) -> Speculator:
    """What drafts in an engine."""
    found = engine.launcher.speculation
    assert isinstance(found, Speculator)
    return found


def draft_with(engine: Engine, proposer: Proposer, verifier: Verifier | None = None) -> Speculator:
    """Let an engine that has no drafts have some."""
    proposer.attach(engine, attention=None)  # type: ignore[arg-type]
    made = speculate(engine, proposer)
    if verifier is not None:
        made.verifier, made.needs_logits = verifier, verifier.needs_logits
    return made


def leaves_nothing(engine: Engine) -> None:
    """Assert that no block and nothing of a finished request is left."""
    found = speculator(engine)
    assert engine.cache.pool.num_used == 0
    engine.cache.pool.check_integrity([])
    kept = {**vars(found), **vars(found.lengths), **vars(found.proposer)}
    kept.pop("ended", None)  # Scripted's own
    for name, value in kept.items():
        held = list(value) if isinstance(value, (dict, list)) else []
        held = [getattr(one, "request", one) for one in held]
        assert not any(isinstance(one, Request) for one in held), f"{name} keeps a request"


_expected: WeakKeyDictionary[Engine, list[tuple[list[Asked], Served]]] = WeakKeyDictionary()


def plainly(engine: Engine, asked: list[Asked]) -> Served:
    """What an engine without drafts serves. What it was asked before is not computed again, but
    where its cache then has prefixes, which may have been rounded."""
    known = _expected.setdefault(engine, [])
    for before, served in known:
        if before == asked and not engine.cache.layout.prefix_caching:
            return served
    known.append(([*asked], serve(engine, asked)))
    return known[-1][1]


def same(engine: Engine, plain: Engine, asked: list[Asked]) -> Served:
    """Assert that an engine serves as one without drafts does; what it serves. Of an aborted
    request, whose end may come a step earlier or later, the common tokens are compared."""
    expected, found = plainly(plain, asked), serve(engine, asked)
    for one, theirs, ours in zip(asked, expected, found, strict=True):
        if one.aborted is None:
            assert ours == theirs, one
            continue
        for (tokens, _), (others, _) in zip(ours, theirs, strict=True):
            shorter = min(len(tokens), len(others))
            assert tokens[:shorter] == others[:shorter], one
    leaves_nothing(engine)
    return found
