"""speculative=draft: a second model drafts, or the target's own weights in another precision.

Speculative decoding with a second model: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023
(arXiv:2302.01318). With the target's weights in fewer bits: self-speculation by quantisation, as in
QuantSpec (Tiwari et al. 2025, arXiv:2502.10424).
"""

from __future__ import annotations

from minivllm.cache.compression.eight_bits import kv_cache
from minivllm.cache.kv import bytes_per_token
from minivllm.engine.engine import Engine
from minivllm.engine.executor import ModelRunner
from minivllm.errors import BadInput
from minivllm.extras.speculative.model_drafts import ModelDrafts
from minivllm.extras.speculative.options import DraftOptions
from minivllm.extras.speculative.proposer import LoadModel, MakeAttention
from minivllm.models.load.loading import LoadedModel


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
        self.own_cache = options.model is not None
        super().__init__()

    def load(self, load_model: LoadModel) -> int:
        """See Proposer."""
        quant = self.options.quant
        if quant is not None and self.options.lm_head and "lm_head" in quant:
            quant = {**quant, "lm_head": True}
        self.loaded = load_model(self.options.model, quant)
        if not self.own_cache:
            return 0
        model = self.loaded.model
        return bytes_per_token(model.attention_specs, model.dtype)

    def attach(self, engine: Engine, attention: MakeAttention) -> None:
        """See Proposer.

        Raises:
            BadInput: the two models do not share a vocabulary, or the second one's context is
                shorter.
        """
        super().attach(engine, attention)
        runner, model, target = engine.runner, self.loaded.model, engine.loaded
        _require_alike(self.loaded, target)
        backend = runner.attention
        if self.own_cache:
            specs, dtype = model.attention_specs, model.dtype
            backend = attention(
                self.loaded, kv_cache(specs, engine.kv.layout, dtype, runner.device)
            )
        self.executor = self.runner = ModelRunner(model, backend, runner.device, runner.ops)


def _require_alike(draft: LoadedModel, target: LoadedModel) -> None:
    ids = [one.tokenizer and one.tokenizer.fast.get_vocab() for one in (draft, target)]
    sizes = draft.config.vocab_size, target.config.vocab_size
    if ids[0] != ids[1] if all(ids) else sizes[0] != sizes[1]:
        raise BadInput(
            "speculative.model: its tokens are not the target's (vocabularies of "
            f"{sizes[0]} and {sizes[1]}); a draft needs a model of the same tokenizer"
        )
    if draft.max_model_len < target.max_model_len:
        raise BadInput(
            f"speculative.model: its context has {draft.max_model_len} tokens and the target's "
            f"{target.max_model_len}; lower model.max_model_len"
        )
