"""Generated sessions: prompts that grow, sub-agents that are waited for, and compaction."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.workloads.agents.agentic import Agentic
from minivllm.bench.workloads.agents.generated import INSTRUCTION_LEN, generate, longest_context
from minivllm.bench.workloads.agents.session import AgentCall, AgentSession


def drawn(count: int = 1, seed: int = 0, **knobs: Any) -> list[AgentSession]:
    options = Agentic(**knobs)
    return generate(options, options.lengths, count, lambda i: np.random.default_rng([seed, i]))


def text(call: AgentCall) -> list[int]:
    return list(chain.from_iterable(call.runs))


PLAIN = {"system_len": 30, "input_len": 10, "output_len": 5, "result_len": 20, "tool_s": 2.0}


def test_each_prompt_goes_on_with_the_one_before() -> None:
    (session,) = drawn(turns=4, fan_outs=0, compact_at=None, **PLAIN)
    assert [call.prompt_len for call in session.calls] == [40, 65, 90, 115]
    for before, after in zip(session.calls, session.calls[1:], strict=False):
        assert text(after)[: before.prompt_len] == text(before)
    assert [call.after for call in session.calls] == [(), (0,), (1,), (2,)]
    assert all(call.waits_s and call.waits_s[0] > 0 for call in session.calls[1:])


def test_tools_take_their_mean_time() -> None:
    calls = [c for s in drawn(50, turns=20, fan_outs=0, **PLAIN) for c in s.calls if c.waits_s]
    waits = [call.waits_s[0] for call in calls if call.waits_s and call.waits_s[0]]
    assert np.mean(waits) == pytest.approx(2.0, rel=0.1)


def test_sub_agents_start_together_and_are_waited_for() -> None:
    (session,) = drawn(turns=4, subagents=3, subagent_turns=2, compact_at=None, **PLAIN)
    main = [i for i, call in enumerate(session.calls) if not call.agent]
    agents = sorted({call.agent for call in session.calls} - {""})
    assert len(main) == 4 and agents == ["t2.0", "t2.1", "t2.2"]
    firsts, lasts = [], []
    for agent in agents:
        first, last = (i for i, call in enumerate(session.calls) if call.agent == agent)
        assert session.calls[first].after == (main[1],) and session.calls[last].after == (first,)
        firsts.append(session.calls[first])
        lasts.append(last)
    assert sorted(session.calls[main[2]].after) == sorted(lasts)
    # their system prompt is shared, and not the main agent's
    assert len({tuple(text(call)[:30]) for call in firsts}) == 1
    assert text(firsts[0])[0] != text(session.calls[0])[0]
    # three answers of five tokens come into the context beside the main agent's own
    assert session.calls[main[2]].prompt_len == session.calls[main[1]].prompt_len + 5 + 15


def test_a_long_context_is_summarised() -> None:
    (session,) = drawn(turns=6, fan_outs=0, compact_at=80, summary_len=12, **PLAIN)
    lengths = [(call.prompt_len, call.output_len) for call in session.calls]
    # 40, 65; then 90 tokens are too many: they and the question are one call, and 42 are left
    assert lengths[:4] == [(40, 5), (65, 5), (90 + INSTRUCTION_LEN, 12), (42, 5)]
    summary, after = session.calls[2], session.calls[3]
    assert text(summary)[:90][:65] == text(session.calls[1])
    assert text(after)[:30] == text(summary)[:30]
    assert not set(text(after)[30:]) & set(text(summary))
    assert len(session.calls) == 6 + sum(output == 12 for _, output in lengths)


def test_sessions_share_their_system_prompt_alone() -> None:
    one, two = drawn(2, fan_outs=0, **PLAIN)
    assert text(one.calls[0])[:30] == text(two.calls[0])[:30]
    assert not set(text(one.calls[-1])[30:]) & set(text(two.calls[-1])[30:])
    assert one.calls[0].shared_len == 30
    assert drawn(2, **PLAIN) == drawn(2, **PLAIN) != drawn(2, seed=1, **PLAIN)


@given(
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 400)),
)
def test_no_call_is_longer_than_was_said(
    fan_outs: int, turns: int, subagents: int, subagent_turns: int, compact_at: int | None
) -> None:
    knobs = dict(
        fan_outs=fan_outs,
        turns=turns,
        subagents=subagents,
        subagent_turns=subagent_turns,
        compact_at=compact_at,
        summary_len=40,
    )
    options = Agentic(**knobs)  # type: ignore[arg-type]
    longest = longest_context(options, options.lengths)
    assert longest is not None
    for session in drawn(3, **knobs):
        for index, call in enumerate(session.calls):
            assert call.prompt_len <= longest[0] and call.output_len <= longest[1]
            assert all(before < index for before in call.after)


def test_lengths_without_a_bound_are_checked_as_they_are_drawn() -> None:
    options = Agentic(result_len={"distribution": "lognormal", "mean": 50, "std": 40})
    assert longest_context(options, options.lengths) is None
