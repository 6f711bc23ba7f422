"""Which parts of a model are left out, found with an engine of the whole model where activations
decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from minivllm.config.compose import OPTIONS, build, compose
from minivllm.config.groups import Config
from minivllm.engine.engine import Engine
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.reserved_ids import reserved_ids
from minivllm.models.load.source import EMBEDDED, resolve
from minivllm.models.load.tokenizer import Tokenizer, chat_renderer
from minivllm.passes.determinism import close_engine
from minivllm.passes.pruning.options import WORKLOAD, CalibrationOptions
from minivllm.passes.pruning.plan import PruningPlan
from minivllm.passes.pruning.statistics import Statistics, measure
from minivllm.passes.pruning.texts import WINDOW, calibration_ids
from minivllm.platform.untrusted import MAX_TEXT, place, read_text

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
BLOCK = 16  # tokens of a cache block


def pruning_plan(
    config: Config,
    model: Mapping[str, Any],
    pruning: Mapping[str, Any],
    build_engine: Callable[[Mapping[str, Any]], Engine],
) -> PruningPlan:
    """What is left out of a model.

    Args:
        config: of the engine.
        model, pruning: options of these groups.
        build_engine: makes the engine of the whole model, which is closed again.

    Raises:
        BadInput: a model class of the user's own is to be pruned, the method does not fit the
            model, or the calibration text is not there.
    """
    if model["_target_"] not in OPTIONS:
        raise BadInput(
            f"pruning: {model['_target_']} is a model class of your own, which loads itself: use "
            "pruning=none"
        )
    source = resolve(dict(model), allow_random=False)[1]
    whole = ModelConfig.from_dict(source.config)

    def measured(options: CalibrationOptions) -> Statistics:
        # Before the model is loaded, so that a text that is too short is reported at once.
        longest = whole.context(model.get("max_model_len"))
        tokenizer = Tokenizer.load(source.folder)
        held_out = held_out_text(config.quality.text)
        ids = calibration_ids(
            *(options, tokenizer, whole.vocab_size, longest),
            lambda: workload_prompts(
                config, tokenizer, whole.vocab_size, longest, whole.eos_token_ids
            ),
            held_out,
            whole.eos_token_ids,
        )
        engine = build_engine(_whole_model(config, model))
        try:
            return measure(engine, ids)
        finally:
            close_engine(engine)

    plan: PruningPlan = build(pruning).plan(source.config, measured)
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


def held_out_text(path: str | None) -> str:
    """The text that quality is measured on. Raises BadInput where it cannot be read.

    Args:
        path: `quality.text`; None is that of the embedded model.
    """
    what = f"quality.text={path}"
    file: Path = EMBEDDED / "heldout.txt" if path is None else place(path, what)
    return read_text(file, MAX_TEXT, what)


class _NoPictures:
    """Rejects a workload with pictures, which calibration does not compute."""

    image_mark: tuple[int, ...] = ()

    def expand(self, token_ids: Sequence[int], pictures: Sequence[str]) -> NoReturn:
        """Raise BadInput."""
        raise BadInput(
            "pruning.calibration=workload: calibration computes no pictures, which this workload "
            "has; use stdlib or the path of a text file"
        )


def workload_prompts(
    config: Config,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    longest: int,
    eos_token_ids: Sequence[int] = (),
) -> list[Sequence[int]]:
    """The prompts of the configured workload, as the measurement makes them; of later turns of a
    conversation what its user adds.

    Args:
        config: of the engine.
        tokenizer: of the whole model; None: prompts are token ids.
        vocab_size: of the model.
        longest: its context, in tokens.
        eos_token_ids: its end tokens.

    Raises:
        BadInput: the workload cannot be made.
    """
    if "workload" not in config:
        raise BadInput(f"pruning.calibration={WORKLOAD}: choose a workload, such as workload=chat")
    encode, decode = (tokenizer.encode, tokenizer.decode) if tokenizer is not None else (None, None)
    # A generator of the user's own may not take it.
    further: dict[str, Any] = {}
    if config.target("workload") in OPTIONS:
        reserved = reserved_ids(tokenizer, eos_token_ids, vocab_size)
        further = {"render_chat": chat_renderer(tokenizer), "pictures": _NoPictures()}
        further["reserved"] = reserved
    generator, seed = build(config["workload"]), config.measure.seed
    made = generator.generate(encode, vocab_size, longest, seed, decode, **further)
    return [request.prompt_token_ids for request in made.requests]
