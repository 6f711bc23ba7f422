"""Whether knobs fit the model and this machine, as far as the model's files say it: checked before
any weight is loaded. What only some engines have is imported where a knob asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minivllm.config.compose import OPTIONS
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.extras.speculative.options import NOT_SPECULATING
from minivllm.kernels.device import free_memory
from minivllm.models.config import ModelConfig
from minivllm.models.costs import BYTES, architecture_costs
from minivllm.models.load.source import Source, resolve
from minivllm.passes.pruning.options import NOT_PRUNING

ROUNDING = 0.9  # of what the weights are counted to take: a method may store a little less


def require_memory_for_weights(config: Mapping[str, Any], device: torch.device) -> None:
    """Raise before weights are filled that a host cannot hold: it would take minutes, everything
    else would have to wait for memory, and the kernel might end another process than this.

    Raises:
        MemoryError: the weights alone take more than is free. (A GPU says so itself, at once.)
    """
    if device.type != "cpu" or not all(
        config[group]["_target_"] in OPTIONS for group in ("model", "quant")
    ):
        return  # what options of the user's own store is not known
    source = resolve(config["model"], allow_random=False)[1]
    view = Config.of(config)
    model = ModelConfig.from_dict(pruned_sizes(view, source))
    _, needed = architecture_costs(model, config["quant"])
    length, width = model.context(view.model.max_model_len), BYTES[view.quant.dtype]
    tables = sum(rope.table_bytes(length, model.head_dim, width) for rope in model.ropes)
    free = free_memory(device)
    if tables > free:
        raise MemoryError(
            f"the rotary tables of {length:,} positions take {tables / 1e9:.3g} GB, and this "
            f"machine has {free / 1e9:.3g} GB free: choose a smaller model.max_model_len"
        )
    if ROUNDING * needed > free:
        raise MemoryError(
            f"the weights take about {needed / 1e9:.3g} GB, and this machine has "
            f"{free / 1e9:.3g} GB free: choose fewer bits (quant=int8, quant=nf4) or a smaller "
            "model"
        )


def pruned_sizes(config: Config, source: Source) -> dict[str, Any]:
    """The config.json of the model, as far as its sizes go, without what `pruning` leaves out.

    Raises:
        BadInput: the method does not fit the model.
    """
    if config.target("pruning") == NOT_PRUNING:
        return source.config
    from minivllm.passes.pruning.shapes import pruned_config

    return pruned_config(config.pruning, source.config)


def require_one_engine(config: Config) -> None:
    """Raise BadInput where there are several replicas, each of which is built by itself."""
    if (replicas := config.parallel.replicas) > 1:
        raise BadInput(
            f"parallel.replicas={replicas}: this is one engine in one process; leave out the knob"
        )


def require_shares_fit(config: Config) -> None:
    """Raise BadInput where the ranks of `parallel.tensor` cannot share the model; of a model class
    of the user's own the rank itself says so."""
    if config.target("model") in OPTIONS:
        from minivllm.passes.shard_sizes import require_shares

        source = resolve(config["model"], allow_random=False)[1]
        whole = pruned_sizes(config, source)
        require_shares(whole, config.parallel.tensor, config.quant, source.is_gguf)


def require_fit(config: Config) -> None:
    """Raise BadInput for drafts, or knobs of images, that do not fit the model; of a model class of
    the user's own only loading shows it."""
    if config.target("model") not in OPTIONS:
        return
    if config.vision.is_set:
        from minivllm.extras.vision.pictures import fitting_processor

        fitting_processor(config.vision, resolve(config["model"], allow_random=True)[1])
    if config.target("speculative") != NOT_SPECULATING:
        from minivllm.extras.speculative.fit import is_of_models, require_drafts_fit

        if is_of_models(config.speculative):
            source = resolve(config["model"], allow_random=True)[1]
            target = ModelConfig.from_dict(pruned_sizes(config, source))
            length = target.context(config.model.max_model_len)
            require_drafts_fit(config.speculative, target, length)
