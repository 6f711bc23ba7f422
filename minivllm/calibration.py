"""Which parts of a model are left out, found with an engine of the whole model where activations
decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minivllm.config.compose import OPTIONS, build, compose
from minivllm.config.typed import Config
from minivllm.engine.engine import Engine
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.source import resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.passes.pruning.options import NOT_PRUNING, CalibrationOptions
from minivllm.passes.pruning.plan import PruningPlan
from minivllm.passes.pruning.statistics import Statistics, measure
from minivllm.passes.pruning.texts import WINDOW, calibration_ids

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
BLOCK = 16  # tokens of a cache block


def pruning_plan(
    config: Config,
    model: Mapping[str, Any],
    pruning: Mapping[str, Any],
    build_engine: Callable[[Mapping[str, Any]], Engine],
) -> PruningPlan | None:
    """What is left out of a model; None: nothing.

    Args:
        config: of the engine.
        model, pruning: options of these groups.
        build_engine: makes the engine of the whole model, which is closed again.

    Raises:
        BadInput: a model class of the user's own is to be pruned, the method does not fit the
            model, or the calibration text is not there.
    """
    if pruning["_target_"] == NOT_PRUNING:
        return None
    if model["_target_"] not in OPTIONS:
        raise BadInput(
            f"pruning: {model['_target_']} is a model class of your own, which loads itself: use "
            "pruning=none"
        )
    source = resolve(dict(model), allow_random=False)[1]
    whole = ModelConfig.from_dict(source.config)

    def measured(options: CalibrationOptions) -> Statistics:
        # Before the model is loaded, so that a text that is too short is told at once.
        longest = whole.context(model.get("max_model_len"))
        tokenizer = Tokenizer.load(source.folder)
        ids = calibration_ids(options, tokenizer, whole.vocab_size, longest)
        engine = build_engine(_whole_model(config, model))
        try:
            return measure(engine, ids)
        finally:
            engine.close()

    plan: PruningPlan | None = build(pruning).plan(source.config, measured)
    return plan


def _whole_model(config: Config, model: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of an engine of the whole model in the dtype of `config`, for one sequence
    at a time. Its layers are plain modules, whose inputs can be listened to."""
    precision = PRECISIONS[str(config["quant"].get("dtype", "bfloat16"))]
    plain = compose(
        [
            *(f"quant={precision}", f"runtime.device={config.runtime.device}"),
            *("runtime.cpu_kernels='off'", "runtime.fused_kernels='off'", "runtime.moe=loop"),
            *("runtime.trim_last_layer=false", "runtime.cuda_graphs=false"),
            *(f"cache.block_size={BLOCK}", f"cache.num_blocks={WINDOW // BLOCK + 2}"),
            f"batching.max_num_batched_tokens={WINDOW}",
        ]
    )
    threads = {key: config["runtime"][key] for key in ("threads", "cores")}
    return {**plain, "model": dict(model), "runtime": {**plain["runtime"], **threads}}
