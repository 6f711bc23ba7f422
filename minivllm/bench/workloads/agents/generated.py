"""Generated sessions: an agent that calls tools, starts sub-agents and summarises its context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minivllm.bench.workloads.agents.session import AgentCall, AgentSession, in_order
from minivllm.bench.workloads.agents.text import TextSpace
from minivllm.bench.workloads.lazy_prompt import joined
from minivllm.bench.workloads.lengths import Lengths
from minivllm.bench.workloads.options import AgenticOptions

INSTRUCTION_LEN = 16  # tokens that ask an agent for a summary of its context


@dataclass
class _Agent:
    """One agent while its calls are drawn: what its next prompt holds, and what it waits for."""

    name: str
    context: list[range]
    shared_len: int
    time_s: float  # when its next call is due, were answers there at once
    after: tuple[int, ...] = ()
    wait_s: float = 0.0

    @property
    def size(self) -> int:
        """Tokens of its context."""
        return sum(map(len, self.context))


@dataclass
class SessionDraw:
    """One session as it is drawn.

    Args:
        options: lengths and numbers.
        lengths: its distributions by knob.
        rng: of this session.
        shared: texts that all sessions share.
        text: texts of this session alone.
    """

    options: AgenticOptions
    lengths: dict[str, Lengths]
    rng: np.random.Generator
    shared: TextSpace
    text: TextSpace
    calls: list[AgentCall] = field(default_factory=list)

    def draw(self, where: str) -> AgentSession:
        """The whole session."""
        main = self._agent("", 0.0)
        turns = self._length("turns")
        # fan-outs at equal distances, none after the last call
        stops = {round(turns * k / (self.options.fan_outs + 1)) for k in self._fan_outs()}
        for turn in range(1, turns + 1):
            self._make_room(main)
            self._call(main)
            if turn == turns:
                break
            if turn in stops:
                self._fan_out(main, turn)
            else:
                self._use_tool(main)
        return AgentSession(where, in_order(self.calls))

    def _fan_outs(self) -> range:
        return range(1, self.options.fan_outs + 1)

    def _length(self, knob: str) -> int:
        return self.lengths[knob].sample(self.rng, 1)[0]

    def _agent(self, name: str, time_s: float) -> _Agent:
        """An agent with a system prompt, which all agents of its kind share, and a task."""
        kind = "sub-agent" if name else "agent"
        system = self.shared.named(kind, self.options.system_len)
        task = self.text.fresh(self._length("input_len"))
        return _Agent(name, [system, task], len(system), time_s)

    def _call(self, agent: _Agent, output_len: int | None = None) -> int:
        """One call of an agent; its answer is part of the context from then on. Returns its
        length."""
        output_len = self._length("output_len") if output_len is None else output_len
        self.calls.append(
            AgentCall(
                joined(agent.context),
                output_len,
                agent.time_s,
                agent.time_s,
                agent.name,
                agent.after,
                (agent.wait_s,) * len(agent.after),
                agent.shared_len,
            )
        )
        agent.context.append(self.text.fresh(output_len))
        agent.after, agent.wait_s = (len(self.calls) - 1,), 0.0
        return output_len

    def _use_tool(self, agent: _Agent) -> None:
        """A tool runs, and its result comes into the context."""
        agent.wait_s = float(self.rng.exponential(self.options.tool_s))
        agent.time_s += agent.wait_s
        agent.context.append(self.text.fresh(self._length("result_len")))

    def _fan_out(self, main: _Agent, turn: int) -> None:
        """Sub-agents work side by side; the main agent waits for all, and reads their answers."""
        ends, results = [], 0
        for k in range(self.options.subagents):
            agent = self._agent(f"t{turn}.{k}", main.time_s)
            agent.after = main.after
            for sub_turn in range(self.options.subagent_turns):
                if sub_turn:
                    self._use_tool(agent)
                self._make_room(agent)
                answer = self._call(agent)
            results += answer
            ends.append(agent)
        main.after = tuple(agent.after[0] for agent in ends)
        main.time_s = max(agent.time_s for agent in ends)
        main.context.append(self.text.fresh(results))

    def _make_room(self, agent: _Agent) -> None:
        """Where the context is long, ask for a summary, and go on with that alone."""
        limit = self.options.compact_at
        if limit is None or agent.size < limit:
            return
        agent.context.append(self.text.fresh(INSTRUCTION_LEN))
        self._call(agent, self.options.summary_len)
        summary = agent.context[-1]
        agent.context = [agent.context[0], summary]


def generate(
    options: AgenticOptions,
    lengths: dict[str, Lengths],
    count: int,
    generator: Callable[[int], np.random.Generator],
) -> list[AgentSession]:
    """Draw sessions.

    Args:
        options, lengths: see `SessionDraw`.
        count: how many.
        generator: the noise of each session.
    """
    shared = TextSpace(0)
    return [
        SessionDraw(options, lengths, generator(i), shared, TextSpace(i + 1)).draw(f"session {i}")
        for i in range(count)
    ]


def longest_context(options: AgenticOptions, lengths: dict[str, Lengths]) -> tuple[int, int] | None:
    """Most tokens of a generated prompt, and of the answer to it; None where lengths have no
    bound."""
    most = {name: length.longest for name, length in lengths.items()}
    if None in most.values():
        return None
    turns, task, answer, result = (
        most[name] or 0 for name in ("turns", "input_len", "output_len", "result_len")
    )
    results = max(result, options.subagents * answer * bool(options.fan_outs))
    begin = options.system_len + task
    prompt = begin + (turns - 1) * (answer + results)
    if options.fan_outs:
        prompt = max(prompt, begin + (options.subagent_turns - 1) * (answer + result))
    limit = options.compact_at
    if limit is None or prompt < limit:
        return prompt, answer
    # The last context below the limit, or a summary, grown by one turn; and the question for a
    # summary.
    short = max(limit - 1, options.system_len + options.summary_len)
    grown = max(begin, short + answer + results)
    return grown + INSTRUCTION_LEN, max(answer, options.summary_len)
