"""Requests whose prompt one engine computes and whose answer another continues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.engine.options import StructuredOutputs
from minivllm.errors import Crashed
from minivllm.parallel.handover import Content, Handover, Stored
from minivllm.platform.processes.heartbeat import Progress
from minivllm.processes.messages import Abort, Piece, Prefix, Step, Submit
from minivllm.serving.processes.engine_process import EngineLoop

KNOBS = ["quant=fp32", "runtime.threads=1", "cache.num_blocks=64", "cache.block_size=4"]
KNOBS += ["cache.prefix_caching=true", "runtime.overlap=false"]
PROMPT = "def parse_line(text):\n    "


class Sent:
    """Stands in for the channel to the process of HTTP."""

    closed = False

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


class Loop:
    """An engine's loop whose steps the test makes."""

    def __init__(self, llm: LLM) -> None:
        self.channel = Sent()
        self.loop = EngineLoop(llm.engine, self.channel)  # type: ignore[arg-type]
        self.engine = llm.engine

    def seed_of(self, message: Submit) -> int:
        """The seed that a request gets here."""
        self.loop._handle(message)
        while self.loop._compiler.waiting:
            self.loop._take_compiled()
        (member,) = self.loop._members[message.request_id]
        self.loop._handle(Abort(message.request_id))
        return member.seed

    def serve(self, message: Submit) -> tuple[list[Piece], list[Prefix], list[str]]:
        """What a request gives: pieces, a handover, and who has begun."""
        self.channel.messages.clear()
        self.loop._handle(message)
        while self.loop._compiler.waiting:
            self.loop._take_compiled()
        while self.engine.has_unfinished:
            self.loop._step()
        steps = [one for one in self.channel.messages if isinstance(one, Step)]
        handed = [one for one in self.channel.messages if isinstance(one, Prefix)]
        begun = [request_id for step in steps for request_id, _ in step.begun]
        return [piece for step in steps for piece in step.pieces], handed, begun


def continued(
    request_id: str, ids: list[int], params: SamplingParams, begun: list[Piece], content: Content
) -> Submit:
    """What another engine is sent of a request that has begun."""
    tokens = [one.token_id for one in begun if one.token_id is not None]
    return Submit(request_id, ids, params, prefix=content, output_token_ids=tokens)


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    with LLM("tiny", overrides=KNOBS) as first, LLM("tiny", overrides=KNOBS) as second:
        yield first, second


CASES = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=7),
    "penalties": SamplingParams(
        max_tokens=24, ignore_eos=True, presence_penalty=1.5, frequency_penalty=0.5
    ),
    "least": SamplingParams(max_tokens=24, min_tokens=9),
    "logprobs": SamplingParams(max_tokens=9, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    "grammar": SamplingParams(
        max_tokens=24, structured_outputs=StructuredOutputs(regex="[a-z]{9}")
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_the_same_where_another_engine_continues(
    case: str, llms: tuple[LLM, LLM], tmp_path: Path
) -> None:
    params = CASES[case]
    tokenizer = llms[0].tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT)
    one, other = map(Loop, llms)
    whole, none, begun = other.serve(Submit("whole", ids, params))
    assert not none and begun == ["whole"] and whole[-1].finish_reason
    for llm in llms:
        llm.engine.cache.reset_prefix_cache()
    how = Handover(str(tmp_path) if case == "sampled" else None)
    first, (handed,), begun = one.serve(Submit("r", ids, params, hands_over=how))
    assert isinstance(handed.content, Stored) == bool(how.folder) == bool(list(tmp_path.iterdir()))
    assert begun == ["r"] and len(first) == 1 and first[0].finish_reason is None
    assert not one.engine.has_unfinished
    params = replace(params, prompt_logprobs=None)
    rest, none, begun = other.serve(continued("r", ids, params, first, handed.content))
    assert not none and not begun and not list(tmp_path.iterdir())
    assert rest[0].num_cached_tokens == len(ids) // 4 * 4
    for both, alone in zip([*first, *rest], whole, strict=True):
        same = (both.token_id, both.text, both.num_output, both.finish_reason, both.stop_reason)
        assert same == (
            *(alone.token_id, alone.text, alone.num_output, alone.finish_reason),
            alone.stop_reason,
        )
        assert both.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert first[0].prompt_logprobs == whole[0].prompt_logprobs


MORE_CASES = {
    **CASES,
    "stop": SamplingParams(max_tokens=24, ignore_eos=True, stop=("e",)),
    "bad words": SamplingParams(max_tokens=24, ignore_eos=True, bad_words=("return",)),
}


@pytest.mark.parametrize("case", MORE_CASES)
def test_an_answer_that_has_begun_goes_on_elsewhere_as_if_nothing_had_happened(
    case: str, llms: tuple[LLM, LLM]
) -> None:
    params, ids = MORE_CASES[case], [5, 6, 7, 8, 9, 10, 11]
    one, other = map(Loop, llms)
    whole, _, _ = one.serve(Submit("whole", ids, params))
    seed = one.seed_of(Submit("seed", ids, params))
    for seen in sorted({1, len(whole) // 2, len(whole) - 1} - {0}):
        tokens = [piece.token_id for piece in whole[:seen] if piece.token_id is not None]
        sent = replace(params, prompt_logprobs=None, seed=seed)
        rest, none, begun = other.serve(Submit("r", ids, sent, output_token_ids=tokens))
        assert not none and not begun and len(rest) == len(whole) - seen
        for new, old in zip(rest, whole[seen:], strict=True):
            assert new._replace(request_id="", logprobs=None, num_cached_tokens=0) == old._replace(
                request_id="", logprobs=None, num_cached_tokens=0
            )
            assert new.logprobs == pytest.approx(old.logprobs, abs=1e-4)


def test_a_stop_string_may_begin_in_the_first_token(llms: tuple[LLM, LLM]) -> None:
    one, other = map(Loop, llms)
    ids = [5, 6, 7, 8, 9]
    plain, _, _ = one.serve(Submit("plain", ids, CASES["greedy"]))
    text = "".join(piece.text for piece in plain)
    stopping = SamplingParams(max_tokens=24, ignore_eos=True, stop=(text[:6],))
    first, (handed,), _ = one.serve(Submit("r", ids, stopping, hands_over=Handover()))
    assert first[0].text == ""  # it may be the beginning of the stop string
    rest, _, _ = other.serve(continued("r", ids, stopping, first, handed.content))
    assert rest[-1].finish_reason == "stop" and "".join(piece.text for piece in rest) == ""


def test_what_ends_with_its_first_token_is_not_handed_over(llms: tuple[LLM, LLM]) -> None:
    loop = Loop(llms[0])
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    (only,), none, _ = loop.serve(Submit("r", [5, 6, 7], params, hands_over=Handover()))
    assert only.finish_reason == "length" and not none
    gone = Submit("gone", [5, 6, 7], CASES["greedy"], hands_over=Handover())
    loop.loop._handle(gone)
    loop.loop._handle(Abort("gone"))
    assert not loop.engine.has_unfinished and not loop.loop._handing_over


def test_a_handover_that_fails_ends_its_request_alone(
    llms: tuple[LLM, LLM], tmp_path: Path
) -> None:
    one, other = map(Loop, llms)
    ids, params = list(range(5, 14)), CASES["greedy"]
    for llm in llms:
        llm.engine.cache.reset_prefix_cache()
    lost = Handover(str(tmp_path / "gone"))
    (first, last), none, _ = one.serve(Submit("lost", ids, params, hands_over=lost))
    assert first.finish_reason is None and last.finish_reason == "error" and not none
    assert not last.bad_input and "cannot be written to" in str(last.error)
    how = Handover(str(tmp_path))
    begun, (handed,), _ = one.serve(Submit("r", ids, params, hands_over=how))
    assert isinstance(handed.content, Stored)
    Path(handed.content.path).unlink()
    for content, words in ((handed.content, "cannot be read"), (b"keys", "the replicas differ")):
        wrong = continued("r", ids, params, begun, content)
        (only,), none, _ = other.serve(wrong)
        assert only.finish_reason == "error" and not only.bad_input and not none
        assert words in str(only.error) and not other.engine.has_unfinished
    whole, _, _ = other.serve(Submit("r", ids, params))
    assert whole[-1].finish_reason == "length"


def test_an_engine_without_a_rank_ends_whether_it_runs_or_idles(
    llms: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are told nothing: another replica computes them."""

    class Team:
        def require_all(self) -> None:
            raise Crashed("rank 1 has not answered for 8 s")

    one = Loop(llms[0])
    one.loop._team = Team()  # type: ignore[assignment]
    with pytest.raises(Crashed, match="rank 1"):
        one.loop.run()
    one.loop._handle(Submit("r", [5, 6, 7], SamplingParams()))
    monkeypatch.setattr(one.engine, "step", lambda patience_s: Team().require_all())
    with pytest.raises(Crashed, match="rank 1"):
        one.loop._step()
    assert not one.channel.messages
    one.engine.abort_all()


def test_the_loop_tells_steps_from_waits(
    llms: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, waits, works = Progress(), list[int | None](), list[int | None]()

    class Waits(Sent):
        def receive(self, timeout: float) -> list[Any]:
            waits.append(progress.step)
            self.closed = len(waits) == 3
            return [Abort("nobody")]

    loop = EngineLoop(llms[0].engine, Waits(), progress)  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "_handle", lambda _: works.append(progress.step))
    loop.run()
    assert waits == [None] * 3 and works == [1, 2, 3] and progress.step is None
