"""OpenVINO in its own interpreter, driven by `piped_worker.py`: imports nothing but OpenVINO and
the standard library."""

from __future__ import annotations

import os
from collections import Counter
from math import prod
from typing import Any

DEVICE = "CPU"
MODEL = "openvino_model.xml"
# Properties that decide what is computed, as OpenVINO settles them.
SETTINGS = (
    "INFERENCE_PRECISION_HINT",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    "KV_CACHE_PRECISION",
    "KEY_CACHE_PRECISION",
    "VALUE_CACHE_PRECISION",
    "INFERENCE_NUM_THREADS",
    "ENABLE_CPU_PINNING",
)


class OpenVINOWorker:
    """Drives one `ContinuousBatchingPipeline`."""

    def __init__(self) -> None:
        self.handles: dict[int, tuple[str, Any]] = {}  # by the number of a request: its id
        self.count = 0
        self.core: Any = None
        self.pipeline: Any = None

    def build(
        self, folder: str, properties: dict[str, Any], scheduler: dict[str, Any]
    ) -> dict[str, Any]:
        """Load the engine.

        Args:
            folder: of the converted model.
            properties: of the device; checked first, each by its name.
            scheduler: of `SchedulerConfig`.

        Returns:
            What was settled on, and the bytes of the weights by their type.
        """
        import openvino
        import openvino_genai

        self.core = openvino.Core()
        for name, value in properties.items():
            try:
                self.core.set_property(DEVICE, {name: value})
            except RuntimeError as error:
                raise ValueError(f"the property {name}={value}: {error}") from error
        config = openvino_genai.SchedulerConfig()
        for name, value in scheduler.items():
            setattr(config, name, value)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, config, DEVICE, properties
        )
        return self._describe(folder)

    def _describe(self, folder: str) -> dict[str, Any]:
        import openvino
        import openvino_genai

        weights: Counter[str] = Counter()
        model = self.core.read_model(os.path.join(folder, MODEL))
        for operation in model.get_ops():
            if operation.get_type_name() == "Constant":
                kind = operation.get_element_type()
                values = prod(operation.get_output_shape(0))
                weights[kind.get_type_name()] += values * kind.get_bitwidth() // 8
        settled = {name: self.core.get_property(DEVICE, name) for name in SETTINGS}
        return {
            "version": openvino_genai.get_version(),
            "runtime": openvino.get_version(),
            "device": str(self.core.get_property(DEVICE, "FULL_DEVICE_NAME")),
            "weights": dict(weights),
            "settings": {name: plain(value) for name, value in settled.items()},
        }

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.handles)

    def add(self, request_id: str, prompt: list[int], given: dict[str, Any]) -> None:
        """Queue a request."""
        import numpy
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        for name, value in given.items():
            setattr(config, name, set(value) if name == "stop_token_ids" else value)
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        try:
            handle = self.pipeline.add_request(self.count, ids, config)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        self.handles[self.count] = (request_id, handle)
        self.count += 1

    def step(self) -> list[Any]:
        """One step, and its tokens."""
        self.pipeline.step()
        tokens = []
        for number, (request_id, handle) in list(self.handles.items()):
            while handle.can_read():
                (output,) = handle.read().values()
                reason = output.finish_reason.name.lower()  # none | stop | length
                ended = None if reason == "none" else reason
                tokens.append([request_id, list(output.generated_ids), ended, None])
                if ended:
                    del self.handles[number]
        return tokens

    def reset(self, clear: bool) -> None:
        """Cancel what is left; OpenVINO GenAI has no way to empty its prefix cache."""
        for _, handle in self.handles.values():
            handle.cancel()
        self.handles.clear()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()


def plain(value: Any) -> str | int | bool:
    """A property's value as JSON has it; a type by its name."""
    if isinstance(value, bool | int | str):
        return value
    name = getattr(value, "get_type_name", None)
    return str(name() if name is not None else value)


WORKER = OpenVINOWorker  # which piped_worker.py drives
