"""Conversations of ShareGPT files: their first question, and what it was answered."""

from __future__ import annotations

from typing import Any

from minivllm.bench.workloads.from_file.prompt_row import PromptLine
from minivllm.bench.workloads.from_file.tables import Tally, short_name
from minivllm.errors import BadInput
from minivllm.models.load import messages as openai

USERS = frozenset(("human", "user", "prompter", "question"))
ASSISTANTS = frozenset(
    ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "ai", "bot", "claude", "answer")
)
OTHERS = frozenset(("system", "developer", "tool", "function", "function_call", "observation"))
CONVERSATION_KEYS = ("conversations", "conversation")
NO_QUESTION = "conversations were left out, no user asks anything in them"
NO_ANSWER = "conversations were left out, no answer follows their first question"
BLANK_TURNS = "turns of conversations were blank and passed over"
JOINED_TURNS = "questions are of several turns of the user in a row, joined by line breaks"
LATER_QUESTIONS = "questions come after the first answer of their conversation and were not sent"


def parse_conversation(
    conversation: Any, where: str, tally: Tally | None = None
) -> PromptLine | None:
    """One conversation of a ShareGPT file: the first question of its user, and what that was
    answered.

    Turns have `from` and `value`, or `role` and `content`; speakers are known in any case of
    letters. Blank turns are passed over. Where the user speaks several times before an answer, all
    of it is the question. Later questions are counted.

    Returns:
        The request; None without a question or an answer, which `tally` counts.

    Raises:
        BadInput: starting with `where`.
    """
    tally = Tally() if tally is None else tally
    turns = None
    if isinstance(conversation, dict):
        turns = next((conversation[key] for key in CONVERSATION_KEYS if key in conversation), None)
    if not isinstance(turns, list):
        raise BadInput(f'{where}: must be a JSON object with "conversations", a list')
    parsed = [_turn(turn, f"{where}: conversations[{i}]", tally) for i, turn in enumerate(turns)]
    # An answer that is blank stays: the question has none.
    spoken = [(who, words) for who, words in parsed if words.strip() or who == "assistant"]
    begin = next((i for i, (who, _) in enumerate(spoken) if who == "user"), None)
    if begin is None:
        tally.left_out[NO_QUESTION] += 1
        return None
    end = next((i for i in range(begin, len(spoken)) if spoken[i][0] != "user"), len(spoken))
    who, answer = spoken[end] if end < len(spoken) else ("", "")
    if who != "assistant" or not answer.strip():
        tally.left_out[NO_ANSWER] += 1
        return None
    tally.unused[BLANK_TURNS] += len(parsed) - len(spoken)
    tally.unused[JOINED_TURNS] += end - begin > 1
    tally.unused[LATER_QUESTIONS] += sum(who == "user" for who, _ in spoken[end:])
    question = "\n".join(words for _, words in spoken[begin:end])
    return PromptLine(where, question, None, None, answer)


def _turn(turn: Any, where: str, tally: Tally) -> tuple[str, str]:
    """Who speaks (user, assistant, or another), and what; blank where it is null."""
    row = turn if isinstance(turn, dict) else {}
    speaker = next((row[key] for key in ("from", "role") if isinstance(row.get(key), str)), None)
    words = next((row[key] for key in ("value", "content") if row.get(key) is not None), None)
    if words is None and ("value" in row or "content" in row):
        words = ""
    if speaker is None or not isinstance(words, str):
        raise BadInput(f'{where} must be an object with "from" and "value", both text')
    name = speaker.strip().casefold()
    openai.checked(words, f"{where}: its text")
    if name in USERS or name in ASSISTANTS:
        return "user" if name in USERS else "assistant", words
    if name not in OTHERS:
        tally.unused[
            f"turns are of {short_name(speaker)!r}, who is known neither as user nor as assistant"
        ] += 1
    return "other", words
