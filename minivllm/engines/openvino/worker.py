"""The other end of engine=openvino: runs in OpenVINO's own interpreter, and imports nothing but
OpenVINO and the standard library.

    python worker.py RESULTS_FD

See `PipedEngine` for the messages. The first command is

    {"folder": ..., "properties": {...of the device...}, "scheduler": {...SchedulerConfig...}}
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections import Counter
from math import prod
from typing import Any

# In this file's folder other modules are named as the libraries are.
sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]

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
    """Drives one `ContinuousBatchingPipeline`.

    Args:
        descriptor: where answers go.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.commands: queue.Queue[Any] = queue.Queue()
        self.handles: dict[int, tuple[str, Any]] = {}  # by the number of a request: its id
        self.count = 0
        self.pipeline: Any = None
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

    def build(self, folder: str, properties: dict[str, Any], scheduler: dict[str, Any]) -> Any:
        """Load the engine; the properties are checked first, each by its name."""
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
        return openvino_genai.ContinuousBatchingPipeline(folder, config, DEVICE, properties)

    def describe(self, folder: str) -> dict[str, Any]:
        """What was settled on, and the bytes of the weights by their type."""
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

    def run(self) -> None:
        """Serve until standard input ends."""
        while True:
            try:
                command = self.commands.get(block=not self.handles)
            except queue.Empty:
                self.step()
                continue
            if command is None:
                return
            if "reset" in command:
                self.reset()
            for request in command.get("add", ()):
                self.add(*request)

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
        except (RuntimeError, ValueError) as error:
            self.say(refused=[request_id, str(error)])
            return
        self.handles[self.count] = (request_id, handle)
        self.count += 1

    def step(self) -> None:
        """One step; its tokens leave at once."""
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
        if tokens:
            self.say(tokens=tokens)

    def reset(self) -> None:
        """Cancel what is left."""
        for _, handle in self.handles.values():
            handle.cancel()
        self.handles.clear()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.say(reset=True)

    def main(self) -> None:
        """Build, then serve."""
        command = self.commands.get()
        try:
            self.pipeline = self.build(**command)
            self.say(ready=self.describe(command["folder"]))
            self.run()
        except Exception as error:
            self.say(error=str(error) or type(error).__name__, type=type(error).__name__)
            raise


def plain(value: Any) -> str | int | bool:
    """A property's value as JSON has it; a type by its name."""
    if isinstance(value, bool | int | str):
        return value
    name = getattr(value, "get_type_name", None)
    return str(name() if name is not None else value)


if __name__ == "__main__":
    OpenVINOWorker(int(sys.argv[1])).main()
