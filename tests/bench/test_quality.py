"""Quality figures by hand, on a fake engine whose logits are chosen; and whole windows of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.bench import quality
from minivllm.bench.quality import Reference, evaluate, identical_prefix, spans
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineOutput, LogitsEngine
from tests.bench.scripted import ScriptedClock, ScriptedEngine

# What follows each of three tokens, as probabilities.
REFERENCE = np.array([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.25, 0.25, 0.5]])
CANDIDATE = np.array([[0.25, 0.5, 0.25], [0.125, 0.75, 0.125], [0.5, 0.25, 0.25]])


class Markov(ScriptedEngine):
    """Logits that depend on the last token alone, off by a constant as real ones are; greedy tokens
    count up."""

    def __init__(self, chain: np.ndarray, wrong_from: int | None = None) -> None:
        super().__init__(ScriptedClock())
        self.chain, self.wrong_from = chain, wrong_from
        self.seen: list[int] = []  # lengths of the sequences that logits were asked of

    def logits(self, token_ids: list[int]) -> Any:
        self.seen.append(len(token_ids))
        return (np.log(self.chain[token_ids]) + 7.0).astype(np.float32)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        def changed(token: int) -> int:
            return token if self.wrong_from is None or token < self.wrong_from else token + 50

        return [
            EngineOutput(
                o.request_id, tuple(map(changed, o.token_ids)), o.finish_reason, o.started_s
            )
            for o in super().poll(timeout_s)
        ]


def make_reference(
    folder: Path, token_ids: list[int], window: int, stride: int, **changes: Any
) -> Reference:
    """The reference of REFERENCE over some tokens; the first `kl_tokens` distributions are
    stored."""
    predicted = [
        p for _, first, end in spans(len(token_ids), window, stride) for p in range(first, end)
    ]
    before = [token_ids[p - 1] for p in predicted]
    fields: dict[str, Any] = {
        "id": "r",
        "precision": "fp32",
        "token_ids": token_ids,
        "num_bytes": 2 * len(token_ids),
        "window": window,
        "stride": stride,
        "perplexity": 2.0,
        "top1": REFERENCE[before].argmax(1).tolist(),
        "kl_tokens": len(before),
        "prompts": [[1, 2], [2, 1]],
        "continuations": [[0, 1, 2, 3], [0, 1, 2, 3]],
        "folder": folder,
        **changes,
    }
    np.save(
        folder / quality.LOG_PROBS,
        np.log(REFERENCE[before]).astype(np.float16)[: fields["kl_tokens"]],
    )
    return Reference(**fields)


# ---- windows


def test_windows_by_hand() -> None:
    assert list(spans(10, 4, 2)) == [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    assert list(spans(10, 4, 4)) == [(0, 1, 4), (4, 5, 8), (8, 9, 10)]
    assert list(spans(9, 4, 4)) == [
        (0, 1, 4),
        (4, 5, 8),
    ]  # the last window holds one token: nothing to predict
    assert list(spans(3, 8, 4)) == [(0, 1, 3)]
    assert list(spans(1, 8, 4)) == []


@pytest.mark.parametrize("count", [2, 7, 31, 32, 33])
@pytest.mark.parametrize(("window", "stride"), [(8, 1), (8, 3), (8, 7), (8, 8), (64, 32)])
def test_every_token_is_predicted_once_and_with_its_context(
    count: int, window: int, stride: int
) -> None:
    predicted: list[int] = []
    for begin, first, end in spans(count, window, stride):
        assert end - begin <= window
        assert begin == 0 or first == begin + 1 or first - begin >= window - stride
        predicted += range(first, end)
    lost = set(range(1, count)) - set(predicted)
    assert predicted == sorted(set(predicted))
    # Only where windows do not overlap has a token nothing before it.
    assert not lost or (
        stride == window and lost == {p for p in range(1, count) if p % stride == 0}
    )


def test_the_engine_never_gives_more_than_a_window(tmp_path: Path) -> None:
    engine = Markov(CANDIDATE)
    evaluate(engine, make_reference(tmp_path, [0, 1, 2] * 100, 16, 8))
    assert max(engine.seen) < 16


# ---- figures by hand


def test_figures_by_hand(tmp_path: Path) -> None:
    engine = Markov(CANDIDATE, wrong_from=2)
    assert isinstance(engine, LogitsEngine)
    token_ids = [0, 1, 2, 2, 0]  # pairs 0>1, 1>2, 2>2, 2>0
    got = evaluate(engine, make_reference(tmp_path, token_ids, 8, 4))
    nats = -(math.log(0.5) + math.log(0.125) + math.log(0.25) + math.log(0.5)) / 4
    assert got.perplexity == pytest.approx(math.exp(nats), rel=1e-6)
    assert got.bits_per_byte == pytest.approx(nats / math.log(2) * 5 / 10, rel=1e-6)
    # After 0: 0.5 ln 2 + 0.25 ln 0.5 + 0 = 0.25 ln 2; after 1 nothing; after 2 as after 0: three of
    # four.
    assert got.kl_mean == pytest.approx(3 / 4 * 0.25 * math.log(2), rel=1e-3)  # stored in 16 bits
    assert got.top1_agreement == 0.25  # after 1 alone
    assert (got.prefix_mean, got.prefix_min, got.prefix_of, got.prompts) == (2.0, 2, 4, 2)
    assert (got.tokens, got.kl_tokens, got.kl_p99) == (4, 4, None)  # four are no sample for a p99
    assert (got.reference, got.reference_id, got.reference_perplexity) == ("fp32", "r", 2.0)


def test_the_reference_equals_itself(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 3, 500).tolist()
    got = evaluate(Markov(REFERENCE), make_reference(tmp_path, ids, 64, 32))
    assert got.kl_mean is not None and got.kl_p99 is not None
    assert 0 <= got.kl_mean < 1e-6 and got.kl_p99 < 1e-6
    assert (got.top1_agreement, got.prefix_mean) == (1.0, 4.0)


def test_kl_is_over_what_is_stored_and_the_rest_over_all(tmp_path: Path) -> None:
    ids = [0, 0, 0, 1, 1, 1]  # three pairs after 0 (KL 0.25 ln 2), two after 1 (KL 0)
    whole = evaluate(Markov(CANDIDATE), make_reference(tmp_path, ids, 4, 2))
    part = evaluate(Markov(CANDIDATE), make_reference(tmp_path, ids, 4, 2, kl_tokens=3))
    assert part.kl_tokens == 3 and part.tokens == whole.tokens == 5
    assert part.kl_mean == pytest.approx(0.25 * math.log(2), rel=1e-3)
    assert whole.kl_mean == pytest.approx(0.25 * math.log(2) * 3 / 5, rel=1e-3)
    assert (part.perplexity, part.top1_agreement) == (whole.perplexity, whole.top1_agreement)


def test_kl_is_of_the_reference_from_the_candidate() -> None:
    p, q = (np.log(np.array([row], dtype=np.float32)) for row in ([0.75, 0.25], [0.5, 0.5]))
    assert quality.kl_divergence(p, q)[0] == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6
    )
    assert quality.kl_divergence(q, p)[0] == pytest.approx(-0.5 * math.log(0.75), rel=1e-6)
    never = np.array([[0.0, -np.inf]], dtype=np.float32)
    assert quality.kl_divergence(never, p)[0] == pytest.approx(-math.log(0.75), rel=1e-6)
    assert quality.kl_divergence(p, never)[0] == math.inf


def test_log_softmax_of_large_and_ruled_out_logits() -> None:
    got = quality.log_softmax(np.array([[1e4, 1e4, -np.inf], [0.0, 0.0, 0.0]], dtype=np.float32))
    assert got[0, 0] == pytest.approx(-math.log(2)) and got[0, 2] == -np.inf
    assert got[1] == pytest.approx(-math.log(3))


def test_identical_prefix() -> None:
    assert identical_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert identical_prefix([1, 2], [1, 2, 4]) == 2
    assert identical_prefix([5], [6]) == 0
    assert identical_prefix([1, 2], [1, 2]) == 2


def test_greedy_asks_for_equal_lengths_past_the_end_of_the_text() -> None:
    engine = Markov(REFERENCE)
    assert quality.greedy(engine, [[1], [2, 1], [0]], 5) == [[0, 1, 2, 3, 4]] * 3
    asked = [params for _, params in engine.submitted.values()]
    assert asked == [SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)] * 3


def test_bits_per_byte_need_bytes() -> None:
    assert quality.bits_per_byte(math.log(2), 10, 20) == pytest.approx(0.5)
    assert quality.bits_per_byte(1.0, 10, None) is None
