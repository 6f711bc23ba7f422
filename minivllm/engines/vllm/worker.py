"""vLLM in its own interpreter, driven by `piped_worker.py`: imports nothing but vLLM and the
standard library."""

from __future__ import annotations

import json
import os
from typing import Any


class VllmWorker:
    """Drives one `LLMEngine`."""

    def __init__(self) -> None:
        self.unfinished: set[str] = set()
        self.engine: Any = None

    def build(
        self, args: dict[str, Any], config: dict[str, Any] | None, folder: str
    ) -> dict[str, Any]:
        """Load the engine.

        Args:
            args: of vLLM's `EngineArgs`.
            config: the config.json of a model that is only that, which gets vLLM's dummy weights.
            folder: where the config is written.

        Returns:
            What was settled on.
        """
        self.engine = self._load(args, config, folder)
        return self._describe()

    def _load(self, args: dict[str, Any], config: dict[str, Any] | None, folder: str) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if config is None:
            return LLMEngine.from_engine_args(EngineArgs(**args))
        if "model_type" not in config:  # a published config.json may leave it to the class
            import transformers

            config["model_type"] = getattr(
                transformers, config["architectures"][0]
            ).config_class.model_type
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        return LLMEngine.from_engine_args(
            EngineArgs(**{"model": folder, "load_format": "dummy", **args})
        )

    def _describe(self) -> dict[str, Any]:
        import vllm

        config = self.engine.vllm_config
        cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
        return {
            "version": vllm.__version__,
            "device": str(config.device_config.device_type),
            "dtype": str(model.dtype).removeprefix("torch."),
            "block_size": cache.block_size,
            "num_blocks": cache.num_gpu_blocks,
            "prefix_caching": cache.enable_prefix_caching,
            "max_model_len": model.max_model_len,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        }

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.engine.has_unfinished_requests())

    def add(self, request_id: str, prompt: list[int], given: dict[str, Any]) -> None:
        """Queue a request; each step reports its new tokens alone."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **given)
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        self.unfinished.add(request_id)

    def step(self) -> list[Any]:
        """One step, and its tokens."""
        tokens = []
        for output in self.engine.step():
            part = output.outputs[0]
            if part.finish_reason is not None:
                self.unfinished.discard(output.request_id)
            cached = getattr(output, "num_cached_tokens", None)  # which early versions lack
            tokens.append([output.request_id, list(part.token_ids), part.finish_reason, cached])
        return tokens

    def reset(self, clear: bool) -> None:
        """Abort what is left; `clear` empties the prefix cache."""
        if self.unfinished:
            self.engine.abort_request(list(self.unfinished))
            self.unfinished.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        if clear and self.engine.reset_prefix_cache() is False:  # older versions say nothing
            raise RuntimeError("vLLM did not empty its prefix cache, though no request is left")


WORKER = VllmWorker  # which piped_worker.py drives
