"""task=chat: a conversation with the model in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from minivllm.analysis.format import count
from minivllm.config.typed import Config
from minivllm.errors import BadInput
from minivllm.platform.untrusted import printable

if TYPE_CHECKING:
    from minivllm.engine.options import SamplingParams
    from minivllm.llm import LLM
    from minivllm.tasks.answer import Answer

HELP = """\
/reset              forget the conversation
/system [text]      show or set the system prompt (and start anew)
/params [k=v ...]   show or change decoding parameters, e.g. /params temperature=0.2 max_tokens=64
/stats              what has been generated so far, and how fast
/help               this list
/exit               leave (also /quit, Ctrl-D)
Ctrl-C stops an answer."""


class TerminalChat:
    """A conversation and its commands, without the terminal.

    A base model (one without a chat template) completes every line by itself.

    Args:
        llm: generates the answers.
        write: shows text of the model, called with (whether it is thinking, text).
        note: shows a line about the conversation.
        system: the system prompt, or None.
        show_thinking: whether thinking blocks are shown.
    """

    def __init__(
        self,
        llm: LLM,
        write: Callable[[bool, str], None],
        note: Callable[[str], None],
        system: str | None = None,
        show_thinking: bool = True,
    ) -> None:
        self.llm = llm
        self.write = write
        self.note = note
        self.system = system
        self.show_thinking = show_thinking
        self.params: SamplingParams = llm.default_params
        self.messages: list[dict[str, str]] = []
        self.answers: list[Answer] = []
        self.is_base = llm.tokenizer is None or llm.tokenizer.chat_template is None

    def handle(self, line: str) -> bool:
        """Answer one line of the user, or run its command; returns False to end the
        conversation."""
        command, _, rest = line.partition(" ")
        actions: dict[str, Callable[[str], object]] = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/params": self._set_params,
            "/stats": self._show_stats,
            "/help": lambda _: self.note(HELP),
        }
        if command in ("/exit", "/quit"):
            return False
        if not line.strip():
            return True
        try:
            if command in actions:
                actions[command](rest.strip())
            elif re.fullmatch("/[a-z]+", line.strip()) or (
                command.startswith("/") and not self.is_base
            ):
                near = get_close_matches(command, [*actions, "/exit", "/quit"], n=1)
                meant = f"; did you mean {near[0]}?" if near else ""
                self.note(f"unknown command {command}{meant} (/help lists the commands)")
            else:
                self._answer(line)
        except BadInput as error:
            self.note(f"error: {error}")
        return True

    def _answer(self, line: str) -> None:
        from minivllm.serving.parsing.reasoning import begins_thinking
        from minivllm.tasks.answer import stream_answer

        assert self.llm.tokenizer is not None
        user = {"role": "user", "content": line}
        if self.is_base:
            prompt = self.llm.tokenizer.encode(line)
            thinking = False
        else:
            system = [{"role": "system", "content": self.system}] if self.system else []
            prompt = self.llm.tokenizer.render_chat([*system, *self.messages, user])
            thinking = begins_thinking(self.llm.tokenizer, prompt)

        def show(is_thought: bool, text: str) -> None:
            if self.show_thinking or not is_thought:
                self.write(is_thought, text)

        echo = line if self.is_base else ""
        answer = stream_answer(self.llm, prompt, self.params, show, thinking, echo)
        self.write(False, "\n")
        if not self.is_base:
            self.messages += [user, {"role": "assistant", "content": answer.text.strip()}]
        self.answers.append(answer)
        self.note(answer.summary())

    def _reset(self, _: str) -> None:
        self.messages.clear()
        self.note("the conversation is forgotten")

    def _set_system(self, text: str) -> None:
        if self.is_base:
            raise BadInput("a base model has no system prompt: it completes each line by itself")
        if text:
            self.system = text
            self.messages.clear()
        self.note(f"system prompt: {self.system or '(none)'}")

    def _set_params(self, text: str) -> None:
        import yaml

        from minivllm.llm import check_streamable

        known = {item.name for item in fields(self.params)}
        changes: dict[str, Any] = {}
        for part in text.split():
            name, sign, value = part.partition("=")
            if not sign or name not in known:
                raise BadInput(
                    f"/params {part}: write name=value with a name from {', '.join(sorted(known))}"
                )
            try:
                changes[name] = yaml.safe_load(value)
            except yaml.YAMLError:
                raise BadInput(f"/params {part}: {value!r} is no value") from None
        try:
            params = replace(self.params, **changes)
        except TypeError as error:
            raise BadInput(f"/params {text}: {error}") from error
        check_streamable(params)
        self.params = params
        defaults = type(self.params)()
        shown = [
            f"max_tokens={self.params.max_tokens}",
            f"temperature={self.params.temperature}",
        ] + [
            f"{name}={getattr(self.params, name)}"
            for name in sorted(known - {"max_tokens", "temperature"})
            if getattr(self.params, name) != getattr(defaults, name)
        ]
        self.note("  ".join(shown))

    def _show_stats(self, _: str) -> None:
        if not self.answers:
            self.note("nothing has been generated yet")
            return
        tokens = sum(answer.num_tokens for answer in self.answers)
        seconds = sum(answer.finished_s for answer in self.answers)
        cache = self.llm.engine.cache.pool
        self.note(
            f"{count(len(self.answers), 'answer')}, {count(tokens, 'token')} in {seconds:.1f} s "
            f"of generating; KV cache of {cache.num_usable} blocks, {cache.num_used} in use; "
            f"weights {self.llm.engine.loaded.weight_bytes / 1e6:.0f} MB"
        )


def run(config: dict[str, Any]) -> int:
    """Hold a conversation until /exit or the end of the input, which may be a pipe.

    Returns:
        Exit code 0.

    Raises:
        BadInput: the model has random weights or no tokenizer, or cannot be loaded, or `decoding`
            cannot be streamed, as several completions or a beam search.
    """
    view = Config.of(config)
    model = vars(view.model)  # a class of the user's own has other knobs
    if model.get("weights") == "random":
        raise BadInput("model.weights=random generates noise: chat needs trained weights")
    from rich.console import Console
    from rich.text import Text

    from minivllm.llm import LLM, check_streamable, params_of  # imports torch, so only now

    check_streamable(params_of(config["decoding"]))
    console = Console(highlight=False)

    def write(is_thought: bool, text: str) -> None:
        if is_thought:
            console.print(Text(printable(text), style="dim italic"), end="", soft_wrap=True)
        else:  # rich would expand tabs
            console.file.write(printable(text) if console.is_terminal else text)
            console.file.flush()

    def note(text: str) -> None:
        console.print(Text(printable(text), style="dim"), soft_wrap=True)

    task = view.task
    with LLM.from_config(config) as llm:
        for warning in llm.engine.loaded.warnings:
            note(f"warning: {warning}")
        if llm.tokenizer is None:
            raise BadInput("this checkpoint has no tokenizer: it cannot chat")
        if llm.checkpoint_defaults:
            note(llm.defaults_note())
        chat = TerminalChat(llm, write, note, task.system, task.thinking == "show")
        name = config["choices"].get("model") or model.get("path")
        if chat.is_base:
            note(
                f"{name} is a base model without a chat template: it completes what you type. "
                "/help lists commands."
            )
        else:
            note(f"Talking to {name}. /help lists commands.")
        for line in _lines():
            try:
                if not chat.handle(line):
                    break
            except KeyboardInterrupt:  # between answers; the conversation goes on
                llm.engine.abort_all()
                note("stopped")
    return 0


def _lines() -> Any:
    """Iterate over the lines of the terminal, with history and editing, or of a pipe."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue  # clears the line; Ctrl-D or /exit leaves
        except EOFError:
            return
