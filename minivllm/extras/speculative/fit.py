"""Whether drafts fit the model that verifies them, before any weight is loaded. Torch-free."""

from __future__ import annotations

from typing import Any

from minivllm.errors import BadInput
from minivllm.extras.speculative.options import DraftOptions, EarlyExitOptions, require_layers
from minivllm.models.config import ModelConfig
from minivllm.models.load.source import Source, resolve


def is_of_models(options: object) -> bool:
    """Whether what models' files say decides about drafts with these knobs."""
    second = isinstance(options, DraftOptions) and options.model is not None
    return second or isinstance(options, EarlyExitOptions)


def require_drafts_fit(
    options: object, target: ModelConfig, longest: int, allow_random: bool = True
) -> None:
    """Check what the files of the models say.

    Args:
        options: the knobs of `speculative`.
        target: the model that verifies.
        longest: its context, in tokens.
        allow_random: see `resolve`, for a drafting model.

    Raises:
        BadInput: there is no drafting model, it is not usable or its context is shorter; too few
            layers or token ids are left to leave any out.
    """
    if isinstance(options, EarlyExitOptions):
        require_layers(options.exit_layer, target.num_layers)
        if options.head_tokens is not None and options.head_tokens > target.vocab_size:
            raise BadInput(
                f"speculative.head_tokens={options.head_tokens}: the vocabulary has "
                f"{target.vocab_size} tokens; use fewer, or null for all"
            )
    elif isinstance(options, DraftOptions) and options.model is not None:
        source = draft_source(options.model, allow_random)
        limit = options.model.get("max_model_len")
        require_context(ModelConfig.from_dict(source.config).context(limit), longest)


def draft_source(model: dict[str, Any], allow_random: bool) -> Source:
    """See `resolve`; an error is about the knobs of `speculative.model`."""
    try:
        return resolve(model, allow_random)[1]
    except BadInput as error:
        raise of_draft(error) from None


def of_draft(error: BadInput) -> BadInput:
    """An error about a model, as one about the drafting model."""
    return BadInput(str(error).replace("model.", "speculative.model."))


def require_context(draft: int, target: int) -> None:
    """Raise BadInput for a drafting model whose context is shorter than the target's."""
    if draft < target:
        raise BadInput(
            f"speculative.model: its context has {draft} tokens and the target's {target}; lower "
            "model.max_model_len"
        )
