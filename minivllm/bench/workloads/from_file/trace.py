"""workload=trace: the lengths, times and shared prefixes of production traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator

from minivllm.bench.workloads.from_file.tables import Tally
from minivllm.bench.workloads.from_file.trace_file import read_trace
from minivllm.bench.workloads.from_file.trace_format import FORMATS, TraceRow
from minivllm.bench.workloads.generator import FEWER, FromFile, Reader
from minivllm.bench.workloads.lazy_prompt import LazyPrompt, joined
from minivllm.bench.workloads.lengths import check_amount, check_fits
from minivllm.bench.workloads.options import TraceOptions
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.errors import BadInput
from minivllm.platform.untrusted import printable

# Numbers of blocks, so that the positions of their tokens are machine words: a hash below is its
# own, larger ones are counted from here.
COUNTED_FROM = 1 << 44
UNSHARED = 1 << 62  # where the text of prompts begins that share nothing
STRETCH = 1 << 32  # of it that each line of the trace has for itself
# lines that a request may be out of order by, where not all of a trace is taken
LOOK_AHEAD = 10_000
FAILED = "requests of the file were left out, they failed when the trace was taken"
LATER_TURNS = (
    "requests are later turns of conversations: they come at the trace's times, not after an answer"
)
TRACE_ADVICE = (
    "lower workload.length_scale, raise model.max_model_len if it is below the model's own, or "
    "leave it out with workload.too_long=skip"
)


class Trace(FromFile, TraceOptions):
    """Requests as long, and with `arrival=replay` as late, as those of a trace.

    Prompts are random token ids: equal where the trace's hash ids are equal, different everywhere
    else. They are computed when looked at (`LazyPrompt`), and have no text.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "trace"
    timed = True  # its requests say when they are due
    ADVICE = "a trace: set workload.path=TRACE.csv (see docs/guides/traces.md)"

    def check_file(self, max_model_len: int) -> None:
        self._rows(max_model_len)

    def make(self, reader: Reader, seed: int) -> Workload:
        """The slice's requests, in order of time; see `Generator.generate`.

        Raises:
            BadInput: as `check_lengths`; or a line's hash ids do not cover its prompt.
        """
        rows, notes = self._rows(reader.max_model_len)
        span = self.duration_s or rows[-1].time_s - self.start_s
        timed = [
            (due_s if copy == 0 else (due_s + copy * span / self.copies) % span, copy, row)
            for row in rows
            for due_s in (row.time_s - self.start_s,)
            for copy in range(self.copies)
        ]
        if self.copies > 1:
            check_amount("workload.copies", len(timed), 0, FEWER)
            timed.sort(key=lambda one: one[0])
        self._numbers: dict[int, int] = {}  # of blocks with large hashes
        requests = []
        for i, (due_s, copy, row) in enumerate(timed):
            prompt_len, output_len = self._lengths(row)
            runs = joined(list(self._runs(row, prompt_len, copy)))
            prompt = LazyPrompt(runs, reader.vocab_size, seed, reader.reserved)
            requests.append(
                WorkloadRequest(f"r{i}", prompt, output_len, self.ignore_eos, None, due_s)
            )
        return Workload(tuple(requests), notes)

    def _rows(self, max_model_len: int) -> tuple[list[TraceRow], tuple[str, ...]]:
        """The slice, and what was left out of it."""
        end = math.inf if self.duration_s is None else self.start_s + self.duration_s
        tally, taken, too_long = (
            Tally(),
            0,
            f"requests were left out, longer than the context of {max_model_len}",
        )

        def select(row: TraceRow) -> bool | None:
            nonlocal taken
            if row.time_s < self.start_s:
                return False
            if taken == self.num_requests or row.time_s >= end:
                return None
            lengths = self._lengths(row)
            if self.skips and sum(lengths) > max_model_len:
                tally.left_out[too_long] += 1
                return False
            check_fits(
                f"{self.path}:{row.line}: the request", *lengths, max_model_len, TRACE_ADVICE
            )
            taken += 1
            check_amount(f"workload.path={self.path}", taken, 0, FEWER)
            tally.unused[LATER_TURNS] += row.later_turn
            if row.kind != "text":
                tally.unused[
                    f"requests are of type {printable(row.kind)!r}: random text as long stands "
                    "for them"
                ] += 1
            return True

        bounded = self.num_requests is not None or self.duration_s is not None
        tally.left_out[FAILED] = 0  # the first of the notes
        rows, tally.left_out[FAILED] = read_trace(
            self.file,
            self.format,
            select,
            LOOK_AHEAD if bounded else None,
            self.columns,
            self.time_unit,
        )
        if not rows:
            raise BadInput(
                f"workload.path={self.path} has no request from "
                f"workload.start_s={self.start_s:g} on"
                + (
                    ""
                    if self.duration_s is None
                    else f" within workload.duration_s={self.duration_s:g}"
                )
                + (
                    f" that the context of {max_model_len} holds"
                    if tally.left_out[too_long]
                    else ""
                )
            )
        return rows, tally.notes(self.name, len(rows), self.num_requests)

    def _number(self, hash_id: int) -> int:
        """The number of a block; distinct hashes have distinct ones."""
        if hash_id < COUNTED_FROM:
            return hash_id
        return self._numbers.setdefault(hash_id, COUNTED_FROM + len(self._numbers))

    def _lengths(self, row: TraceRow) -> tuple[int, int]:
        scale = self.length_scale
        return max(1, round(row.input_tokens * scale)), max(1, round(row.output_tokens * scale))

    def _runs(self, row: TraceRow, prompt_len: int, copy: int) -> Iterator[range]:
        """The prompt's stretches of text: one a block of the trace, or one of its own."""
        own = UNSHARED + row.line * STRETCH + copy * (STRETCH // self.copies)
        if not row.hash_ids:
            yield range(own, own + prompt_len)
            return
        size = self.block_tokens or row.block_tokens
        blocks = -(-row.input_tokens // size)
        # some hash whole blocks alone
        if len(row.hash_ids) not in (blocks, row.input_tokens // size):
            raise BadInput(self._other_blocks(row, size, blocks))
        scaled = size * self.length_scale
        spacing = size if self.length_scale <= 1 else math.ceil(scaled) + 1
        for k, block in enumerate(row.hash_ids):
            start, end = round(k * scaled), min(round((k + 1) * scaled), prompt_len)
            if k == blocks - 1:
                end = prompt_len  # rounding may have left a token over
            first = (self._number(block) * self.copies + copy) * spacing
            yield range(first, first + end - start)
        if (
            len(row.hash_ids) < blocks
            and (rest := prompt_len - round(len(row.hash_ids) * scaled)) > 0
        ):
            yield range(own, own + rest)

    def _other_blocks(self, row: TraceRow, size: int, blocks: int) -> str:
        """What to say of hash ids that are not as many as the prompt has blocks."""
        fitting = [
            format
            for format, columns in FORMATS.items()
            if columns.hash_ids
            and columns.block_tokens != size
            and len(row.hash_ids) == -(-row.input_tokens // columns.block_tokens)
        ]
        hint = (
            f"; blocks of {FORMATS[fitting[0]].block_tokens} are those of "
            f"workload.format={fitting[0]}"
            if fitting
            else ""
        )
        return (
            f"{self.path}:{row.line}: {row.input_tokens} prompt tokens are {blocks} blocks of "
            f"workload.block_tokens={size}, and the line has {len(row.hash_ids)} hash ids{hint}"
        )
