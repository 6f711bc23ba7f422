"""An engine in this process as a TerminalModel."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.extras.vision.pictures import NO_IMAGES
from minivllm.interactive.answer import Answer, AnswerPiece, collect
from minivllm.interactive.model import ChatDecoding, Turn, picture_bytes
from minivllm.llm import LLM
from minivllm.models.load.messages import has_images, parse_messages
from minivllm.platform.threads import thread_count
from minivllm.prompts import Prompt, check_streamable
from minivllm.serving.parsing.reasoning import begins_thinking


class LocalModel:
    """Answers with an LLM.

    Args:
        llm: generates the answers; closed with this object.

    Raises:
        BadInput: the checkpoint has no tokenizer.
    """

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            llm.close()
            raise BadInput("this checkpoint has no tokenizer: it cannot chat")
        self.llm, self.tokenizer = llm, llm.tokenizer
        choices = llm.config["choices"]
        model = vars(Config.of(llm.config).model)  # a class of the user's own has other knobs
        option = choices.get("model")
        self.name = str(option if option not in (None, "hf") else model.get("path"))
        self.form = str(choices.get("quant"))
        self.is_base = llm.tokenizer.chat_template is None
        self.decoding = ChatDecoding(llm.default_params)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LocalModel:
        """The model of a composed configuration.

        Raises:
            BadInput: the weights are random, or see LLM.
        """
        if vars(Config.of(config).model).get("weights") == "random":
            raise BadInput("model.weights=random generates noise: chat needs trained weights")
        return cls(LLM.from_config(config))

    def notices(self) -> list[str]:
        """Lines for the user about how the model was loaded."""
        notices = [f"warning: {warning}" for warning in self.llm.engine.loaded.warnings]
        if not self.is_base and "role" not in (self.tokenizer.chat_template or ""):
            notices.append(f"{self.name} continues texts: its chat template names no roles")
        return notices + [self.llm.defaults_note()] * bool(self.llm.checkpoint_defaults)

    def check(self, decoding: ChatDecoding) -> None:
        check_streamable(decoding.params)

    def answer(
        self,
        turn: Turn,
        decoding: ChatDecoding,
        show: Callable[[bool, str], None],
        watch: Callable[[Answer], None],
    ) -> Answer:
        config = Config.of(self.llm.config)
        # another LLM may have set another number
        torch.set_num_threads(thread_count(config["runtime"], config.parallel.tensor))
        prompt: Prompt
        if self.is_base:
            prompt, thinking = self.tokenizer.encode(turn.text), False
        else:
            prompt, thinking = self._written(turn)
        echo = turn.text if self.is_base else ""
        return stream_answer(self.llm, prompt, decoding.params, show, thinking, echo, watch)

    def _written(self, turn: Turn) -> tuple[Prompt, bool]:
        """A conversation as the chat template writes it, with its pictures, and whether the answer
        begins with a thinking block.

        Raises:
            BadInput: the model takes no images, or the template rejects the messages.
        """
        pictures, messages = self.llm.pictures, turn.conversation
        parts = pictures.parts()
        if parts is None and any(has_images(message["content"]) for message in messages):
            raise BadInput(NO_IMAGES)
        ids = self.tokenizer.render_chat(parse_messages(messages, images=parts))
        thinking = begins_thinking(self.tokenizer, ids)
        if parts is None or not parts.sources:
            return ids, thinking
        images = [picture_bytes(uri) for _, uri in parts.sources]
        whole, _ = pictures.insert(ids, images)
        return {"prompt_token_ids": whole, "multi_modal_data": {"image": images}}, thinking

    def cache_use(self) -> str:
        pool = self.llm.engine.cache.pool
        share = 100 * pool.num_used / max(1, pool.num_usable)
        return f"KV cache {share:.1f} % ({pool.num_used:,} of {pool.num_usable:,} blocks)"

    def weights(self) -> str:
        return f"weights {self.llm.engine.loaded.weight_bytes / 1e6:.1f} MB"

    def abort(self) -> None:
        self.llm.engine.abort_all()

    def close(self) -> None:
        self.llm.close()


def stream_answer(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    show: Callable[[bool, str], None],
    thinking: bool | None = None,
    echo: str = "",
    watch: Callable[[Answer], None] = lambda answer: None,
) -> Answer:
    """Stream one completion; Ctrl-C ends it, and the answer holds the text so far.

    Args:
        llm: generates the answer.
        prompt: text or token ids.
        params: the decoding parameters.
        show, thinking, watch: see `collect`.
        echo: text to show before the answer, after the prompt was accepted.

    Raises:
        BadInput: the prompt cannot be served.
    """
    ids = llm.encode(prompt)
    answer = Answer(num_prompt_tokens=len(ids))
    stream = llm.stream(ids, params)
    if echo:
        show(False, echo)

    def pieces() -> Generator[AnswerPiece]:
        for piece in stream:
            yield AnswerPiece(piece.text, int(piece.token_id is not None), piece.finish_reason)

    try:
        collect(answer, pieces(), show, thinking, watch)
    finally:
        stream.close()
    return answer
