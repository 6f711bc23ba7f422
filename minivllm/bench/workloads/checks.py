"""What fits a context, and how large a workload may be."""

from __future__ import annotations

from minivllm.errors import BadInput

MOST_REQUESTS = 5_000_000  # of a workload; each takes about a kilobyte
MOST_TOKENS = 1 << 28  # of its prompts; each takes up to 36 bytes


def check_fits(
    what: str, prompt_len: int, output_len: int, max_model_len: int, advice: str
) -> None:
    """Raise BadInput, with `advice`, if prompt and output are together longer than the context."""
    if prompt_len + output_len > max_model_len:
        raise BadInput(
            f"{what} has {prompt_len} prompt + {output_len} output = {prompt_len + output_len} "
            f"tokens, and the context holds {max_model_len}: {advice}"
        )


def check_amount(what: str, requests: int, tokens: float, advice: str) -> None:
    """Raise BadInput, with `advice`, if a workload of so many requests and prompt tokens is more
    than memory should hold."""
    if requests > MOST_REQUESTS or tokens > MOST_TOKENS:
        raise BadInput(
            f"{what}: {requests:,} requests with about {tokens:.3g} prompt tokens, and a "
            f"workload has at most {MOST_REQUESTS:,} with {MOST_TOKENS:.3g}; {advice}"
        )
