"""workload=file: prompts of one's own."""

from __future__ import annotations

from minivllm.bench.checks import at_least_one, check_fits
from minivllm.bench.generator import FromFile, Reader
from minivllm.bench.prompt_file import FORMATS, PromptLine, read_prompt_file
from minivllm.bench.prompts import Encode
from minivllm.bench.workload import Workload, WorkloadRequest
from minivllm.errors import BadInput

FILE_ADVICE = (
    "shorten the prompt, lower its max_tokens or workload.output_len, raise model.max_model_len if it is below the model's own, or leave it "
    "out with workload.too_long=skip"
)


class File(FromFile):
    """Prompts of one's own: a JSON object a line, or the conversations of a ShareGPT file.

    A line has `prompt` (text), `prompt_token_ids`, or `messages` (OpenAI's roles and contents, joined as
    `role: content` lines), and may have `max_tokens` or `output_len`; other keys are left alone. Of a
    conversation the first turn of its user is the prompt, and the answer to it says how long the output is.

    Args:
        path: the file.
        num_requests: take only the first so many; None takes all.
        too_long: what to do with a request that the context cannot hold: error, or skip.
        format: jsonl, sharegpt or auto (see `read_prompt_file`).
        output_len: tokens to generate where a line does not say.
        ignore_eos: go on to the full output length past an end-of-sequence token.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "file"

    def __init__(
        self,
        path: str | None = None,
        num_requests: int | None = None,
        too_long: str = "error",
        format: str = "auto",
        output_len: int = 128,
        ignore_eos: bool = False,
    ) -> None:
        advice = "a file of prompts: set workload.path=PROMPTS.jsonl"
        super().__init__(path, advice, num_requests, too_long, format, FORMATS, ignore_eos)
        self.output_len = at_least_one("workload.output_len", output_len)

    def check_lengths(self, max_model_len: int) -> None:
        """Read the file and fail early, before any engine is built, on what cannot be served.

        Raises:
            BadInput: the file is missing, a line is wrong, or prompt ids are longer than the context.
        """
        found = 0
        for line in read_prompt_file(self.path, self.format):
            if found == self.num_requests:
                break
            found += self._fits(line, len(line.token_ids or ()), self._output_len(line), max_model_len)

    def make(self, reader: Reader, seed: int) -> Workload:
        """The file's requests, in its order; see `Generator.generate`.

        Raises:
            BadInput: naming file and line: not readable, text without a tokenizer, an id outside the
                vocabulary, or a request longer than the context; or nothing is left.
        """
        requests: list[WorkloadRequest] = []
        skipped, further = 0, reader.encode_further
        for line in read_prompt_file(self.path, self.format):
            if len(requests) == self.num_requests:
                break
            token_ids = self._token_ids(line, reader)
            output_len = self._output_len(line, further)
            if not self._fits(line, len(token_ids), output_len, reader.max_model_len):
                skipped += 1
                continue
            text = reader.text(token_ids) if line.text is None else line.text
            requests.append(
                WorkloadRequest(f"r{len(requests)}", token_ids, output_len, self.ignore_eos, text)
            )
        if not requests:
            raise BadInput(
                f"workload.path={self.path} has no request that can be used"
                + (f": {skipped} are longer than the context of {reader.max_model_len}" if skipped else "")
            )
        note = f"workload=file: {skipped} requests were left out, longer than the context of {reader.max_model_len}"
        return Workload(tuple(requests), (note,) if skipped else ())

    def _token_ids(self, line: PromptLine, reader: Reader) -> tuple[int, ...]:
        token_ids, vocab_size = line.token_ids, reader.vocab_size
        if line.text is not None:
            if reader.encode is None:
                raise BadInput(
                    f"{line.where}: this model has no tokenizer; give prompt_token_ids instead of text"
                )
            token_ids = tuple(reader.encode(line.text))
            if not token_ids:
                raise BadInput(f"{line.where}: the prompt has no tokens")
        assert token_ids is not None
        if max(token_ids) >= vocab_size:
            raise BadInput(
                f"{line.where}: token id {max(token_ids)} is outside the vocabulary of {vocab_size}"
            )
        return token_ids

    def _output_len(self, line: PromptLine, encode: Encode | None = None) -> int:
        """Tokens to generate; at least so many where an answer says it and there is no tokenizer to count it."""
        if line.answer is not None:
            return max(1, len(encode(line.answer))) if encode else 1
        return line.max_tokens or self.output_len

    def _fits(self, line: PromptLine, prompt_len: int, output_len: int, max_model_len: int) -> bool:
        """Whether the context holds a request; where it does not and none may be skipped, BadInput."""
        if self.skips:
            return prompt_len + output_len <= max_model_len
        check_fits(f"{line.where}: the request", prompt_len, output_len, max_model_len, FILE_ADVICE)
        return True
