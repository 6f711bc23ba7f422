"""What the user types or pipes in: texts of one line or of several."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

CONTINUES = "\\"  # at the end of a line: the next one belongs to it


def typed_texts(status: Callable[[], str]) -> Iterator[str]:
    """Iterate over the texts of the terminal, with history and editing, or of a pipe.

    Args:
        status: what the line below the prompt says; called whenever it is drawn.
    """
    if not sys.stdin.isatty():
        yield from joined(line.rstrip("\n") for line in sys.stdin)
        return
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation="  ",
        bottom_toolbar=lambda: f" {status()}",
    )
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue  # clears the text; Ctrl-D or /exit leaves
        except EOFError:
            return


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Join each line that ends with a backslash to the next one, by a line break in its place."""
    held: list[str] = []
    for line in lines:
        if line.endswith(CONTINUES):
            held.append(line[: -len(CONTINUES)])
            continue
        yield "\n".join([*held, line])
        held = []
    if held:
        yield "\n".join(held)


def _keys() -> KeyBindings:
    """Enter ends the text, but for a backslash before it; Alt-Enter breaks the line.

    Pasted text is inserted as it is, line breaks included.
    """
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus  # a search in the history has keys of its own
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith(CONTINUES):
            buffer.delete_before_cursor(len(CONTINUES))
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
