"""workload=multi_turn: conversations whose every turn carries all turns before."""

from __future__ import annotations

import numpy as np

from minivllm.bench.workloads.generator import Drawn, Reader
from minivllm.bench.workloads.lengths import check_amount, check_fits
from minivllm.bench.workloads.options import MultiTurnOptions
from minivllm.bench.workloads.synthetic import WORKLOAD_STREAM
from minivllm.bench.workloads.workload import Workload, WorkloadRequest

TALK_ADVICE = (
    "lower workload.turns, workload.input_len or workload.output_len, or raise "
    "model.max_model_len if it is below the model's own"
)


class MultiTurn(Drawn, MultiTurnOptions):
    """Users who talk: ask, read the answer, think, ask on.

    The workload holds what the users say and for how long they think. The answers are the engine's
    own, and become part of the next turn's prompt (see `Conversations`); with `ignore_eos` their
    lengths, and so the work, are the same whatever an engine says.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "multi_turn"
    LENGTHS = (*Drawn.LENGTHS, "turns")

    def check_lengths(self, max_model_len: int) -> None:
        """See Generator; it is the conversation that may be longer than the context."""
        count = round(self.num_conversations * self.lengths["turns"].typical)
        tokens = count * self.lengths["input_len"].typical
        check_amount(
            "workload.num_conversations times workload.turns", count, tokens, "ask for fewer"
        )
        longest = [self.lengths[name].longest for name in ("turns", "input_len", "output_len")]
        turns, own, output = (1 if length is None else length for length in longest)
        what = f"workload={self.name}: the longest last turn"
        check_fits(what, turns * own + (turns - 1) * output, output, max_model_len, TALK_ADVICE)

    def make(self, reader: Reader, seed: int) -> Workload:
        """The conversations, one after the other; see `Generator.generate`.

        Request `r2.0` opens the third conversation, `r2.1` follows it.
        """
        self.check_lengths(reader.max_model_len)
        rng = np.random.default_rng([WORKLOAD_STREAM, seed])
        further = reader.encode_further
        requests = []
        for i, turns in enumerate(self.lengths["turns"].sample(rng, self.num_conversations)):
            inputs, outputs = (self.lengths[name].sample(rng, turns) for name in Drawn.LENGTHS)
            prompts = reader.draw(inputs[:1], reader.encode, rng)
            prompts += reader.draw(inputs[1:], further, rng)
            thought = [self.think_s] * turns
            if self.think == "exponential":
                thought = rng.exponential(self.think_s, size=turns).tolist()
            history = 0
            for turn, (ids, output_len, think_s) in enumerate(
                zip(prompts, outputs, thought, strict=True)
            ):
                request = WorkloadRequest(
                    f"r{i}.{turn}",
                    ids,
                    output_len,
                    self.ignore_eos,
                    reader.text(ids),
                    follows=f"r{i}.{turn - 1}" if turn else None,
                    think_s=think_s if turn else None,
                    history_len=history,
                )
                what = f"workload={self.name}: turn {turn} of conversation {i}"
                check_fits(what, history + len(ids), output_len, reader.max_model_len, TALK_ADVICE)
                history = request.length
                requests.append(request)
        return Workload(tuple(requests))
