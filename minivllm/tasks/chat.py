"""task=chat: a conversation in the terminal, with the configured engine or with a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from minivllm.config.compose import compose
from minivllm.config.groups import GROUPS, Config
from minivllm.errors import BadInput, nearest
from minivllm.interactive.chat import TerminalChat
from minivllm.interactive.comparison import Build
from minivllm.interactive.model import TerminalModel
from minivllm.interactive.prompt import typed_texts
from minivllm.interactive.screen import Screen
from minivllm.prompts import check_streamable, params_of

if TYPE_CHECKING:
    from minivllm.interactive.local import LocalModel

# Groups that decide what an engine answers, or how fast.
COMPARABLE = (
    *("model", "quant", "pruning", "attention", "batching"),
    *("cache", "decoding", "speculative"),
)
# Knobs of `runtime` that hold for the whole process, and so for both engines of a comparison.
OF_THE_PROCESS = ("runtime.cores", "runtime.determinism")


def run(config: dict[str, Any]) -> int:
    """Hold a conversation until /exit or the end of the input, which may be a pipe.

    Returns:
        Exit code 0.

    Raises:
        BadInput: the model has random weights or no tokenizer, or cannot be loaded, or `decoding`
            cannot be streamed, as several completions or a beam search; or the server of `task.url`
            cannot be used.
        NotInstalled: the package that talks to a server is missing.
    """
    task = Config.of(config).task
    check_streamable(params_of(config["decoding"]))
    screen = Screen()
    model: TerminalModel
    build: Build | None = None
    if task.url is None:
        model = _local(config, screen)
        build = partial(_another, screen)
    else:
        from minivllm.interactive.remote import RemoteModel

        model = RemoteModel(config)
    with closing(model):
        chat = TerminalChat(model, screen, build, task.system, task.thinking == "show")
        where = "" if task.url is None else f" at {model.form}"
        if model.is_base:
            screen.note(
                f"{model.name}{where} is a base model without a chat template: it completes what "
                "you type. /help lists commands."
            )
        else:
            screen.note(f"Talking to {model.name}{where}. /help lists commands.")
        with closing(chat):
            converse(chat, screen)
    return 0


def converse(chat: TerminalChat, screen: Screen) -> None:
    """Handle what the user types until the end; Ctrl-C stops what is under way."""
    for text in typed_texts(chat.status):
        try:
            if not chat.handle(text):
                break
        except KeyboardInterrupt:  # between answers; the conversation goes on
            chat.abort()
            screen.note("stopped")


def _local(config: dict[str, Any], screen: Screen) -> LocalModel:
    from minivllm.interactive.local import LocalModel  # imports torch

    model = LocalModel.from_config(config)
    for notice in model.notices():
        screen.note(notice)
    return model


def _another(screen: Screen, overrides: Sequence[str]) -> Callable[[], TerminalModel]:
    """What builds the engine of the running command with further overrides, for `/compare`.

    Raises:
        BadInput: an override is wrong, or is of no group that an answer depends on.
    """
    for text in overrides:
        name = text.lstrip("+~").partition("=")[0]
        group = name.partition(".")[0]
        if group not in (*COMPARABLE, "runtime"):
            what = f"{group} changes no answer" if group in GROUPS else nearest(group, COMPARABLE)
            raise BadInput(f"/compare {text}: {what}; give overrides such as quant=nf4")
        if name in OF_THE_PROCESS:
            raise BadInput(f"/compare {text}: {name} holds for the whole process, both engines")
    config = _variant(overrides)
    check_streamable(params_of(config["decoding"]))
    return partial(_local, config, screen)


def _variant(further: Sequence[str]) -> dict[str, Any]:
    """Compose the running command's configuration again, with further overrides.

    A group that `further` chooses loses the knobs that the command sets in it, which the new option
    may not have.

    Raises:
        BadInput: see `compose`.
    """
    from hydra.core.hydra_config import HydraConfig

    running = HydraConfig.get()
    folder = next(
        (s.path for s in running.runtime.config_sources if s.provider == "command-line"), None
    )
    chosen = {text.partition("=")[0].lstrip("+") for text in further} & {*GROUPS}
    kept = [
        text
        for text in running.overrides.task
        if text.lstrip("+~").partition("=")[0].partition(".")[0] not in chosen
    ]
    return compose([*kept, *further], folder)
