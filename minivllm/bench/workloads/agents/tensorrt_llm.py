"""Sessions in the form of TensorRT-LLM's execution traces: a JSON object with `events`, which are
messages of conversations, tool calls and parallel branches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.bench.workloads.agents.session import (
    LONGEST_S,
    AgentCall,
    AgentSession,
    in_order,
)
from minivllm.bench.workloads.agents.text import Runs, TextSpace
from minivllm.bench.workloads.from_file.trace_format import LONGEST
from minivllm.bench.workloads.lazy_prompt import joined
from minivllm.errors import BadInput
from minivllm.platform.values import REQUIRED, Values

ROLES = ("system", "user", "assistant", "tool")
COUNTS = ("tokens", "tokenize_count")  # of a message, by versions of the form
UNKNOWN = "events of other types were left out"
DROPS = "events drop a part of the cache, which replays do not"

Branch = tuple[int, ...]
Waits = dict[int, float]  # call -> seconds after its end


@dataclass
class _Conversation:
    """What a conversation's next prompt is made of."""

    segments: list[Runs] = field(default_factory=list)
    system_len: int = 0
    uncounted: bool = False  # a message came whose tokens the file does not tell


@dataclass
class EventReader:
    """Reads one session.

    Args:
        row: the JSON object.
        where: names it in messages.
        text: of this session alone.
        shared: of all sessions, for system prompts that have names.
    """

    row: dict[str, Any]
    where: str
    text: TextSpace
    shared: TextSpace
    calls: list[AgentCall] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    # of each branch that is open, what its next call waits for
    waits: dict[Branch, Waits] = field(default_factory=lambda: {(): {}})
    parallel: list[list[Branch]] = field(default_factory=list)
    conversations: dict[Any, _Conversation] = field(default_factory=dict)

    def read(self) -> AgentSession:
        """The session. Its times are those of the tools: the form has no others.

        Raises:
            BadInput: an event lacks a field that it needs, or branches do not close.
        """
        events = self.row.get("events")
        if not isinstance(events, list) or not events:
            raise BadInput(f"{self.where}: events must be a list of at least one event")
        for number, event in enumerate(events):
            self._event(event, f"{self.where}: events[{number}]")
        if self.parallel:
            raise BadInput(f"{self.where}: a parallel_start has no parallel_end")
        if not self.calls:
            raise BadInput(f"{self.where}: events hold no message of an assistant")
        notes = tuple(f"{count} {words}" for words, count in self.counts.items())
        return AgentSession(self.where, in_order(self.calls), notes)

    def _event(self, event: Any, at: str) -> None:
        if not isinstance(event, dict):
            raise BadInput(f"{at} must be an object")
        kind = event.get("event_type")
        if kind == "parallel_end":
            self._join(at)
            return
        branch = self._branch(event, at)
        if kind == "message":
            self._message(event, branch, at)
        elif kind == "tool_call":
            longest = 1000 * LONGEST_S
            wait_ms = Values(event, at).number(
                "duration_ms", 0.0, least=0.0, high=longest, required=True
            )
            waits = self.waits[branch]
            self.waits[branch] = {
                call: before_s + wait_ms / 1000 for call, before_s in waits.items()
            }
        elif kind == "parallel_start":
            self._fork(event, branch, at)
        else:
            words = DROPS if kind == "drop_kv_cache" else UNKNOWN
            self.counts[words] = self.counts.get(words, 0) + 1

    def _branch(self, event: dict[str, Any], at: str) -> Branch:
        path = event.get("branch_path") or []
        known = isinstance(path, list) and all(type(i) is int for i in path)
        if not known or tuple(path) not in self.waits:
            raise BadInput(f"{at}: branch_path={path!r:.40} is not open here")
        return tuple(path)

    def _fork(self, event: dict[str, Any], branch: Branch, at: str) -> None:
        children = event.get("children") or []
        count = event.get("num_branches") or len(children)
        if type(count) is not int or not 1 <= count < 100_000 or not isinstance(children, list):
            raise BadInput(f"{at}: num_branches={count!r:.40} must be a whole number of branches")
        branches = [(*branch, i) for i in range(count)]
        for child in branches:
            self.waits[child] = dict(self.waits[branch])
        self.parallel.append(branches)
        if children:  # each an event of its branch; no parallel_end follows
            for i, child_event in enumerate(children[:count]):
                if not isinstance(child_event, dict):
                    raise BadInput(f"{at}.children[{i}] must be an object")
                self._event({**child_event, "branch_path": [*branch, i]}, f"{at}.children[{i}]")
            self._join(at)

    def _join(self, at: str) -> None:
        if not self.parallel:
            raise BadInput(f"{at}: a parallel_end has no parallel_start")
        branches = self.parallel.pop()
        waits: Waits = {}
        for branch in branches:
            for call, wait_s in self.waits.pop(branch).items():
                waits[call] = max(waits.get(call, 0.0), wait_s)
        self.waits[branches[0][:-1]] = waits

    def _message(self, event: dict[str, Any], branch: Branch, at: str) -> None:
        role = event.get("role")
        if role not in ROLES:
            raise BadInput(f"{at}: role={role!r:.40} must be one of {', '.join(ROLES)}")
        key = event.get("conversation_id")
        if not isinstance(key, int | str):
            raise BadInput(f"{at}: conversation_id={key!r:.40} must name a conversation")
        talk = self.conversations.setdefault(key, _Conversation())
        if role == "assistant":
            self._assistant(event, talk, branch, at)
            return
        count = next((name for name in COUNTS if event.get(name) is not None), None)
        if count is None:
            talk.uncounted = True
            return
        length = Values(event, at).integer(count, REQUIRED, low=0, high=LONGEST)
        if not length:
            return
        name = event.get("system_prompt_id")
        if role == "system" and isinstance(name, str):
            run = self.shared.named(("system", name, length), length)
            talk.system_len = length
        else:
            run = self.text.fresh(length)
        self._store(talk, event, (run,))

    def _store(self, talk: _Conversation, event: dict[str, Any], segment: Runs) -> None:
        """Put a message where it belongs: at the end, or in the place of an earlier one."""
        index = event.get("message_index")
        if type(index) is int and 0 <= index < len(talk.segments):
            talk.segments[index] = segment
        else:
            talk.segments.append(segment)

    def _assistant(
        self, event: dict[str, Any], talk: _Conversation, branch: Branch, at: str
    ) -> None:
        """A call: its prompt is the conversation so far."""
        values = Values(event, at)
        output_len = values.integer("completion_tokens", REQUIRED, high=LONGEST)
        reasoning = values.integer("reasoning_tokens", 0, low=0, high=LONGEST)
        known = sum(len(run) for segment in talk.segments for run in segment)
        if talk.uncounted or not known:  # by the server's count of the whole prompt
            prompt_len = values.integer("prompt_tokens", REQUIRED, high=LONGEST)
            if prompt_len > known:
                talk.segments.append((self.text.fresh(prompt_len - known),))
            talk.uncounted = False
        runs = joined([run for segment in talk.segments for run in segment])
        waits = sorted(self.waits[branch].items())
        before_s = max((self.calls[i].start_s + wait_s for i, wait_s in waits), default=0.0)
        self.calls.append(
            AgentCall(
                *(runs, output_len, before_s, before_s),
                agent=f"{branch}:{event.get('conversation_id')}",
                after=tuple(i for i, _ in waits),
                waits_s=tuple(wait_s for _, wait_s in waits),
                shared_len=talk.system_len,
            )
        )
        self.waits[branch] = {len(self.calls) - 1: 0.0}
        if (content := output_len - reasoning) > 0:
            self._store(talk, event, (self.text.fresh(content),))


def is_events(row: Any) -> bool:
    """Whether a JSON value looks like a session in this form."""
    return isinstance(row, dict) and "events" in row
