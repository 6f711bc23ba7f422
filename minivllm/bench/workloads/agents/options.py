"""The knobs of `workload=agentic`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option

Length = int | dict[str, Any]  # a number of tokens, or a distribution of it


def _uniform(low: int, high: int) -> Any:
    return knob(factory=lambda: {"distribution": "uniform", "min": low, "max": high}, at_least=1)


@option("minivllm.bench.workloads.agents.agentic.Agentic")
@dataclass(frozen=True)
class AgenticOptions(Options):
    """workload=agentic.

    Args:
        path: recorded sessions: a file, or a folder of JSON files; None generates sessions.
        format: weka (AgentX), tensorrt_llm, bailian, mooncake or auto (see `read_sessions`).
        num_sessions: replays of sessions; more than the file has start again with its first. None
            replays each once, or generates 8.
        turns: calls of the main agent in a generated session; a number, or a distribution (see
            `Lengths`).
        system_len: tokens of the system prompt, which generated sessions share.
        input_len: tokens of a task.
        output_len: tokens of an answer.
        result_len: tokens of a tool's result.
        tool_s: mean seconds of a tool call, exponential.
        fan_outs: how many times the main agent starts sub-agents and waits for them, at most once
            between two of its calls.
        subagents: sub-agents of a fan-out.
        subagent_turns: calls of a sub-agent.
        compact_at: tokens of context from which on an agent summarises it; None: never.
        summary_len: tokens of such a summary.
        max_idle_s: longest gap between the starts of a session's requests; longer ones are cut.
        cache_bust: whether each replay has a marker of its own after its system prompt.
        random_starts: so many of the first sessions start at a random instant, with what they have
            said so far in the prefix cache.
        length_scale: factor on the lengths of recorded prompts and answers.
        too_long: what to do with a recorded session that the context cannot hold: error, or skip.
        ignore_eos: go on to the full output length past an end-of-sequence token.
    """

    group = "workload"
    path: str | None = None
    format: Literal["auto", "weka", "tensorrt_llm", "bailian", "mooncake"] = "auto"
    num_sessions: int | None = knob(None, at_least=1)
    turns: Length = knob(8, at_least=1)
    system_len: int = knob(256, at_least=1)
    input_len: Length = _uniform(48, 96)
    output_len: Length = _uniform(16, 48)
    result_len: Length = _uniform(32, 128)
    tool_s: float = knob(0.5, at_least=0)
    fan_outs: int = knob(1, at_least=0)
    subagents: int = knob(2, at_least=1)
    subagent_turns: int = knob(2, at_least=1)
    compact_at: int | None = knob(1024, at_least=1)
    summary_len: int = knob(96, at_least=1)
    max_idle_s: float = knob(10.0, at_least=0)
    cache_bust: bool = True
    random_starts: int = knob(0, at_least=0)
    length_scale: float = knob(1.0, above=0, at_most=16)
    too_long: Literal["error", "skip"] = "error"
    ignore_eos: bool = True
