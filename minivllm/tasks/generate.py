"""task=generate: the completion of one prompt or of standard input, streamed where it is a single
one."""

from __future__ import annotations

import sys
from typing import Any

from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.platform.untrusted import printable


def run(config: dict[str, Any]) -> int:
    """Complete `task.prompt`; the text goes to stdout, everything else to stderr.

    Returns:
        Exit code: 0, or 130 if interrupted.

    Raises:
        BadInput: the prompt is missing or cannot be served.
    """
    prompt = Config.of(config).task.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise BadInput("no prompt: give task.prompt='...', or pipe text into standard input")
        try:
            prompt = sys.stdin.read()
            prompt.encode()  # some locales decode invalid bytes to lone surrogates
        except UnicodeError as error:
            raise BadInput(f"standard input is not valid UTF-8 ({error}): pipe text in") from None
    if not prompt:
        raise BadInput(
            "the prompt is empty: give task.prompt='...', or pipe text into standard input"
        )

    from minivllm.interactive.local import stream_answer  # imports torch, so only now
    from minivllm.llm import LLM

    shown = printable if sys.stdout.isatty() else str  # a file or a pipe gets the raw text

    def show_all(llm: LLM) -> int:
        (result,) = llm.generate(prompt, llm.default_params, on_error="raise")
        for output in result.outputs:
            score = "" if output.score is None else f", score {output.score:.4f}"
            print(f"--- {output.index + 1}: {len(output.token_ids)} tokens{score}", file=sys.stderr)
            print(shown(f"{prompt}{output.text}"))
        return 0

    def show(is_thought: bool, text: str) -> None:
        sys.stdout.write(shown(text))
        sys.stdout.flush()

    with LLM.from_config(config) as llm:
        for warning in llm.engine.loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if llm.tokenizer is None:
            raise BadInput("this checkpoint has no tokenizer: it cannot complete text")
        if llm.checkpoint_defaults:
            print(llm.defaults_note(), file=sys.stderr)
        if llm.default_params.n > 1 or llm.default_params.beam_width > 1:
            return show_all(llm)
        answer = stream_answer(llm, prompt, llm.default_params, show, echo=prompt)
    print()
    print(answer.summary(), file=sys.stderr)
    return 130 if answer.finish_reason == "abort" else 0
