"""Bodies of Anthropic's Messages, and the blocks of their contents."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from minivllm.serving.errors import ApiError
from minivllm.serving.http.calls import ignore
from minivllm.serving.http.first_error import FirstErrorModel
from minivllm.serving.openai.forms import MOST_WORDS, Body

LEAST_BUDGET = 1024  # tokens of thinking, as Anthropic's
T = TypeVar("T", bound=BaseModel)


class Strict(FirstErrorModel):
    """A part of a body, without unknown fields.

    Attributes:
        IGNORED: as of a Body.
    """

    model_config = ConfigDict(extra="forbid")
    IGNORED: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, given: Any) -> Any:
        """What is given without the fields that are ignored."""
        if not isinstance(given, dict) or cls.IGNORED.isdisjoint(given):
            return given
        for name in cls.IGNORED & given.keys():
            if given[name]:
                ignore(f"{cls.__name__}.{name}")
        return {name: value for name, value in given.items() if name not in cls.IGNORED}


class Block(Strict):
    """A part of a message; prefixes are cached without `cache_control`."""

    kind: ClassVar[str]
    type: str
    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """Text; from where another server had it changes no answer."""

    IGNORED = frozenset({"citations"})
    kind = "text"
    text: str


class ThinkingBlock(Block):
    """What the model thought in an earlier turn."""

    kind = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(Block):
    """A call of a tool in an earlier turn."""

    kind = "tool_use"
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultBlock(Block):
    """What a tool has answered."""

    kind = "tool_result"
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class ImageSource(Strict):
    """Where an image is: here, or where `url` says."""

    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class ImageBlock(Block):
    """An image of the user."""

    kind = "image"
    source: ImageSource

    def part(self) -> dict[str, Any]:
        """The same in OpenAI's form."""
        source = self.source
        inside = f"data:{source.media_type};base64,{source.data}"
        url = source.url if source.type == "url" else inside
        return {"type": "image_url", "image_url": {"url": url}}


class Message(Strict):
    """One turn, or a part of one."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(Strict):
    """A tool that the client runs."""

    IGNORED = frozenset({"defer_loading", "allowed_callers", "input_examples"})
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # inputs are always streamed


class ToolChoice(Strict):
    """Whether and which tools the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """Whether the model thinks before it answers, and whether the client sees it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=LEAST_BUDGET)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """A JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer, and how much the model does for it."""

    IGNORED = frozenset({"task_budget"})
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountBody(Body):
    """The body of a request that asks for a number of tokens."""

    IGNORED = Body.IGNORED | {
        *("context_management", "compaction", "betas", "speed", "fallbacks", "diagnostics"),
        *("mcp_servers", "billing_policy", "fallback_credit_token", "user_profile_id"),
        "workspace_id",
    }
    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """The body of a request for a message."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: list[str] | None = Field(None, max_length=MOST_WORDS)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    # As the other APIs of this server have them.
    seed: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_ms: float | None = None


def is_of_another_server(given: Any) -> bool:
    """Whether a block of an earlier answer holds thoughts that only the server can read which has
    written them, or is of a tool that another server has run. The texts beside it are kept."""
    kind = given.get("type") if isinstance(given, dict) else None
    return isinstance(kind, str) and (
        kind in ("redacted_thinking", "server_tool_use", "mcp_tool_use")
        or kind.endswith("_tool_result")
    )


def block_of(given: Any, where: str, *kinds: type[Block]) -> Block:
    """A part of a message as one of these kinds.

    Raises:
        ApiError: it is of another kind, or has wrong fields.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    for one in kinds:
        if one.kind == kind:
            return part_of(one, given, where)
    names = ", ".join(one.kind for one in kinds)
    raise ApiError(
        400,
        f"{where}: a block of type {kind!r:.100} is not supported here, only {names}",
        param=where,
    )


def part_of(model: type[T], given: Any, where: str) -> T:
    """A part of a body as its model. Raises ApiError, naming the wrong field."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([where, *(str(part) for part in first["loc"])])[:200]
        raise ApiError(400, f"{place}: {first['msg'][:500]}", param=place) from None
