"""Reading a file of prompts: JSON lines or one JSON list, of prompts, OpenAI messages or ShareGPT
conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.tally import Tally
from minivllm.errors import BadInput
from minivllm.models.load import messages as openai
from minivllm.platform import untrusted
from minivllm.platform.given import whole

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
# Names of the output's length, as `_plain` writes them.
LENGTH_KEYS = frozenset(
    (
        *(
            "maxtokens",
            "maxcompletiontokens",
            "maxnewtokens",
            "maxoutputtokens",
            "maxgentokens",
            "maxgentoks",
        ),
        *(
            "outputlen",
            "outputlength",
            "outputtokens",
            "outputtokenscount",
            "numoutputtokens",
            "outputtokencount",
        ),
        *(
            "expectedoutputlen",
            "targetoutputlen",
            "maxoutputlen",
            "npredict",
            "numpredict",
            "completiontokens",
        ),
        *(
            "generatedtokens",
            "responsetokens",
            "genlen",
            "generationlen",
            "generationlength",
            "decodelen",
        ),
    )
)
# Numbers whose names look like a length of the output, though they are none of these, and of the
# input's they are not.
LOOKS_LIKE_LENGTH = re.compile(r"tok|len|predict|output|generat|complet|respons|answer|repl(y|ies)")
OTHER_LENGTH = re.compile(r"prompt|input|context|total|question|histor|block|vocab|penalty|id$")
NAME_LENGTH = 40  # most characters of a file's own names in a note

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
LATER_QUESTIONS = "questions come after the first answer of their conversation and were not asked"
TOOLS = "requests have tools, whose descriptions are not part of the prompt"


@dataclass(frozen=True)
class PromptLine:
    """One request: text or token ids, never both; `where` is the file and line number for messages.

    `answer` is the recorded answer, as in ShareGPT: the output has its length.
    `messages` are what `text` is made of, for a model that has a chat template.
    """

    where: str
    text: str | None
    token_ids: tuple[int, ...] | None
    max_tokens: int | None
    answer: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


def read_prompt_file(
    path: Path, format: str = "auto", tally: Tally | None = None
) -> Iterator[PromptLine]:
    """Parse a file of prompts, an entry at a time.

    Args:
        path: the file.
        format: jsonl (JSON objects, one a line; blank lines are skipped), sharegpt (one JSON list
            of conversations, see `parse_conversation`), or auto, which tells by the first
            character: a list may hold whatever a line may.
        tally: counts the entries and what is not taken from them.

    Raises:
        BadInput: naming the file and, where one is to blame, the line number or the conversation's.
    """
    tally = Tally() if tally is None else tally
    knob = f"workload.path={path}"
    listed = _first_character(path, knob) == b"["
    if format == "sharegpt" or (format == "auto" and listed):
        if not listed:
            raise BadInput(
                f"{path}: a ShareGPT file is one JSON list of conversations, at least one"
            )
        entries = _listed(path, knob, format, tally)
    else:
        entries = (
            parse_line(line, f"{path}:{number}", tally)
            for number, line in enumerate(untrusted.read_lines(path, knob), start=1)
            if (line.removeprefix(untrusted.BYTE_ORDER_MARK) if number == 1 else line).strip()
        )
    for entry in entries:
        tally.read += 1
        if entry is not None:
            yield entry
    if not tally.read:
        raise BadInput(
            f"{path}: a ShareGPT file is one JSON list of conversations, at least one"
            if listed
            else f"workload.path={path} holds no prompts"
        )


def _first_character(path: Path, knob: str) -> bytes:
    """The first byte that is no space; nothing where the file begins with very many of them."""
    with untrusted.open_file(path, knob) as file:
        return file.read(untrusted.CHUNK).removeprefix(untrusted.BYTE_ORDER_MARK).lstrip()[:1]


def _listed(path: Path, knob: str, format: str, tally: Tally) -> Iterator[PromptLine | None]:
    for number, value in enumerate(untrusted.read_list(path, knob), start=1):
        if format == "sharegpt" or not _is_prompt(value):
            yield parse_conversation(value, f"{path}: conversation {number}", tally)
        else:
            yield parse_row(value, f"{path}: entry {number}", tally)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, dict) and any(key in value for key in (*PROMPT_KEYS, "body"))


def parse_line(line: bytes, where: str, tally: Tally | None = None) -> PromptLine | None:
    """One line of the file; None for a conversation that is left out, see `parse_conversation`.

    Raises:
        BadInput: starting with `where`.
    """
    row = untrusted.parse_json(line, f"{where}: the line", "each line must be one JSON object")
    tally = Tally() if tally is None else tally
    if (
        isinstance(row, dict)
        and any(key in row for key in CONVERSATION_KEYS)
        and not _is_prompt(row)
    ):
        return parse_conversation(row, where, tally)
    return parse_row(row, where, tally)


def parse_row(row: Any, where: str, tally: Tally) -> PromptLine:
    """One request as JSON; OpenAI's batch files have it in `body`. A key that is null is as if it
    were not there.

    Raises:
        BadInput: starting with `where`.
    """
    if not isinstance(row, dict):
        raise BadInput(f'{where}: a line must be a JSON object such as {{"prompt": "..."}}')
    present = [key for key in PROMPT_KEYS if row.get(key) is not None]
    if not present and isinstance(row.get("body"), dict):
        row = row["body"]
        present = [key for key in PROMPT_KEYS if row.get(key) is not None]
    if len(present) != 1:
        keys = f"it has {' and '.join(present)}" if present else "it has none of them"
        raise BadInput(f"{where}: a line must have exactly one of {', '.join(PROMPT_KEYS)}; {keys}")
    max_tokens = _max_tokens(row, where, tally)
    if row.get("tools"):
        tally.unused[TOOLS] += 1
    kind, value = present[0], row[present[0]]
    if kind == "prompt" and isinstance(value, list) and value:  # as the completions API takes them
        if isinstance(value[0], int):
            return PromptLine(where, None, _token_ids(value, f"{where}: prompt"), max_tokens)
        kind, value = (
            ("messages", value) if isinstance(value[0], dict) else ("prompt", _single(value, where))
        )
    if kind == "prompt":
        return PromptLine(where, text(value, f"{where}: prompt"), None, max_tokens)
    if kind == "prompt_token_ids":
        return PromptLine(where, None, _token_ids(value, f"{where}: prompt_token_ids"), max_tokens)
    parsed = openai.parse_messages(value, where)
    if not openai.says_something(parsed):
        raise BadInput(
            f"{where}: messages[0].content must be a non-empty string, as no other message has text"
        )
    return PromptLine(where, openai.as_lines(parsed), None, max_tokens, messages=tuple(parsed))


def _single(value: list[Any], where: str) -> Any:
    """The only one of a list of prompts."""
    if len(value) > 1:
        raise BadInput(f"{where}: prompt holds {len(value)} prompts; give each a line of its own")
    return value[0]


def text(value: Any, what: str) -> str:
    """A text that is not empty. Raises BadInput, starting with `what`, for anything else."""
    if not isinstance(value, str) or not value:
        raise BadInput(f"{what} must be a non-empty string")
    return openai.checked(value, what)


def _token_ids(value: Any, what: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not value
        or any(type(token) is not int or token < 0 for token in value)
    ):
        raise BadInput(f"{what} must be a non-empty list of whole numbers, 0 or more")
    return tuple(value)


# ---- the output's length


def _max_tokens(row: dict[str, Any], where: str, tally: Tally) -> int | None:
    """What a line says of its output's length, under whichever of the usual names."""
    given = [key for key in row if _plain(key) in LENGTH_KEYS and row[key] is not None]
    if len(given) > 1:
        raise BadInput(f"{where}: {' and '.join(map(_name, given))} mean the same; give one")
    if not given:
        for name in _lookalikes(row):
            tally.unused[
                f"lines have {name}, which is no known name of the output's length: "
                "workload.output_len is taken; name it max_tokens if it is meant"
            ] += 1
        return None
    value = whole(row[given[0]])
    if type(value) is not int or value < 1:
        raise BadInput(
            f"{where}: {_name(given[0])}={value!r:.60} must be a whole number of at least 1"
        )
    return value


def _lookalikes(row: dict[str, Any]) -> Iterator[str]:
    """Names of numbers that may be meant for the output's length, also those a level below."""
    for key, value in row.items():
        inner = value if isinstance(value, dict) else {}
        for name, number in (
            (key, value),
            *((f"{key}.{below}", item) for below, item in inner.items()),
        ):
            plain = _plain(name.rpartition(".")[2])
            known = plain in LENGTH_KEYS or (
                LOOKS_LIKE_LENGTH.search(plain) and not OTHER_LENGTH.search(plain)
            )
            if known and type(number) in (int, float):
                yield _name(name)


def _plain(key: str) -> str:
    """A key without capitals, underscores and dashes: maxTokens and max_tokens are one."""
    return re.sub(r"[\W_]", "", key).lower()


def _name(key: str) -> str:
    return untrusted.printable(key)[:NAME_LENGTH]


# ---- conversations


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
            f"turns are of {_name(speaker)!r}, who is known neither as user nor as assistant"
        ] += 1
    return "other", words
