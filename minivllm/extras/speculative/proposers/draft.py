"""speculative=draft: a second model drafts, or the target's own weights in another precision.

Speculative decoding with a second model: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023
(arXiv:2302.01318). With the target's weights in fewer bits: self-speculation by quantisation, as in
QuantSpec (Tiwari et al. 2025, arXiv:2502.10424).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.cache.kv import bytes_per_token, kv_cache
from minivllm.engine.engine import Engine
from minivllm.engine.executor import CausalLM, ModelRunner
from minivllm.errors import BadInput
from minivllm.extras.speculative.fit import of_draft, require_context
from minivllm.extras.speculative.options import DraftOptions
from minivllm.extras.speculative.proposer import LoadModel, MakeAttention
from minivllm.extras.speculative.proposers.model_drafts import ModelDrafts, widen
from minivllm.models.load.loading import LoadedModel


class SameVocabulary:
    """A model whose embedding and head are padded to another length than the target's; see
    CausalLM. The tokens of their tokenizer are the same.

    Args:
        model: drafts.
        own: token ids that its embedding holds.
        vocab: those of the target.
    """

    def __init__(self, model: CausalLM, own: int, vocab: int) -> None:
        self._model, self._own, self._vocab = model, own, vocab

    @torch.inference_mode()
    def __call__(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """Hidden states; a token that the embedding lacks is read as token 0."""
        ids = batch.token_ids
        return self._model(batch._replace(token_ids=ids.where(ids < self._own, 0)), attention)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the target's tokens, of which those that the head lacks have the lowest."""
        return widen(self._model.compute_logits(hidden), self._vocab)


class DraftProposer(ModelDrafts):
    """speculative=draft.

    The target's weights in another precision read and write the target's own keys and values. A
    second model has its own, in the same blocks: it computes what it has not computed yet, such as
    a prompt, before its first draft.

    Args:
        options: the knobs.
    """

    name = "draft"

    def __init__(self, options: DraftOptions) -> None:
        self.options: DraftOptions = options
        self.own_cache = options.model is not None or options.pruning is not None
        super().__init__()

    def load(self, load_model: LoadModel) -> int:
        quant = self.options.quant
        if quant is not None and self.options.lm_head and "lm_head" in quant:
            quant = {**quant, "lm_head": True}
        try:
            self.loaded = load_model(self.options.model, quant, self.options.pruning)
        except BadInput as error:
            raise (of_draft(error) if self.own_cache else error) from None
        if not self.own_cache:
            return 0
        model = self.loaded.model
        return bytes_per_token(model.attention_specs, model.dtype)

    def attach(self, engine: Engine, attention: MakeAttention) -> None:
        """Make the draft's runner and, for a model of its own, its cache.

        Raises:
            BadInput: the two models do not share a vocabulary, or the second one's context is
                shorter.
        """
        super().attach(engine, attention)
        runner, model, target = engine.runner, self.loaded.model, engine.loaded
        _require_same_vocabulary(self.loaded, target)
        backend = runner.attention
        if self.own_cache:
            specs, dtype = model.attention_specs, model.dtype
            self.kv = kv_cache(specs, engine.kv.layout, dtype, runner.device)
            backend = attention(self.loaded, self.kv)
        drafts: CausalLM = model
        sizes = self.loaded.config.vocab_size, target.config.vocab_size
        if sizes[0] != sizes[1]:
            drafts = SameVocabulary(model, *sizes)
        self.executor = self.runner = ModelRunner(drafts, backend, runner.device, runner.ops)


def _require_same_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    ids = [one.tokenizer and one.tokenizer.fast.get_vocab() for one in (draft, target)]
    sizes = draft.config.vocab_size, target.config.vocab_size
    if ids[0] != ids[1] if all(ids) else sizes[0] != sizes[1]:
        raise BadInput(
            "speculative.model: its tokens are not the target's (vocabularies of "
            f"{sizes[0]} and {sizes[1]}); a draft needs a model of the same tokenizer"
        )
    require_context(draft.max_model_len, target.max_model_len)
