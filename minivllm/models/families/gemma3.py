"""Gemma 3 text models (Kamath et al. 2025): Gemma 2 with a norm of queries and keys in place of the
soft caps, and five windowed layers with a rope of their own for each layer with full attention."""

from __future__ import annotations

from minivllm.models.families.gemma import GemmaHeadNorm
from minivllm.models.families.gemma2 import Gemma2ForCausalLM
from minivllm.models.layers import Attention


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 270M and 1B; windows and ropes are in ModelConfig."""

    def make_attention(self, layer: int) -> Attention:
        c = self.config
        norm = GemmaHeadNorm(
            c.head_dim, {"q_norm": c.num_heads, "k_norm": c.num_kv_heads}, c.rms_norm_eps
        )
        return Attention(c, layer, norm)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of Gemma 3 4B to 27B; images are not served."""
