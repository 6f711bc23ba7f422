"""The other end of engine=vllm: runs in vLLM's own interpreter, and imports nothing but vLLM and
the standard library.

    python worker.py RESULTS_FD

Commands come on standard input, one JSON object a line; the first says how to build the engine.
Answers go to the descriptor, in the same form, so that nothing that vLLM prints can disturb them.

    -> {"args": {...EngineArgs...}, "config": {...config.json...} or null, "folder": for the config}
    <- {"ready": {...}}                      or {"error": "...", "type": "..."}
    -> {"add": [[id, [token ids], {...SamplingParams...}], ...]}
    <- {"tokens": [[id, [token ids], finish reason or null], ...]}      once a step
    <- {"refused": [id, why]}
    -> {"reset": clear the prefix cache?}    <- {"reset": true}

The end of standard input ends the process.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

# In this file's folder other modules are named as the libraries are. (vLLM's processes run these
# lines, too.)
sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]


class VllmWorker:
    """Drives one `LLMEngine`.

    Args:
        descriptor: where answers go.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.commands: queue.Queue[Any] = queue.Queue()
        self.unfinished: set[str] = set()
        self.engine: Any = None
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """Take commands in as they come."""
        for line in sys.stdin.buffer:
            self.commands.put(json.loads(line))
        self.commands.put(None)

    def say(self, **message: Any) -> None:
        """Answer."""
        data = (json.dumps(message) + "\n").encode()
        while data:
            data = data[os.write(self.descriptor, data) :]

    def build(self, args: dict[str, Any], config: dict[str, Any] | None, folder: str) -> Any:
        """Load the engine; a model that is only a config gets vLLM's dummy weights."""
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

    def describe(self) -> dict[str, Any]:
        """What was settled on."""
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

    def run(self) -> None:
        """Serve until standard input ends."""
        while True:
            busy = self.engine.has_unfinished_requests()
            try:
                command = self.commands.get(block=not busy)
            except queue.Empty:
                self.step()
                continue
            if command is None:
                return
            if "reset" in command:
                self.reset(command["reset"])
            for request in command.get("add", ()):
                self.add(*request)

    def add(self, request_id: str, prompt: list[int], given: dict[str, Any]) -> None:
        """Queue a request; only new tokens are told."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **given)
        try:
            self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        except ValueError as error:
            self.say(refused=[request_id, str(error)])
            return
        self.unfinished.add(request_id)

    def step(self) -> None:
        """One step; its tokens leave at once."""
        tokens = []
        for output in self.engine.step():
            part = output.outputs[0]
            if part.finish_reason is not None:
                self.unfinished.discard(output.request_id)
            cached = getattr(output, "num_cached_tokens", None)  # which early versions lack
            tokens.append([output.request_id, list(part.token_ids), part.finish_reason, cached])
        if tokens:
            self.say(tokens=tokens)

    def reset(self, clear: bool) -> None:
        """Abort what is left, and forget prefixes if asked to."""
        if self.unfinished:
            self.engine.abort_request(list(self.unfinished))
            self.unfinished.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        if clear and self.engine.reset_prefix_cache() is False:  # older versions say nothing
            raise RuntimeError("vLLM did not empty its prefix cache, though no request is left")
        self.say(reset=True)

    def main(self) -> None:
        """Build, then serve."""
        command = self.commands.get()
        try:
            self.engine = self.build(**command)
            self.say(ready=self.describe())
            self.run()
        except Exception as error:
            self.say(error=str(error) or type(error).__name__, type=type(error).__name__)
            raise


if __name__ == "__main__":
    VllmWorker(int(sys.argv[1])).main()
