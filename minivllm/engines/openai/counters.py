"""What a server reported of the requests of a window, as counters."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.engines.openai.stream import Tokens
from minivllm.models.load.tokenizer import Tokenizer

READ = 32  # answers whose text is tokenised


def stream_counters(
    seen: Sequence[tuple[int, Tokens]],
    prompts_as: str,
    queued_s: Sequence[float] = (),
    connections: int = 0,
    tokenizer: Tokenizer | None = None,
) -> dict[str, dict[str, float | str]]:
    """Counters of liveness by group: of the requests, and of how well tokens could be counted.

    Args:
        seen: of each request the length of its prompt, and its stream.
        prompts_as: how prompts were sent.
        queued_s: how long each request waited that found none of the client's connections free.
        connections: of the client, at most.
        tokenizer: of the model, for the texts of some answers.
    """
    tokens = [tokens for _, tokens in seen]
    counts = [(sent, t.prompt_tokens) for sent, t in seen if t.prompt_tokens is not None]
    lags = [t.end_lag_s for t in tokens if t.end_lag_s is not None]
    return {
        "engine": {
            "requests": float(len(tokens)),
            "prompts": prompts_as,
            "chunks": float(sum(t.chunks for t in tokens)),
            "tokens_counted_late": float(sum(t.late for t in tokens)),
            "prompts_of_other_length": float(sum(sent != counted for sent, counted in counts)),
        },
        "stream": {
            "tokens": float(sum(t.produced for t in tokens)),
            "tokens_misplaced": float(sum(t.misplaced for t in tokens)),
            "requests_uncounted": float(sum(not t.countable for t in tokens)),
            "prompt_tokens_sent": float(sum(sent for sent, _ in counts)),
            "prompt_tokens_counted": float(sum(counted for _, counted in counts)),
            "end_lag_ms": 1e3 * sum(lags) / len(lags) if lags else 0.0,
            "requests_queued_in_client": float(len(queued_s)),
            "client_queue_ms": 1e3 * sum(queued_s) / len(queued_s) if queued_s else 0.0,
            "client_connections": float(connections),
            **({} if tokenizer is None else _texts(tokens, tokenizer)),
        },
        "cache": {"cached_prompt_tokens": float(sum(t.cached_tokens or 0 for t in tokens))},
    }


def _texts(tokens: Sequence[Tokens], tokenizer: Tokenizer) -> dict[str, float]:
    """Of some answers the tokens that the server counts, without those that have no text where it
    tells their ids, and the tokens of their text by our own tokenizer."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, False))

    answers = [one for one in tokens if one.produced and not one.calls_a_tool][:READ]
    counted = [count(tokenizer.decode(one.ids)) if one.by_ids else one.produced for one in answers]
    return {
        "tokens_of_texts": float(sum(counted)),
        "text_tokens": float(sum(count("".join(one.texts)) for one in answers)),
    }
