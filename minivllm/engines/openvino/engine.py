"""engine=openvino: OpenVINO GenAI's continuous batching on a CPU, in an interpreter of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineInfo
from minivllm.engines.installed import require
from minivllm.engines.openvino.options import OpenVINOOptions
from minivllm.engines.peer_process import peer_environment
from minivllm.engines.piped import PipedEngine
from minivllm.engines.supported_knobs import require_supported
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.costs import architecture_costs
from minivllm.models.load.source import resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.support import INT4, INT8
from minivllm.platform.threads import thread_count

TYPE = "{type}"
MODEL = "openvino_model.xml"
PACKED = {INT8: "int8", INT4: "int4"}  # by option of quant
STORED = {"int8": ("u8", "i8"), "int4": ("u4", "i4")}  # types of OpenVINO that hold most weights
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
KV_TYPE = {"auto": None, "int8": "u8"}  # None: the dtype of quant
NOTES = (
    "OpenVINO answers from a process of its own: a token's time is when it was read from there",
    "OpenVINO's steps cannot be seen from outside: no breakdown, use of bandwidth or queueing time",
)
KEPT = "OpenVINO GenAI has no call that empties its prefix cache"


class OpenVINOEngine(PipedEngine):
    """Drives `openvino_genai.ContinuousBatchingPipeline` through a pipe; see worker.py.

    Args:
        config: the resolved configuration.
        options: the knobs of `engine`.

    Raises:
        BadInput: a knob is set that is not supported, there is no OpenVINO or no converted model of
            that precision, or OpenVINO rejects the configuration.
        RuntimeError: the process ended; the last lines that it printed are in the message, and
            all of them in the log.
    """

    peer = "OpenVINO"
    worker = Path(__file__).with_name("worker.py")

    def __init__(self, config: Mapping[str, Any], options: OpenVINOOptions) -> None:
        require_supported(config, options.support)
        require(config)
        self._view, self._options = Config.of(config), options
        begin = time.monotonic()
        source = resolve(config["model"], allow_random=False)[1]
        if source.weights == "random":
            raise BadInput(
                "model.weights=random is not supported by engine=openvino: its weights are those "
                "of engine.ir; scripts/save_random.py of minivllm's repository writes a checkpoint "
                "that can be converted"
            )
        sizes = ModelConfig.from_dict(source.config)
        self.tokenizer = Tokenizer.load(source.folder)
        folder = self._folder()
        properties, scheduler = self._properties(), self._scheduler()
        self._begin(
            str(options.python),
            peer_environment(options.env),
            {"folder": str(folder), "properties": properties, "scheduler": scheduler},
        )
        self._check_stored(folder)
        costs, _ = architecture_costs(sizes, config["quant"])
        caches = self._view["cache"]["prefix_caching"]
        self.info = EngineInfo(
            name="openvino",
            computes_here=False,
            weights=source.weights,
            fingerprint=source.fingerprint,
            weights_from=source.weights_from,
            vocab_size=sizes.vocab_size,
            max_model_len=sizes.context(self._view.model.max_model_len),
            eos_token_ids=sizes.eos_token_ids,
            max_num_seqs=self._view.batching.max_num_seqs,
            load_s=time.monotonic() - begin,
            memory={"weights": sum(self._settled["weights"].values())},
            model={**costs, "device": "cpu"},
            warnings=[*source.warnings, *NOTES, *[KEPT] * caches],
            keeps_prefixes=caches,
        )

    def _folder(self) -> Path:
        """The converted model, by `engine.ir` with the precision filled in."""
        quant, given = self._view["quant"], self._options.ir
        if given is None:
            raise BadInput(
                "engine.ir is missing: give the folder that scripts/save_openvino.py of minivllm's "
                "repository wrote, such as engine.ir=qwen3-openvino-{type}, in which {type} is "
                "bf16, int8 or int4 by quant"
            )
        wanted = PACKED.get(str(quant["_target_"]), "bf16")
        if TYPE not in given and wanted != "bf16":
            raise BadInput(
                f"quant asks for {wanted} weights, and engine.ir={given} names one folder: write "
                f"{TYPE} where the precision stands in its name, or leave the knob out"
            )
        folder = Path(os.path.expanduser(given.replace(TYPE, wanted)))
        if not (folder / MODEL).is_file():
            raise BadInput(
                f"engine.ir={folder} has no {MODEL}: convert the checkpoint with "
                f"scripts/save_openvino.py CHECKPOINT {folder} --type {wanted}, of minivllm's "
                "repository"
            )
        return folder.resolve()

    def _check_stored(self, folder: Path) -> None:
        """Raise BadInput where the folder holds another precision than `quant` asks for."""
        wanted = PACKED.get(str(self._view["quant"]["_target_"]))
        weights = self._settled["weights"]
        most = max(weights, key=weights.__getitem__)
        packed = [name for name, kinds in STORED.items() if most in kinds]
        if wanted is None and not packed:
            return
        if wanted not in packed and not (
            wanted == "int4" and any(map(weights.get, STORED[wanted]))
        ):
            self.close()
            raise BadInput(f"engine.ir={folder} holds its weights as {most}: set quant accordingly")

    def _properties(self) -> dict[str, Any]:
        """Of the device: as every engine here it is given its threads, and pins none."""
        cache, quant = self._view["cache"], self._view["quant"]
        if cache["kv_dtype"] not in KV_TYPE:
            raise BadInput(
                f"cache.kv_dtype={cache['kv_dtype']} is not supported by engine=openvino: use auto "
                "or int8, or engine.properties.KV_CACHE_PRECISION"
            )
        if not self._view.runtime.device.startswith(("auto", "cpu")):
            raise BadInput(
                f"runtime.device={self._view.runtime.device}: engine=openvino computes on the CPU"
            )
        dtype = DTYPES[quant["dtype"]]
        made = {
            "INFERENCE_NUM_THREADS": thread_count(self._view["runtime"]),
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": dtype,
            "KV_CACHE_PRECISION": KV_TYPE[cache["kv_dtype"]] or dtype,
        }
        if quant.get("activations") == "none":
            made["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # of OpenVINO's own choice it is 32
        return {**made, **(self._options.properties or {})}

    def _scheduler(self) -> dict[str, Any]:
        batching, cache = self._view["batching"], self._view["cache"]
        gigabytes = self._options.kv_cache_gb
        return {
            "max_num_seqs": batching["max_num_seqs"],
            "max_num_batched_tokens": batching["max_num_batched_tokens"],
            "dynamic_split_fuse": batching["chunked_prefill"],
            "enable_prefix_caching": cache["prefix_caching"],
            **({} if gigabytes is None else {"cache_size": gigabytes}),
        }

    def _sampling(self, max_tokens: int, params: SamplingParams) -> dict[str, Any]:
        """`GenerationConfig` of OpenVINO GenAI."""
        eos = () if params.ignore_eos else self.info.eos_token_ids
        given = {
            "max_new_tokens": max_tokens,
            "ignore_eos": True,  # the end of a sequence is one of the stop tokens
            "stop_token_ids": [*eos, *params.stop_token_ids],
            "apply_chat_template": False,
            "do_sample": not params.greedy,
        }
        if not params.greedy:
            given |= {"temperature": params.temperature, "top_p": params.top_p}
            given |= {"top_k": params.top_k} if params.top_k else {}
            given |= {} if params.seed is None else {"rng_seed": params.seed}
        return given

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """What OpenVINO settled on, and steps that gave tokens; see BenchEngine."""
        settings, weights = self._settled["settings"], self._settled["weights"]
        group = int(settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"])
        packed = any(weights.get(kind) for kinds in STORED.values() for kind in kinds)
        return {
            "engine": {
                "version": str(self._settled["version"]),
                "runtime": str(self._settled["runtime"]),
                "steps": float(self._steps),
            },
            "quant": {
                "dtype": str(settings["INFERENCE_PRECISION_HINT"]),
                "activations": "int8" if packed and group else "none",
                "activations_group_size": float(group if packed else 0),
                **{f"bytes_{kind}": float(size) for kind, size in weights.items()},
            },
            "batching": {"largest_batch": float(self._largest_batch)},
            "cache": {
                "kv_dtype": str(settings["KEY_CACHE_PRECISION"]),
                "prefix_caching": float(self._view["cache"]["prefix_caching"]),
            },
            "runtime": {"threads": float(settings["INFERENCE_NUM_THREADS"])},
        }
