"""Requests that come and go at any time, and the engine's cache checked after every step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.engine.engine import Engine
from minivllm.engine.request import Request, RequestState

STOPS = tuple(range(2, 14))  # with a high temperature most requests end before their length
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=14, temperature=2.0, stop_token_ids=STOPS)
KINDS = [
    GREEDY,
    SamplingParams(max_tokens=1),
    DRAWN,
    replace(DRAWN, max_tokens=20, top_p=0.9),
    replace(DRAWN, min_tokens=4),
    replace(DRAWN, repetition_penalty=1.4),
    replace(DRAWN, logprobs=1),
    replace(DRAWN, n=2),
    replace(DRAWN, prompt_logprobs=1, max_tokens=4),
    SamplingParams(max_tokens=6, beam_width=2),
    replace(DRAWN, token_mask=lambda _, output: range(len(output), 120)),
]


@dataclass(frozen=True)
class Asked:
    """A request, the step before which it comes, and the number of tokens after which it is
    aborted, if it is."""

    prompt: list[int]
    params: SamplingParams
    comes: int = 0
    aborted: int | None = None


def check(engine: Engine) -> None:
    requests = [*engine.scheduler.running, *engine.scheduler.waiting]
    engine.cache.pool.check_integrity(request.cache.block_table for request in requests)
    for request in requests:
        assert all(token >= 0 for token in request.token_ids[:-1])
    if engine.cache.prefix is not None:
        for node in engine.cache.prefix.by_block.values():
            assert all(token >= 0 for token in node.tokens)  # type: ignore[attr-defined]


def serve(engine: Engine, asked: list[Asked]) -> list[list[tuple[list[int], str | None]]]:
    """Tokens and finish reason of each sample of each request, with the cache checked after every
    step."""
    made: list[list[Request]] = [[] for _ in asked]
    got: dict[Request, tuple[list[int], list[str | None]]] = {}
    step = 0
    while engine.has_unfinished or not all(made):
        for index, one in enumerate(asked):
            if one.comes <= step and not made[index]:
                # Noise goes by the seed, which must not depend on the order of coming.
                params = replace(one.params, seed=index)
                first = engine.add_request(f"{index}", one.prompt, params, detokenize=False)
                made[index] = [first] if first.is_joint else [first, *first.unstarted]
                got.update((request, ([], [])) for request in made[index])
        for output in engine.step():
            tokens, reasons = got[output.request]
            if output.token_id is not None:
                tokens.append(output.token_id)
            reasons.append(output.finish_reason)
        check(engine)
        for one, requests in zip(asked, made, strict=True):
            for request in requests:
                if one.aborted is not None and len(got[request][0]) >= one.aborted:
                    engine.abort(request.request_id)
                    check(engine)
        step += 1
    for requests in made:
        for request in requests:
            assert request.state is RequestState.DONE
            assert all(token >= 0 for token in request.token_ids), "a placeholder is left over"
    assert engine.cache.pool.num_used == 0
    return [
        [
            (got[request][0], got[request][1][-1] if got[request][1] else None)
            for request in requests
        ]
        for requests in made
    ]


@st.composite
def traffic(draw: st.DrawFn) -> list[Asked]:
    shared = draw(st.lists(st.integers(2, 120), min_size=9, max_size=9))
    asked = []
    for _ in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(2, 120), min_size=1, max_size=12))
        prompt = shared[: draw(st.sampled_from([0, 0, 8, 9]))] + own
        params = draw(st.sampled_from(KINDS))
        aborted = (
            None
            if params.n + params.beam_width > 2
            else draw(st.sampled_from([None, None, 0, 1, 3]))
        )
        asked.append(Asked(prompt, params, draw(st.integers(0, 6)), aborted))
    return asked
