"""What every figure of a record is: the metrics, and the figures that are read or counted rather
than timed."""

from __future__ import annotations

import inspect
import re
from typing import Literal, NamedTuple

from minivllm.bench.metrics.latency import Metric
from minivllm.bench.metrics.metrics import METRICS


class Figure(NamedTuple):
    """One entry of the glossary: a figure of the record, and what it is."""

    name: str  # the field's dotted name in the record
    unit: str
    direction: Literal["lower", "higher"] | None  # which is better; None: neither
    description: str
    formula: str
    example: str  # a case by hand


# the entries of the record outside `metrics`
FIGURES = (
    Figure(
        "memory.weights",
        "bytes",
        "lower",
        "All weights as the quantisation stores them, scales included, tied tensors once.",
        "sum of the tensors' bytes.",
        "0.6 billion parameters at 2 bytes are 1.2 GB; at half a byte and a 4-byte scale for "
        "every 64, 0.34 GB.",
    ),
    Figure(
        "memory.kv_pool",
        "bytes",
        "lower",
        "Size of the key-value cache that was set aside; on a CPU its pages take memory only once "
        "they are written to.",
        "blocks * block_size * bytes of one token's keys and values.",
        "1,000 blocks of 16 tokens at 4,096 bytes: 65.5 MB.",
    ),
    Figure(
        "memory.kv_waste",
        "share",
        "lower",
        "Share of the allocated cache slots that hold no token, mean over the steps.",
        "wasted slots / allocated slots of each step, mean over the steps.",
        "a request of 20 tokens in 2 blocks of 16 wastes 12 of 32 slots: 0.375.",
    ),
    Figure(
        "memory.device_peak_allocated",
        "bytes",
        "lower",
        "Most device memory that torch's allocator had handed out at once.",
        "torch.cuda.max_memory_allocated() of the window.",
        "weights of 16 GB, a pool of 40 GB and 2 GB of activations at the worst moment: 58 GB.",
    ),
    Figure(
        "memory.host_rss_peak",
        "bytes",
        "lower",
        "Greatest resident memory of the worker and what it started (the sum of their own peaks), "
        "without the probe; of an engine in processes of its own, without the worker.",
        "the kernel's high-water mark (VmHWM), of loading and of the window, the greater; reset "
        "before the window where that is allowed.",
        "Python and torch with 0.4 GB and weights of 1.2 GB: 1.6 GB.",
    ),
    Figure(
        "energy.joules",
        "J",
        "lower",
        "Energy of the measured window, read from a hardware counter; null with the reason where "
        "there is none.",
        "counter after the window - counter before it, the device idle at both readings.",
        "9,000 J before and 13,000 J after: 4,000 J.",
    ),
    Figure(
        "energy.joules_per_output_token",
        "J/token",
        "lower",
        "Energy for each output token, over the window of the throughput.",
        "joules / output tokens.",
        "4,000 J for 2,000 tokens: 2 J/token.",
    ),
    Figure(
        "energy.mean_watts",
        "W",
        "lower",
        "Mean power over the window.",
        "joules / length of the window.",
        "4,000 J in 10 s: 400 W.",
    ),
    Figure(
        "energy.joules_above_idle",
        "J",
        "lower",
        "What the work took beyond a device that only waits, the engine loaded.",
        "joules - idle watts * length of the window.",
        "4,000 J in 10 s at 100 W idle: 3,000 J.",
    ),
    Figure(
        "cost.per_million_output_tokens",
        "currency",
        "lower",
        "Money for a million output tokens, at the prices of `measure.price`.",
        "1e6 * (price of a device-hour / 3600 + price of a kWh * mean watts / 3.6e6) / output "
        "tokens a second.",
        "3.60 an hour and no price of energy, at 1,000 tokens/s: 1.00.",
    ),
    Figure(
        "roofline.bandwidth_bytes_per_s",
        "bytes/s",
        "higher",
        "Memory bandwidth as measured when the run began: the fastest of several reads of 1 GiB.",
        "bytes read / shortest time.",
        "1.07e9 bytes in 50 ms: 21.5 GB/s.",
    ),
    Figure(
        "roofline.matrix_flops_per_s",
        "FLOP/s",
        "higher",
        "Rate of a square matrix product in the compute dtype, or in the 8 bits that some layers "
        "multiply in, by the fastest kernel at hand, as measured when the run began.",
        "2 n^3 / shortest time, the better of two n.",
        "n = 2,048 in 10 ms: 1.72 TFLOP/s.",
    ),
    Figure(
        "roofline.mbu",
        "share",
        "higher",
        "Model bandwidth utilisation: share of the measured bandwidth that pure decode steps "
        "needed.",
        "(streamed weights + keys and values of the context, summed over the steps) / their "
        "seconds / bandwidth.",
        "1.2 GB of weights and 0.3 GB of cache a step of 100 ms, at 20 GB/s: 0.75.",
    ),
    Figure(
        "roofline.mfu",
        "share",
        "higher",
        "Model FLOP utilisation: share of the measured matrix rate that pure prefill steps needed.",
        "(operations of the tokens' matrix products and attention) / their seconds / matrix rate.",
        "1,000 tokens at 1.2 GFLOP each in 1 s, at 2 TFLOP/s: 0.6.",
    ),
    Figure(
        "roofline.share",
        "share",
        "higher",
        "Share of the run that its steps would have taken at the measured limits: the rest is "
        "what a perfect engine gains.",
        "sum over all steps of max(bytes / bandwidth, operations / matrix rate) / the run's "
        "duration.",
        "steps that need 60 s at the limits, in a run of 80 s: 0.75.",
    ),
    Figure(
        "breakdown.forward_ms",
        "ms",
        "lower",
        "The model's part of a mean step; on a GPU its launch: the wait is in sample_ms.",
        "sum of the steps' forward times / steps.",
        "400 steps that spend 36 s in the model: 90 ms.",
    ),
    Figure(
        "breakdown.gap_ms",
        "ms",
        "lower",
        "From the end of one step to the start of the next: what the driver takes. Time without "
        "any request, or waiting for a fuller batch, is no gap.",
        "sum of the gaps / steps.",
        "400 gaps of 20 ms in all: 0.05 ms.",
    ),
    Figure(
        "breakdown.collective_share",
        "share",
        "lower",
        "Share of communication in a step; null with one rank, and on GPUs.",
        "rank 0's time in collectives, waits for slower ranks included / time of the steps.",
        "10 ms in collectives of steps of 40 ms: 0.25.",
    ),
    Figure(
        "cold.load_s",
        "s",
        "lower",
        "Building the engine, weights included: what is paid once, before anything is measured.",
        "seconds from the start of building to the engine being ready, without cold.compile_s.",
        "1.2 GB of weights from a disk that reads 0.6 GB/s: 2 s and a little.",
    ),
    Figure(
        "cold.first_batch_s",
        "s",
        "lower",
        "The first warm-up batch, in which kernels are chosen and memory is touched for the first "
        "time.",
        "seconds of the first warm-up.",
        "0.8 s, where the same batch later takes 0.3 s.",
    ),
    Figure(
        "speculation.draft_acceptance_rate",
        "share",
        "higher",
        "Share of the draft tokens that were accepted; tokens after a wrong one are not.",
        "accepted tokens / draft tokens.",
        "drafts of 3 tokens each, of which 3 and 1 are accepted: 4 of 6, 0.667.",
    ),
    Figure(
        "speculation.mean_acceptance_length",
        "tokens",
        "higher",
        "Tokens that a step gives to a request that drafts.",
        "1 + accepted tokens / drafts.",
        "4 accepted tokens of 2 drafts: 3.",
    ),
    Figure(
        "speculation.tokens_per_step",
        "tokens",
        "higher",
        "Tokens that a step gives to a decoding request, with a draft or without: what ITL gains "
        "by, if steps take no longer.",
        "1 + accepted tokens / decoding requests, summed over the steps.",
        "4 accepted tokens in 2 steps with drafts and 6 without, of one request: 1.5.",
    ),
    Figure(
        "speculation.draft_ms",
        "ms",
        "lower",
        "Drafting in a step that verifies drafts, attempts that found no draft included.",
        "time spent on drafting / steps with drafts.",
        "12 ms in 6 steps: 2 ms.",
    ),
    Figure(
        "speculation.verify_ms",
        "ms",
        "lower",
        "Forward pass and sampling of a step that verifies drafts and computes no prompt.",
        "sum of forward and sampling times / these steps.",
        "6 such steps of 11 ms and 1 ms: 12 ms.",
    ),
    Figure(
        "speculation.plain_ms",
        "ms",
        "lower",
        "The same of steps without drafts, at the numbers of requests that steps with drafts have.",
        "mean forward and sampling time for each number of requests, weighted by the steps with "
        "drafts.",
        "10 ms for one request and 14 ms for two, and as many steps with drafts of each: 12 ms.",
    ),
    Figure(
        "speculation.token_acceptance",
        "share",
        "higher",
        "Probability that a draft token is right if those before it are.",
        "a with mean over drafts of (a + a^2 + ... + a^D) = accepted tokens / drafts.",
        "drafts of 2 tokens with 0.75 accepted on average: 0.5 + 0.25, so 0.5.",
    ),
    Figure(
        "speculation.break_even_acceptance",
        "share",
        "lower",
        "The token acceptance from which on drafts pay, at the measured costs; above 1 not even "
        "perfect drafts do.",
        "a with 1 + share of requests that draft * mean over drafts of (a + a^2 + ... + a^D) = "
        "(draft_ms + verify_ms) / plain_ms.",
        "drafts of 1 token for every request, 2 + 12 ms against 10 ms: 1 + a = 1.4, so 0.4.",
    ),
    Figure(
        "jobs.latency_s",
        "s",
        "lower",
        "How long a job takes: a session of an agent with its sub-agents and tools.",
        "end of its last answer - scheduled start of its first call, a sample a job.",
        "first call due at 10 s, last answer at 55 s: 45 s.",
    ),
    Figure(
        "jobs.jobs_per_hour",
        "jobs/h",
        "higher",
        "Jobs that ran from their beginning to their end, per hour of the window.",
        "3600 * jobs / length of the window.",
        "8 jobs in 120 s: 240.",
    ),
    Figure(
        "jobs.jobs_per_hour_per_device",
        "jobs/h",
        "higher",
        "The same for each device that the engine computes on.",
        "jobs_per_hour / devices.",
        "240 jobs an hour on 2 devices: 120.",
    ),
    Figure(
        "jobs.jobs_per_hour_per_user",
        "jobs/h",
        "higher",
        "Jobs that one user gets done who begins the next when the last has ended.",
        "3600 / mean job latency.",
        "jobs of 45 s: 80.",
    ),
    Figure(
        "jobs.hit_rate",
        "share",
        "higher",
        "Share of the prompt tokens that the prefix cache had; null where the engine does not say.",
        "cached prompt tokens / prompt tokens.",
        "prompts of 100 and 180 tokens, 96 of the second cached: 0.343.",
    ),
    Figure(
        "jobs.optimal_hit_rate",
        "share",
        "higher",
        "The same of a cache that drops nothing and knows a prompt once it is submitted.",
        "sum of the whole blocks that a prompt begins with as an earlier one does / prompt tokens.",
        "the second prompt begins with all 100 tokens of the first, blocks of 16: 96 / 280, 0.343.",
    ),
    Figure(
        "jobs.live_tokens",
        "tokens",
        None,
        "Most tokens that sessions under way had computed at one time, each counted once: a cache "
        "of that size keeps every session whole.",
        "maximum over time of the sum over sessions of (prompt - shareable + output tokens) so "
        "far.",
        "two sessions at once, which have computed 3,000 and 2,000 tokens: 5,000.",
    ),
    Figure(
        "jobs.joules_per_job",
        "J",
        "lower",
        "Energy of a job, where all sessions are jobs.",
        "joules / jobs.",
        "4,000 J for 8 jobs: 500 J.",
    ),
    Figure(
        "jobs.cost_per_job",
        "currency",
        "lower",
        "Money for a job by the hours and the energy, where all sessions are jobs.",
        "(device-hours * their price + kWh * their price) / jobs.",
        "120 s at 3.60 an hour for 8 jobs: 0.015.",
    ),
    Figure(
        "jobs.token_cost_per_job",
        "currency",
        "lower",
        "Money for a job by its tokens, with cached ones at a price of their own.",
        "(uncached * million_input + cached * million_cached + output * million_output) / 1e6 / "
        "jobs.",
        "1 million uncached at 3.00, 9 million cached at 0.30, for 10 jobs: 0.57.",
    ),
    Figure(
        "quality.perplexity",
        "1",
        "lower",
        "How surprised the model is by a held-out text.",
        "exp(mean negative log-likelihood of the next token).",
        "tokens predicted with probabilities 1/2 and 1/8: exp((ln 2 + ln 8) / 2) = 4.",
    ),
    Figure(
        "quality.kl_mean",
        "nats/token",
        "lower",
        "Kullback-Leibler divergence of the next-token distribution from the reference "
        "precision's.",
        "mean over tokens of sum of p_reference * ln(p_reference / p).",
        "reference (1/2, 1/2) and here (1/4, 3/4): 0.144 nats.",
    ),
    Figure(
        "quality.top1_agreement",
        "share",
        "higher",
        "Share of tokens at which the likeliest next one is the reference's.",
        "tokens with the same argmax / tokens.",
        "992 of 1,000: 0.992.",
    ),
    Figure(
        "quality.prefix_mean",
        "tokens",
        "higher",
        "Greedy tokens identical with the reference's before the first that differs, mean over "
        "prompts.",
        "sum of the identical prefixes / prompts.",
        "64 and 20 tokens: 42.",
    ),
)


def glossary() -> list[dict[str, str | None]]:
    """Name, unit, direction, description, formula and example of every figure."""
    metrics = [_from_docstring(type(metric)) for metric in METRICS]
    return [figure._asdict() for figure in (*metrics, *FIGURES)]


def _from_docstring(cls: type[Metric]) -> Figure:
    """A metric's entry: its class has the name, its docstring the words."""
    parts = re.split(
        r"^(?:Formula|Example):", inspect.cleandoc(cls.__doc__ or ""), flags=re.MULTILINE
    )
    description, formula, example = (" ".join(part.split()) for part in parts)
    return Figure(cls.name, cls.unit, cls.direction, description, formula, example)
