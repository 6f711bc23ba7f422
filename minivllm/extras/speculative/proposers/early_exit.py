"""speculative=early_exit: the first layers of the target and its head draft (self-speculation).

Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) and LayerSkip (Elhoushi et al. 2024,
arXiv:2404.16710) draft so. The keys and values of these layers are the target's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.engine.engine import Engine
from minivllm.engine.executor import ModelRunner
from minivllm.errors import BadInput
from minivllm.extras.speculative.options import EarlyExitOptions, require_layers
from minivllm.extras.speculative.proposer import MakeAttention
from minivllm.extras.speculative.proposers.model_drafts import ModelDrafts, widen
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.models.families.llama import Decoder, LlamaForCausalLM


class EarlyExit:
    """A model that ends after some of the target's layers; see CausalLM. It shares all modules.

    Args:
        model: the target, with all passes applied.
        layers: how many of its layers run.
        head_tokens: logits of so many first token ids alone; byte-pair ids are in the order of
            merging, so that frequent tokens come first. None: of all.

    Raises:
        BadInput: the target has too few layers, or its head is not a plain matrix.
    """

    def __init__(
        self, model: LlamaForCausalLM, layers: int, head_tokens: int | None = None
    ) -> None:
        decoder = model.model
        require_layers(layers, len(decoder.layers))
        self._decoder = _share(decoder)
        self._decoder.layers = decoder.layers[:layers]
        self._decoder.rope_of_layer = decoder.rope_of_layer[:layers]
        self._compute_logits = model.compute_logits
        self._head = _reduced_head(model, head_tokens)

    @torch.inference_mode()
    def __call__(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        hidden: Tensor = self._decoder(batch, attention)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits, the lowest for token ids beyond `head_tokens`."""
        if self._head is None:
            return self._compute_logits(hidden)
        first, count, vocab, cap = self._head
        logits = first(hidden)[:, :count]
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return widen(logits, vocab)


class EarlyExitProposer(ModelDrafts):
    """speculative=early_exit.

    Args:
        options: the knobs.
    """

    name = "early_exit"

    def __init__(self, options: EarlyExitOptions) -> None:
        self.options: EarlyExitOptions = options
        super().__init__()

    def attach(self, engine: Engine, attention: MakeAttention) -> None:
        super().attach(engine, attention)
        runner, self.loaded = engine.runner, engine.loaded
        model = EarlyExit(self.loaded.model, self.options.exit_layer, self.options.head_tokens)
        self.runner = ModelRunner(model, runner.attention, runner.device, runner.ops)
        self.executor = self.runner


def _share(module: Decoder) -> Decoder:
    """A module with the same parts, whose parts can be replaced."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


def _reduced_head(
    model: LlamaForCausalLM, head_tokens: int | None
) -> tuple[Callable[[Tensor], Tensor], int, int, float | None] | None:
    """A layer of the first rows of the head, their number, all rows' number, and the cap of its
    logits."""
    config = model.config
    if head_tokens is None or head_tokens >= config.vocab_size:
        return None
    sizes = head_tokens, config.vocab_size, config.final_soft_cap
    head = model.lm_head
    if isinstance(head, PanelLinear):
        return head.first(head_tokens), *sizes
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    shape = (config.vocab_size, config.hidden_size)
    if weight is None or tuple(weight.shape) != shape or not weight.is_floating_point():
        raise BadInput(
            f"speculative.head_tokens={head_tokens}: the head is stored in another form than a "
            "matrix of floats; use speculative.head_tokens=null, or leave the head out of `quant`"
        )
    # oneDNN keeps a weight in an order of its own, of which no part can be taken.
    rows = weight.to_dense()[:head_tokens].clone() if weight.is_mkldnn else weight[:head_tokens]
    bias = None if bias is None else bias[:head_tokens]
    return partial(nn.functional.linear, weight=rows, bias=bias), *sizes
