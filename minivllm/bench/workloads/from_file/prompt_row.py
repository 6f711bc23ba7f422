"""One row of a file of prompts: which of its columns are the prompt, the lengths and the
sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.bench.workloads.from_file import row_lengths
from minivllm.bench.workloads.from_file.tables import Tally, short_name
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.models.load import messages as openai
from minivllm.platform.given import whole

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
# Other usual names of a prompt's text and of its ids, as `plain` writes them.
TEXT_NAMES = frozenset(
    (
        *("instruction", "instructions", "question", "query", "input", "inputtext", "text"),
        *("userprompt", "userinput", "prompttext", "content"),
    )
)
ID_NAMES = frozenset(
    ("inputids", "inputtokenids", "tokenids", "promptids", "prompttokens", "tokens")
)
CHAT_KEYS = ("tools", "tool_choice", "parallel_tool_calls")
IMAGE_PARTS = ("image_url", "input_image")
TOOLS = "requests have tools, whose descriptions are not part of the prompt"
# Fields of SamplingParams that a line may set, under these names, as the completions API does.
SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("stop", "stop_token_ids", "bad_words", "allowed_token_ids"),
)
SAMPLING = "sampling_params"  # where a line may have them all


@dataclass(frozen=True)
class PromptLine:
    """One request: text, token ids or only their number, never two of these.

    `where` is the file and line number, for messages.
    `answer` is the recorded answer, as in ShareGPT: the output has its length.
    `messages` are what `text` is made of, for a model that has a chat template.
    """

    where: str
    text: str | None
    token_ids: tuple[int, ...] | None
    max_tokens: int | None
    answer: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    input_len: int | None = None  # of a prompt that is drawn
    sampling: Mapping[str, Any] | None = None  # fields of SamplingParams
    # what the chat API takes as it stands: messages, and what tools there are
    chat: Mapping[str, Any] | None = None
    images: int = 0  # in the messages
    pictures: tuple[str, ...] = ()  # paths of the prompt's images, as the line has them

    @property
    def ignore_eos(self) -> bool | None:
        """The line's own `ignore_eos`; None where it has none."""
        return None if self.sampling is None else self.sampling.get("ignore_eos")


def mapped(row: Any, columns: Mapping[str, str], where: str) -> Any:
    """A row in which the columns that `workload.columns` names have the names known here, and no
    other column stands for the same.

    Raises:
        BadInput: starting with `where`: a column is missing.
    """
    if not columns or not isinstance(row, dict):
        return row
    for known, name in columns.items():
        if name not in row:
            there = ", ".join(map(short_name, list(row)[:12])) or "nothing"
            raise BadInput(
                f"{where}: there is no {short_name(name)}, which workload.columns.{known} names; "
                f"it has {there}"
            )
    taken = {name: value for name, value in row.items() if name not in columns.values()}
    if any(known in (*PROMPT_KEYS, "conversations") for known in columns):
        for key in (*PROMPT_KEYS, "conversations", "conversation", "body"):
            taken.pop(key, None)
    if "output_len" in columns:
        taken = {k: v for k, v in taken.items() if row_lengths.plain(k) not in row_lengths.OUTPUT}
    if "input_len" in columns:
        taken = {k: v for k, v in taken.items() if row_lengths.plain(k) not in row_lengths.INPUT}
    return {**taken, **{known: row[name] for known, name in columns.items()}}


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
    if not present and (key := _by_another_name(row, where)) is not None:
        row = {**row, key[1]: row[key[0]]}
        present = [key[1]]
    max_tokens = row_lengths.output_len(row, where, tally)
    sampling = _sampling(row, where)
    if not present and (length := row_lengths.input_len(row, where)) is not None:
        return PromptLine(where, None, None, max_tokens, input_len=length, sampling=sampling)
    if len(present) != 1:
        keys = f"it has {' and '.join(present)}" if present else "it has none of them"
        raise BadInput(
            f"{where}: a line must have exactly one of {', '.join(PROMPT_KEYS)}; {keys} "
            "(workload.columns says which of its columns is one)"
        )
    kind, value = present[0], row[present[0]]
    if kind == "prompt" and isinstance(value, list) and value:  # as the completions API takes them
        if isinstance(value[0], int):
            kind = "prompt_token_ids"
        elif isinstance(value[0], dict):
            kind = "messages"
        else:
            value = _single(value, where)
    pictures = _pictures(row.get("images"), where)
    if kind == "prompt":
        words = text(value, f"{where}: prompt")
        return PromptLine(where, words, None, max_tokens, sampling=sampling, pictures=pictures)
    if kind == "prompt_token_ids":
        ids = _token_ids(value, f"{where}: {present[0]}")
        return PromptLine(where, None, ids, max_tokens, sampling=sampling, pictures=pictures)
    return _messages(row, value, where, max_tokens, sampling, tally)


def _by_another_name(row: dict[str, Any], where: str) -> tuple[str, str] | None:
    """The column that is a prompt under another usual name, and which kind of prompt it is; None
    where there is none.

    Raises:
        BadInput: there are several, starting with `where`.
    """
    found = [
        (key, "prompt" if isinstance(value, str) else "prompt_token_ids")
        for key, value in row.items()
        if (isinstance(value, str) and value and row_lengths.plain(key) in TEXT_NAMES)
        or (isinstance(value, list) and row_lengths.plain(key) in ID_NAMES)
    ]
    if len(found) > 1:
        names = [short_name(key) for key, _ in found]
        raise BadInput(
            f"{where}: {' and '.join(names)} may be the prompt; say which one, such as "
            f"workload.columns={{{found[0][1]}: {names[0]}}}"
        )
    return found[0] if found else None


def _messages(
    row: dict[str, Any],
    value: Any,
    where: str,
    max_tokens: int | None,
    sampling: Mapping[str, Any] | None,
    tally: Tally,
) -> PromptLine:
    """A request of the chat API."""
    if row.get("tools"):
        tally.unused[TOOLS] += 1
    texts, images = _without_images(value, where)
    parsed = openai.parse_messages(texts, where)
    if not openai.says_something(parsed) and not images:
        raise BadInput(
            f"{where}: messages[0].content must be a non-empty string, as no other message has text"
        )
    chat = {"messages": value, **{k: row[k] for k in CHAT_KEYS if row.get(k) is not None}}
    return PromptLine(
        where,
        openai.as_lines(parsed),
        None,
        max_tokens,
        messages=tuple(parsed),
        sampling=sampling,
        chat=chat,
        images=images,
    )


def _without_images(value: Any, where: str) -> tuple[Any, int]:
    """Messages without the images in their contents, and how many these are.

    Raises:
        BadInput: an image is no data: URI, starting with `where`.
    """
    if not isinstance(value, list):
        return value, 0
    texts, count = [], 0
    for i, message in enumerate(value):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            images = [p for p in content if isinstance(p, dict) and p.get("type") in IMAGE_PARTS]
            for part in images:
                _check_image(part, f"{where}: messages[{i}]")
            count += len(images)
            message = {**message, "content": [p for p in content if p not in images]}
        texts.append(message)
    return texts, count


def _check_image(part: dict[str, Any], where: str) -> None:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise BadInput(
            f"{where}: an image must be a data: URI, such as data:image/png;base64,...; one that "
            "a server fetches would be measured with the network"
        )


def _pictures(value: Any, where: str) -> tuple[str, ...]:
    """The paths of a line's `images`. What is no list of texts was meant for something else."""
    if not isinstance(value, list) or not all(isinstance(path, str) for path in value):
        return ()
    if not all(value):
        raise BadInput(f"{where}: images has an empty path")
    return tuple(value)


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


def _sampling(row: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Fields of SamplingParams that a line sets, checked; None where it sets none.

    Raises:
        BadInput: starting with `where`: a value is none of that field, a line sets a field twice,
            or it asks for several completions.
    """
    nested = row.get(SAMPLING)
    nested = nested if isinstance(nested, dict) else {}
    outer, inner = (
        {name: whole(part[name]) for name in SAMPLING_FIELDS if part.get(name) is not None}
        for part in (row, nested)
    )
    if twice := sorted(outer.keys() & inner.keys()):
        raise BadInput(f"{where}: {twice[0]} stands beside {SAMPLING} and in it; give one")
    count = row.get("n", nested.get("n"))
    if count not in (None, 1):
        raise BadInput(f"{where}: n={count!r:.20}: a measurement takes one completion a request")
    given = {**outer, **inner}
    if not given:
        return None
    if not isinstance(given.get("ignore_eos", False), bool):
        raise BadInput(f"{where}: ignore_eos={given['ignore_eos']!r:.20} must be true or false")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        SamplingParams(max_tokens=None, **given)
    except BadInput as error:
        raise BadInput(f"{where}: {str(error).replace('decoding.', '')}") from None
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: its sampling cannot be read ({error})") from None
    return given
