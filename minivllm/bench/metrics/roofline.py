"""How close the engine's steps came to the hardware's limits.

An engine says what a token costs it in `EngineInfo.model`, a dictionary with

    streamed_weight_bytes   bytes of weights read by every forward pass, as stored now: all layers,
                            norms and the output head (also when tied), not the input embedding's
                            table, no experts
    expert_weight_bytes     bytes of one expert of a mixture (optional; 0 where it is missing)
    experts_per_token       experts that one token goes through, summed over the layers (optional)
    flops_per_token         operations of the matrix products of one token: 2 a parameter
    head_flops_per_row      those of the products that are made only where logits are wanted: of a
                            prompt's last token the output head, and the end of the last layer if
                            that is trimmed
    kv_bytes_per_token      bytes of keys and values that one token of context adds, all layers
    attention_flops_per_token_pair
                            operations of one query token against one token of context, all layers
    window                  tokens that layers with a sliding window see (optional; None: no window)
    windowed_share          share of the layers that have a window (optional; 0 where missing)
    dtype                   compute dtype, "bfloat16", "float16" or "float32"
    matrix_dtype            dtype of the fastest matrix products, if some multiply "int8" or
                            "float8_e4m3fn" (optional; the compute dtype where it is missing)
    device                  "cpu" or "cuda..." (optional; "cpu" where it is missing)

Formulas, after PaLM (Chowdhery et al. 2022, appendix B) and gpt-fast:

    decode bytes  = sum over pure decode steps of streamed_weight_bytes
                    + kv_bytes_per_token * tokens read
                    + expert_weight_bytes * the experts that the step ran
    MBU           = decode bytes / seconds of those steps / measured bandwidth
    prefill flops = sum over pure prefill steps of flops_per_token * tokens
                    + attention flops of the causal pairs + those of towers of images
    MFU           = prefill flops / seconds of those steps / measured matrix rate

Decode flops and prefill bytes are counted in the same way, so that flops / bytes is the arithmetic
intensity of each kind of step (Williams, Waterman and Patterson 2009).

A pure decode step computes one token of each of its requests and no prompt token; a pure prefill
step computes prompt tokens alone. How many experts a step runs depends on the tokens: an engine
counts them (`experts_run` of a step). For one that does not, they are taken to be those of one
token, a lower bound.

Tokens read are `context_tokens`, the sum of the sequences' lengths, but in layers with a sliding
window `window_tokens`, the sum of min(length, window); for an engine that does not count them at
least min(sum, window).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from minivllm.bench.hardware.limits import higher, probe
from minivllm.bench.hardware.readings import Roofline

MOST_PROBES = 4  # more, after a run that exceeds what the first one found
PHASES = ("schedule_ms", "draft_ms", "prepare_ms", "forward_ms", "sample_ms", "emit_ms")


def decodes(step: dict[str, Any]) -> bool:
    """Whether a step computes nothing but next tokens."""
    return bool(step["num_tokens"]) and not step["num_prefill_tokens"]


def prefills(step: dict[str, Any]) -> bool:
    """Whether a step computes nothing but prompts."""
    return bool(step["num_tokens"]) and step["num_prefill_tokens"] == step["num_tokens"]


def timed(
    steps: Sequence[dict[str, Any]], kind: Callable[[dict[str, Any]], bool], overlapped: bool
) -> list[int]:
    """Which steps of a kind have a time of their own.

    A step that is launched before the one before it has ended waits for that one in its own phases.
    So its time is from the beginning of the next to that of the one after, and only a step counts
    that is followed by two of its kind, the second without idleness before it (which is no gap):
    none is charged what another kind took.
    """
    flags = [kind(step) for step in steps]
    if not overlapped:
        return [i for i, is_one in enumerate(flags) if is_one]
    return [
        i for i in range(len(steps) - 2) if all(flags[i : i + 3]) and steps[i + 2].get("gap_ms")
    ]


def _timed(
    steps: Sequence[dict[str, Any]], kind: Callable[[dict[str, Any]], bool], overlapped: bool
) -> tuple[list[dict[str, Any]], float | None]:
    """Steps of a kind that have a time of their own, and their seconds; no steps, no seconds."""
    indices = timed(steps, kind, overlapped)
    if overlapped:
        seconds = math.fsum(steps[i + 2]["start_s"] - steps[i + 1]["start_s"] for i in indices)
    else:
        seconds = math.fsum(steps[i].get(phase) or 0.0 for i in indices for phase in PHASES) / 1000
    return [steps[i] for i in indices], seconds if indices else None


def usage(
    costs: dict[str, Any],
    steps: Sequence[dict[str, Any]],
    probes: Roofline,
    cache_bytes: int | None = None,
    overlapped: bool = False,
    window_s: float | None = None,
) -> Roofline:
    """MBU and MFU of a window's steps against the probed limits, and the share of it that these
    would have allowed.

    Args:
        costs: `EngineInfo.model`; an engine may tell no more than its device.
        steps: `BenchEngine.steps()`.
        probes: bandwidth and matrix rate, from `probe`.
        cache_bytes: size of the last-level cache.
        overlapped: steps were launched before the one before them had ended, see `timed`.
        window_s: from the first arrival to the last token.

    Returns:
        The record's `roofline`; what cannot be computed is None.
    """
    result = Roofline(probes.bandwidth_bytes_per_s, probes.matrix_flops_per_s, probes.matrix_dtype)
    if costs.keys() <= {"device"}:
        return result
    decode, result.decode_s = _timed(steps, decodes, overlapped)
    prefill, result.prefill_s = _timed(steps, prefills, overlapped)
    if decode:
        result.decode_bytes = sum(_bytes(costs, step) for step in decode)
        result.decode_flops = sum(_flops(costs, step) for step in decode)
        if result.decode_s and probes.bandwidth_bytes_per_s:
            result.mbu = result.decode_bytes / result.decode_s / probes.bandwidth_bytes_per_s
        if cache_bytes is not None:
            result.fits_cache = result.decode_bytes / len(decode) <= cache_bytes
    if prefill:
        result.prefill_bytes = sum(_bytes(costs, step) for step in prefill)
        result.prefill_flops = sum(_flops(costs, step) for step in prefill)
        if result.prefill_s and probes.matrix_flops_per_s:
            result.mfu = result.prefill_flops / result.prefill_s / probes.matrix_flops_per_s
    bandwidth, rate = probes.bandwidth_bytes_per_s, probes.matrix_flops_per_s
    if steps and bandwidth and rate and not result.fits_cache:
        result.least_s = sum(
            max(_bytes(costs, s) / bandwidth, _flops(costs, s) / rate) for s in steps
        )
        result.share = result.least_s / window_s if window_s else None
    return result


def exceeds(roofline: Roofline) -> bool:
    """Whether a run would have passed a limit that was measured, which none does but from the
    cache."""
    return not roofline.fits_cache and max(roofline.mbu or 0.0, roofline.mfu or 0.0) > 1


def raised(limits: Roofline, device: str, reached: Callable[[Roofline], Roofline]) -> Roofline:
    """Probe again, a few times, for limits that a run does not exceed. Needs torch.

    Whatever else uses a machine only lowers what a probe finds, so of all probes the highest limits
    count.

    Args:
        limits: that the run exceeds.
        device: of the run.
        reached: what the run reached, of given limits.
    """
    for _ in range(MOST_PROBES):
        again, _ = probe(device, limits.matrix_dtype or "float32")
        limits = higher(limits, again)
        if not exceeds(reached(limits)):
            break
    return limits


def in_windows(costs: dict[str, Any], everywhere: float, in_window: float) -> float:
    """Mean over the layers of a count that is another one in those with a sliding window."""
    return everywhere + costs.get("windowed_share", 0.0) * (in_window - everywhere)


def causal_pairs(length: float, count: float, window: float) -> float:
    """Pairs of one of the last `count` tokens of a sequence of `length` and a token that it sees,
    itself included."""

    def of_first(tokens: float) -> float:
        near = min(tokens, window)
        return near * (near + 1) / 2 + (tokens - near) * window

    return of_first(length) - of_first(length - count)


def _window_tokens(costs: dict[str, Any], step: dict[str, Any]) -> float:
    least = min(step["context_tokens"], costs.get("window") or step["context_tokens"])
    return float(step.get("window_tokens", least))


def _bytes(costs: dict[str, Any], step: dict[str, Any]) -> float:
    """Bytes that a step has to move: the weights that it streams and the keys and values of its
    context."""
    one, least = costs.get("expert_weight_bytes", 0.0), costs.get("experts_per_token", 0)
    context = step["context_tokens"]
    cached = costs["kv_bytes_per_token"] * in_windows(costs, context, _window_tokens(costs, step))
    return float(costs["streamed_weight_bytes"] + cached + one * step.get("experts_run", least))


def _flops(costs: dict[str, Any], step: dict[str, Any]) -> float:
    """Operations of a step, from below where it does not count its own pairs.

    `context_tokens` is the sum of the sequences' lengths after the step. In one that only decodes
    or only prefills requests of equal shares are assumed: a chunk of n tokens that ends at length L
    attends to n * L - n * (n - 1) / 2 pairs. Of others the last token of each request alone is
    known to attend to all of it. Within a window no token attends to more than its request has
    there.
    """
    tokens, requests = step["num_tokens"], max(1, step["num_requests"])
    is_uniform = decodes(step) or prefills(step)
    each, length = tokens / requests if is_uniform else 1.0, step["context_tokens"] / requests
    pairs = requests * (each * length - each * (each - 1) / 2)
    if (window := costs.get("window")) is not None:
        near = requests * causal_pairs(length, each, window)
        pairs = in_windows(costs, pairs, min(near, each * _window_tokens(costs, step)))
    body = costs["flops_per_token"] * tokens + costs["attention_flops_per_token_pair"] * pairs
    body += step.get("encoder_flops") or 0.0
    return body + costs["head_flops_per_row"] * (requests + (step.get("num_drafts") or 0))
