"""Conversations, which the chat template of a model writes in child processes, in turns."""

from __future__ import annotations

import asyncio
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.load.chat_template import SECONDS, variables_of, variables_question
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.serving.children.child_turns import ChildTurns, Work
from minivllm.serving.errors import ApiError

CONVERSATIONS = Work("minivllm.models.load.chat_template", "conversation", SECONDS, 1 << 20)
FIELD = "messages"


class ChatTemplates:
    """What the chat template of a model makes of conversations.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.turns = ChildTurns(CONVERSATIONS, None)
        self._variables: frozenset[str] | None = None

    async def token_ids(
        self, messages: list[dict[str, Any]], client: str, /, **variables: Any
    ) -> list[int]:
        """A conversation as token ids.

        Args:
            messages: {"role": ..., "content": ...} in order.
            client: whose turn it is.
            variables: see `Tokenizer.conversation`.

        Raises:
            ApiError: the template rejects the conversation, takes too long or too much memory; or
                too much waits.
        """
        tokenizer = self._tokenizer
        try:
            conversation = await asyncio.to_thread(tokenizer.conversation, messages, **variables)
            answer = await self.turns.answer(conversation.question, client, FIELD)
            return await asyncio.to_thread(
                lambda: tokenizer.encode(conversation.text_of(answer), add_special_tokens=False)
            )
        except BadInput as error:
            raise ApiError.of(error, FIELD) from None

    async def variables(self, client: str) -> frozenset[str]:
        """The variables that the template reads and does not set.

        Args:
            client: whose turn it is.

        Raises:
            ApiError: the template is wrong, or too much waits.
        """
        if self._variables is None:
            question = variables_question(self._tokenizer.chat_template or "")
            try:
                self._variables = variables_of(await self.turns.answer(question, client, FIELD))
            except BadInput as error:
                raise ApiError.of(error, FIELD) from None
        return self._variables
