"""Making a workload for a loaded engine: its tokenizer and chat template turn text into token
ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minivllm.bench.targets.base import BenchEngine, SeeingEngine
from minivllm.bench.workloads.generator import Generator, RenderChat
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import build
from minivllm.errors import BadInput

DATE = "26 Jul 2024"  # for templates that take one, so that prompts are the same on any day


class WorkloadMaker:
    """Makes workloads for one engine, each once for all measurements in a row that ask for it."""

    def __init__(self) -> None:
        self._made: tuple[str, Workload] | None = None  # the last workload, and what it was made of

    def make(self, engine: BenchEngine, node: dict[str, Any], seed: int) -> Workload:
        """The requests, with text where there is a tokenizer.

        Args:
            engine: to be measured.
            node: the configuration's `workload`.
            seed: of lengths and prompts.

        Raises:
            BadInput: see `Generator.generate`; or there are no requests.
        """
        asked = json.dumps([node, seed], sort_keys=True, default=repr)
        if self._made is not None and self._made[0] == asked:
            return self._made[1]
        info, generator = engine.info, build(node)
        tokenizer = engine.text([0]) is not None
        # A user's own generator may not take it.
        chat = (
            {
                "render_chat": chat_renderer(engine),
                "takes_chat": info.takes_chat,
                "pictures": engine.pictures if isinstance(engine, SeeingEngine) else None,
            }
            if isinstance(generator, Generator)
            else {}
        )
        workload: Workload = generator.generate(
            engine.encode if tokenizer else None,
            info.vocab_size,
            info.max_model_len,
            seed,
            engine.text if tokenizer else None,
            **chat,
        )
        if not len(workload):
            raise BadInput("the workload has no requests: nothing to measure")
        self._made = asked, workload
        return workload


def chat_renderer(engine: object) -> RenderChat | None:
    """What writes messages as an engine's model is used to them, as text and as token ids.

    The role `developer` becomes `system` for a template that does not know it. None for an engine
    whose model has no chat template, or none that is known of.
    """
    tokenizer = getattr(engine, "tokenizer", None)
    template = getattr(tokenizer, "chat_template", None)
    if tokenizer is None or not isinstance(template, str):
        return None
    renamed = {} if "developer" in template else {"developer": "system"}

    def render(messages: Sequence[dict[str, Any]]) -> tuple[str, tuple[int, ...]]:
        known = [
            {**message, "role": renamed.get(message["role"], message["role"])}
            for message in messages
        ]
        text = tokenizer.chat_text(known, date_string=DATE)
        return text, tuple(tokenizer.encode(text, add_special_tokens=False))

    return render
