"""Train minivllm's embedded model from scratch on the Python standard library.

    python scripts/train_tiny.py --minutes 95 --output minivllm/assets/tiny

Everything it reads is on the machine already: the `.py` files of the running interpreter's
standard library (PSF licence). It trains a byte-level BPE tokenizer and a small Qwen3-architecture
model whose intermediate layers can also predict (LayerSkip, Elhoushi et al. 2024: one shared head,
an early-exit loss whose weight rises with depth, layer dropout), and writes a folder that both
minivllm and transformers load: config.json, model.safetensors, tokenizer.json, plus a model card,
the loss curve and a held-out text.

The learning-rate schedule runs on elapsed time, so that a budget in minutes is kept on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from minivllm.models.load.checkpoint import SINGLE, share
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer_files import TEMPLATE
from minivllm.passes.pruning.texts import split_standard_library

END_OF_TEXT = "<|endoftext|>"
# Qwen2's pre-tokenisation, but numbers in groups of up to three digits.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HELD_OUT_SAMPLE_BYTES = 100_000
PROMPTS = (
    "def __init__(self, ",
    "import os\nimport sys\n\ndef main():\n    ",
    '    """Return the ',
    "for key, value in ",
)


@dataclass(frozen=True)
class ModelShape:
    """Qwen3 hyper-parameters of the embedded model, as `config.json` names them."""

    vocab_size: int = 6144
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def to_config(self, end_of_text: int) -> dict[str, object]:
        """The checkpoint's config.json, in the spelling transformers 5 writes."""
        theta = self.rope_theta
        shape = {k: v for k, v in vars(self).items() if k != "rope_theta"}
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **shape,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": end_of_text,
            "dtype": "bfloat16",
        }


# ---------------------------------------------------------------- text


def read_texts(paths: list[Path]) -> list[str]:
    """Decoded, de-duplicated texts; a file that is not UTF-8 (some test fixtures) is left out."""
    texts: dict[str, None] = {}
    for path in paths:
        try:
            texts[path.read_text(encoding="utf-8")] = None
        except UnicodeDecodeError:
            continue
    return list(texts)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: every byte string can be encoded, none is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """One int64 stream of all texts, each preceded by the end-of-text token. [tokens]"""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.append(end)
        ids.extend(encoding.ids)
    return torch.tensor(ids)


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    """Qwen3 attention: grouped queries, RMSNorm on the heads of q and k, rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query, key = shape.num_attention_heads, shape.num_key_value_heads
        self.q_proj = nn.Linear(shape.hidden_size, query * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(query * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k = (rotate(t, cos, sin).to(v.dtype) for t in (q, k))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer, parameters named as in the checkpoint."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama checkpoints."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T` without ever holding all logits.

    Gradients are formed chunk by chunk in the forward pass (as in Apple's cut cross-entropy and
    Liger), so that a chunk of logits stays in the cache of the CPU.
    """

    CHUNK = 1024

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        weight16 = weight.to(torch.bfloat16)
        grad_hidden = torch.empty_like(hidden, dtype=torch.bfloat16)
        grad_weight = torch.zeros_like(weight)
        loss = torch.zeros(())
        for start in range(0, hidden.shape[0], LinearCrossEntropy.CHUNK):
            part = slice(start, start + LinearCrossEntropy.CHUNK)
            rows = hidden[part].to(torch.bfloat16)
            target = targets[part, None]
            log_probs = F.log_softmax((rows @ weight16.T).float(), dim=-1)
            loss -= log_probs.gather(1, target).sum()
            grad = log_probs.exp_()
            grad.scatter_add_(1, target, torch.full(target.shape, -1.0))
            grad16 = (grad / hidden.shape[0]).to(torch.bfloat16)
            grad_hidden[part] = grad16 @ weight16
            grad_weight += (grad16.T @ rows).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss / hidden.shape[0]

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_output, grad_weight * grad_output, None


class TinyModel(nn.Module):
    """The embedded model in training form; `state_dict` has the checkpoint's names."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        positions = torch.arange(shape.max_position_embeddings).float()
        frequencies = shape.rope_theta ** (
            -torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        )
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / math.sqrt(2 * shape.num_hidden_layers) if residual else 0.02
                nn.init.normal_(parameter, std=scale)

    def hidden_states(
        self,
        ids: Tensor,
        skip: frozenset[int] = frozenset(),
        layers: Sequence[nn.Module] | None = None,
    ) -> list[Tensor]:
        """Residual stream after every layer; those in `skip` pass their input through.

        `layers` stand in for the model's own: compiled ones, which training's few shapes are worth.
        """
        x = self.embed_tokens(ids)
        length = ids.shape[1]
        states = []
        for index, layer in enumerate(layers or self.layers):
            if index not in skip:
                x = layer(x, self.cos[:length], self.sin[:length])
            states.append(x)
        return states

    def loss(self, state: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of the shared head on one layer's output."""
        return LinearCrossEntropy.apply(
            self.norm(state).flatten(0, 1), self.embed_tokens.weight, targets.flatten()
        )

    @torch.inference_mode()
    def bits_per_byte(self, stream: Tensor, num_bytes: int) -> list[float]:
        """Held-out bits per byte when leaving after layer 1, 2, ..., in windows of the full
        context."""
        window = self.shape.max_position_embeddings
        totals = [0.0] * self.shape.num_hidden_layers
        with torch.autocast("cpu", torch.bfloat16):
            for start in range(0, len(stream) - 1, window):
                chunk = stream[start : start + window + 1]
                states = self.hidden_states(chunk[None, :-1])
                for index, state in enumerate(states):
                    totals[index] += float(self.loss(state, chunk[None, 1:])) * (len(chunk) - 1)
        return [total / math.log(2) / num_bytes for total in totals]

    @torch.inference_mode()
    def complete(self, ids: list[int], max_tokens: int, generator: torch.Generator) -> list[int]:
        """Sample a continuation at temperature 0.6 (recomputing everything: this is training
        code)."""
        ids = list(ids)
        for _ in range(max_tokens):
            state = self.norm(self.hidden_states(torch.tensor([ids]))[-1][0, -1])
            probs = torch.softmax(self.embed_tokens.weight @ state / 0.6, dim=-1)
            ids.append(int(torch.multinomial(probs, 1, generator=generator)))
        return ids

    def checkpoint(self) -> dict[str, Tensor]:
        """Tensors under the names a transformers Qwen3 checkpoint has, in bfloat16."""
        return {
            f"model.{k}": v.detach().to(torch.bfloat16).contiguous()
            for k, v in self.state_dict().items()
        }


# ---------------------------------------------------------------- training


def window_length(fraction: float, longest: int) -> int:
    """Training window in tokens: short ones teach most of it at a lower cost, long ones come
    last."""
    return 256 if fraction < 0.7 else 512 if fraction < 0.92 else longest


@dataclass
class Progress:
    """What training did, for the model card."""

    tokens: int = 0
    steps: int = 0
    # min, tokens, loss, bpb
    curve: list[tuple[float, int, float, float]] = field(default_factory=list)


def learning_rate_scale(fraction: float) -> float:
    """Warm up over 2 % of the budget, hold, then decay linearly to zero over the last 60 %."""
    return min(fraction / 0.02, 1.0, (1.0 - fraction) / 0.6)


def train(
    model: TinyModel,
    stream: Tensor,
    held: Tensor,
    held_bytes: int,
    minutes: float,
    seed: int,
    batch_tokens: int,
) -> Progress:
    """Optimise `model` in place for `minutes`; matrices by Muon (Jordan et al. 2024), the rest by
    AdamW."""
    generator = torch.Generator().manual_seed(seed)
    layers = model.shape.num_hidden_layers
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=4e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    bases = [(group, group["lr"]) for opt in (muon, adam) for group in opt.param_groups]
    compiled = [torch.compile(layer, dynamic=False) for layer in model.layers]
    progress = Progress()
    started = last_report = time.monotonic()
    running = math.nan
    while (fraction := (time.monotonic() - started) / 60 / minutes) < 1.0:
        length = window_length(fraction, model.shape.max_position_embeddings)
        rows = batch_tokens // length
        starts = torch.randint(len(stream) - length - 1, (rows,), generator=generator)
        batch = torch.stack([stream[s : s + length + 1] for s in starts.tolist()])
        # LayerSkip: dropout grows with depth up to 10 %; one exit a step, in rotation.
        chance = torch.rand(layers, generator=generator)
        skip = frozenset(
            i for i in range(layers) if chance[i] < 0.1 * (2 ** (i / (layers - 1)) - 1)
        )
        exit_layer = progress.steps % (layers - 1)
        with torch.autocast("cpu", torch.bfloat16):
            states = model.hidden_states(batch[:, :-1], skip, compiled)
            loss = model.loss(states[-1], batch[:, 1:])
            half = slice(None, None, 2)
            early = model.loss(states[exit_layer][:, half], batch[:, 1:][:, half])
        (loss + 0.3 * (exit_layer + 1) / layers * early).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, base in bases:
            group["lr"] = base * learning_rate_scale(fraction)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.steps += 1
        progress.tokens += rows * length
        value = float(loss.detach())
        running = value if math.isnan(running) else 0.98 * running + 0.02 * value
        if time.monotonic() - last_report > 60 * minutes / 30 or progress.steps == 20:
            bits = model.bits_per_byte(
                held[:40_000], int(held_bytes * min(1.0, 40_000 / len(held)))
            )[-1]
            elapsed = (time.monotonic() - started) / 60
            progress.curve.append((elapsed, progress.tokens, running, bits))
            print(
                f"{elapsed:6.1f} min  {progress.tokens:>11,} tokens  loss {running:.3f}  "
                f"held-out {bits:.3f} bits/byte",
                flush=True,
            )
            last_report = time.monotonic()
    return progress


def model_card(
    shape: ModelShape,
    parameters: int,
    sizes: dict[str, int],
    progress: Progress,
    exits: list[float],
    samples: list[str],
) -> str:
    """README.md beside the weights: what it is, how it was made, how good it is."""
    curve = "\n".join(
        f"| {m:.1f} | {t:,} | {loss:.3f} | {b:.3f} |" for m, t, loss, b in progress.curve
    )
    per_exit = "\n".join(f"| {i + 1} | {bits:.3f} |" for i, bits in enumerate(exits))
    text = "\n\n".join(f"```python\n{sample}\n```" for sample in samples)
    return f"""# The embedded model

A Qwen3-architecture language model of {parameters / 1e6:.1f} M parameters ({shape.num_hidden_layers} layers, hidden
{shape.hidden_size}, {shape.num_attention_heads} query and {shape.num_key_value_heads} key-value heads of {shape.head_dim}, tied
embeddings, context {shape.max_position_embeddings:,}), trained from scratch by `scripts/train_tiny.py` on the sources of the
Python {platform.python_version()} standard library. It writes text that looks like Python; it knows nothing else, and it
is a base model: it completes, it does not chat. Its chat template joins the contents of a conversation,
each from a new line on, and the model continues them: so every API answers, and none of them is a talk.

**Licence.** The training text, `heldout.txt` and therefore this model derive from the Python standard
library, Copyright (c) 2001 Python Software Foundation, under the PSF License Agreement
(<https://docs.python.org/3/license.html>).

**Data.** {sizes["files"]} training files, {sizes["train_bytes"] / 1e6:.1f} MB, {sizes["train_tokens"]:,} tokens of a
{shape.vocab_size}-entry byte-level BPE. {sizes["held_files"]} files ({sizes["held_bytes"] / 1e3:.0f} kB,
{sizes["held_tokens"]:,} tokens) were held out by a hash of their path; tests of held-out modules were left out
too. `heldout.txt` is the first {HELD_OUT_SAMPLE_BYTES // 1000} kB of the held-out files.

**Training.** {progress.steps:,} steps, {progress.tokens:,} tokens ({progress.tokens / sizes["train_tokens"]:.1f} epochs), bf16
autocast, Muon for matrices and AdamW for the rest, one early-exit loss a step in rotation and layer
dropout up to 10 % (LayerSkip), windows of 256 tokens, later 512, and {shape.max_position_embeddings:,} for the last 8 %.

| minutes | tokens | training loss (nats/token, running mean) | held-out bits/byte (first 40,000 tokens) |
| --- | --- | --- | --- |
{curve}

**Held-out bits per byte by exit layer** (all held-out files, the shared norm and head applied after that
layer; the last row is the model itself)

| layer | bits/byte |
| --- | --- |
{per_exit}

**Completions** at temperature 0.6, unselected:

{text}
"""  # noqa: E501  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=95.0, help="training time")
    parser.add_argument(
        "--output", type=Path, default=Path("minivllm/assets/tiny"), help="folder to write"
    )
    parser.add_argument("--batch-tokens", type=int, default=8_192, help="tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    shape = ModelShape()

    training_files, held_files = split_standard_library()
    texts, held_texts = read_texts(training_files), read_texts(held_files)
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    stream, held = encode(tokenizer, texts), encode(tokenizer, held_texts)
    sizes = {
        "files": len(texts),
        "held_files": len(held_texts),
        "train_bytes": sum(len(t.encode()) for t in texts),
        "held_bytes": sum(len(t.encode()) for t in held_texts),
        "train_tokens": len(stream),
        "held_tokens": len(held),
    }
    print(json.dumps(sizes), flush=True)

    model = TinyModel(shape)
    progress = train(
        model, stream, held, sizes["held_bytes"], args.minutes, args.seed, args.batch_tokens
    )
    exits = model.bits_per_byte(held, sizes["held_bytes"])
    generator = torch.Generator().manual_seed(args.seed)
    samples = [
        tokenizer.decode(model.complete(tokenizer.encode(END_OF_TEXT + p).ids, 80, generator))
        for p in PROMPTS
    ]

    args.output.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END_OF_TEXT)
    save_file(model.checkpoint(), args.output / SINGLE, metadata={"format": "pt"})
    share(args.output / SINGLE)
    tokenizer.save(str(args.output / "tokenizer.json"))
    jsons = {
        "config.json": shape.to_config(end),
        "generation_config.json": {"eos_token_id": end},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "model_max_length": shape.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in jsons.items():
        (args.output / name).write_text(json.dumps(content, indent=2) + "\n")
    (args.output / TEMPLATE).write_text((EMBEDDED / TEMPLATE).read_text())
    sample = "".join(held_texts).encode()[:HELD_OUT_SAMPLE_BYTES].decode(errors="ignore")
    (args.output / "heldout.txt").write_text(sample)
    parameters = sum(p.numel() for p in model.parameters())
    (args.output / "README.md").write_text(
        model_card(shape, parameters, sizes, progress, exits, samples)
    )
    print(f"held-out {exits[-1]:.3f} bits/byte, written to {args.output}")


if __name__ == "__main__":
    main()
