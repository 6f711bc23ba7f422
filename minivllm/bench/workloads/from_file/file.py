"""workload=file: prompts of one's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice

import numpy as np

from minivllm.bench.workloads.from_file.prompt_file import read_prompt_file
from minivllm.bench.workloads.from_file.prompt_row import TOOLS, PromptLine
from minivllm.bench.workloads.from_file.tables import Tally
from minivllm.bench.workloads.generator import FEWER, FromFile, Reader
from minivllm.bench.workloads.images import NO_IMAGES
from minivllm.bench.workloads.lengths import check_amount, check_fits
from minivllm.bench.workloads.options import FileOptions
from minivllm.bench.workloads.pictures import of_file
from minivllm.bench.workloads.prompts import Encode
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.errors import BadInput

FILE_ADVICE = (
    "shorten the prompt, lower its max_tokens or workload.output_len, raise model.max_model_len "
    "if it is below the model's own, or leave it out with workload.too_long=skip"
)
DRAWN_STREAM = 0xF11E  # keeps the drawing of prompts apart from arrivals with the same seed
DRAWN = "requests have a length and no prompt: theirs was drawn"
SLOW_S = 2.0  # of a chat template that rejects messages
AS_LINES = (
    "requests are messages that the model's chat template rejects, written as lines of `role: "
    "content`"
)
NO_TEMPLATE = (
    "requests are messages, written as lines of `role: content`, since the model has no chat "
    "template"
)


class File(FromFile, FileOptions):
    """Prompts of one's own: a JSON object a line, the rows of a table, or the conversations of a
    ShareGPT file.

    A line has `prompt` (text), `prompt_token_ids`, or `messages` (OpenAI's, written by the model's
    chat template, or as `role: content` lines where it has none), and may have `max_tokens`,
    `output_len` or another usual name of the output's length, and sampling of its own; other keys
    are left alone. `images` are paths of pictures, from the file's folder, for which the prompt has
    placeholders. A line that has only a length of its prompt gets a drawn one. Of a
    conversation the first question of its user is the prompt, and the answer to it says how long
    the output is. What is not taken is counted in the notes.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "file"
    ADVICE = "a file of prompts: set workload.path=PROMPTS.jsonl"

    def check_file(self, max_model_len: int) -> None:
        """See `FromFile.check_lengths`: the file is missing, a line is wrong, or a request is
        longer than the context."""
        taken = 0
        for line in self._lines(Tally()):
            if taken == self.num_requests:
                break
            known = line.input_len if line.token_ids is None else len(line.token_ids)
            if known is not None:
                taken += self._fits(line, known, self._output_len(line), max_model_len)
                continue
            taken += 1  # how many tokens its text has is not known yet
            if not self.skips and (length := self._output_len(line)) > max_model_len:
                raise BadInput(
                    f"{line.where}: the request has {length} output tokens beside its prompt, and "
                    f"the context holds {max_model_len}: {FILE_ADVICE}"
                )

    def _lines(self, tally: Tally) -> Iterator[PromptLine]:
        return read_prompt_file(self.file, self.format, tally, self.columns, self.split)

    def make(self, reader: Reader, seed: int) -> Workload:
        """The file's requests, in its order; see `Generator.generate`.

        Raises:
            BadInput: naming file and line: not readable, text without a tokenizer, an id outside
                the vocabulary, or a request longer than the context; or nothing is left.
        """
        requests: list[WorkloadRequest] = []
        tokens = 0
        further, tally = reader.encode_further, Tally()
        rng = np.random.default_rng([DRAWN_STREAM, seed])  # of prompts of which a length is given
        too_long = f"requests were left out, longer than the context of {reader.max_model_len}"
        for line in self._lines(tally):
            output_len = self._output_len(line, further)
            if line.input_len is not None:
                if not self._fits(line, line.input_len, output_len, reader.max_model_len):
                    tally.left_out[too_long] += 1
                    continue
                tally.unused[DRAWN] += 1
            text, token_ids = self._prompt(line, reader, tally, rng)
            names, token_ids = self._pictures(line, reader, token_ids)
            if not self._fits(line, len(token_ids), output_len, reader.max_model_len):
                tally.left_out[too_long] += 1
                continue
            prompt_text = reader.text(token_ids) if text is None else text
            tokens += len(token_ids)
            check_amount(f"workload.path={self.path}", len(requests) + 1, tokens, FEWER)
            requests.append(
                replace(
                    self._request(
                        *(f"r{len(requests)}", line, token_ids, output_len, prompt_text, reader)
                    ),
                    images=names,
                )
            )
            if len(requests) == self.num_requests:
                break
        if reader.takes_chat:
            tally.unused.pop(TOOLS, None)  # they are sent
        notes = tally.notes(self.name, len(requests), self.num_requests)
        if not requests:
            skipped = tally.left_out[too_long]
            why = (
                f"{skipped} are longer than the context of {reader.max_model_len}"
                if skipped == tally.read
                else "; ".join(note.partition(": ")[2] for note in notes)
            )
            raise BadInput(f"workload.path={self.path} has no request that can be used: {why}")
        return Workload(*self._oversampled(requests, notes))

    def _request(
        self,
        request_id: str,
        line: PromptLine,
        token_ids: tuple[int, ...],
        output_len: int,
        text: str | None,
        reader: Reader,
    ) -> WorkloadRequest:
        """A line as a request."""
        sampling = dict(line.sampling or {}) if self.line_sampling else {}
        ignore_eos = sampling.pop("ignore_eos", self.ignore_eos)
        if line.images and not reader.takes_chat:
            raise BadInput(
                f"{line.where}: its messages have images, which only engine=openai sends, with "
                "engine.api=chat or responses"
            )
        chat = line.chat if reader.takes_chat else None
        return WorkloadRequest(
            *(request_id, token_ids, output_len, ignore_eos, text),
            sampling=sampling or None,
            chat=chat,
        )

    def _pictures(
        self, line: PromptLine, reader: Reader, token_ids: tuple[int, ...]
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The names of a line's pictures, and its prompt with their tokens."""
        if not line.pictures:
            return (), token_ids
        if reader.pictures is None:
            raise BadInput(f"{line.where}: {NO_IMAGES.format(name=self.name)}")
        folder = self.file.parent
        names = tuple(of_file(folder / path, f"{line.where}: image") for path in line.pictures)
        try:
            return names, reader.pictures.expand(token_ids, names)
        except BadInput as error:
            raise BadInput(f"{line.where}: {error}") from None

    def _oversampled(
        self, requests: list[WorkloadRequest], notes: tuple[str, ...]
    ) -> tuple[tuple[WorkloadRequest, ...], tuple[str, ...]]:
        """The requests, with `oversample` as many as `num_requests`, and the notes."""
        wanted, given = self.num_requests or 0, len(requests)
        if not self.oversample or given >= wanted:
            return tuple(requests), notes
        check_amount(
            f"workload.path={self.path}",
            wanted,
            wanted / given * sum(len(request.prompt_token_ids) for request in requests),
            FEWER,
        )
        more = (
            replace(request, request_id=f"r{i}")
            for i, request in enumerate(islice(cycle(requests), wanted))
        )
        note = (
            f"workload={self.name}: oversampled: its {given} requests were repeated to make "
            f"{wanted}, so that each prompt came {wanted / given:.3g} times on average; a prefix "
            "cache finds the repeats"
        )
        return tuple(more), (*notes[:-1], note)  # the last one says that there are fewer

    def _prompt(
        self, line: PromptLine, reader: Reader, tally: Tally, rng: np.random.Generator
    ) -> tuple[str | None, tuple[int, ...]]:
        """A request's text, where it has one, and its token ids."""
        if line.input_len is not None:
            return None, reader.draw([line.input_len], reader.encode, rng)[0]
        text, token_ids, vocab_size = line.text, line.token_ids, reader.vocab_size
        if text is not None:
            if reader.encode is None:
                raise BadInput(
                    f"{line.where}: this model has no tokenizer; give prompt_token_ids instead "
                    "of text"
                )
            rendered = self._render(line, reader, tally)
            text, token_ids = (text, tuple(reader.encode(text))) if rendered is None else rendered
            if not token_ids:
                raise BadInput(f"{line.where}: the prompt has no tokens")
        assert token_ids is not None
        if max(token_ids) >= vocab_size:
            raise BadInput(
                f"{line.where}: token id {max(token_ids)} is outside the vocabulary of {vocab_size}"
            )
        return text, token_ids

    def _render(
        self, line: PromptLine, reader: Reader, tally: Tally
    ) -> tuple[str, tuple[int, ...]] | None:
        """Messages as the chat template writes them; None where there are none, or none is
        written."""
        if line.messages is None:
            return None
        if reader.render_chat is None:
            tally.unused[NO_TEMPLATE] += 1
            return None
        begin = time.monotonic()
        try:
            return reader.render_chat(line.messages)
        except BadInput as error:
            if time.monotonic() - begin > SLOW_S:  # as slow again for every further line
                raise BadInput(f"{line.where}: {error}") from None
            tally.unused[AS_LINES] += 1
            return None

    def _output_len(self, line: PromptLine, encode: Encode | None = None) -> int:
        """Tokens to generate; at least so many where an answer says it and there is no tokenizer to
        count it."""
        if line.answer is not None:
            return max(1, len(encode(line.answer))) if encode else 1
        return line.max_tokens or self.output_len

    def _fits(self, line: PromptLine, prompt_len: int, output_len: int, max_model_len: int) -> bool:
        """Whether the context holds a request; where it does not and none may be skipped,
        BadInput."""
        if self.skips:
            return prompt_len + output_len <= max_model_len
        check_fits(f"{line.where}: the request", prompt_len, output_len, max_model_len, FILE_ADVICE)
        return True
