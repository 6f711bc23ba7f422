"""The child process that decodes and processes pictures of clients, and may die of it."""

from __future__ import annotations

import base64
from typing import Any

from minivllm.errors import BadInput, first_line
from minivllm.extras.vision.pictures import Pictures
from minivllm.platform.processes.mortal import Answers, answer_lines, limit_memory
from minivllm.serving.children.child_turns import wrong
from minivllm.serving.children.picture_decoder import PICTURES, Settings

# Bytes of the address space: the program's, and several copies of the largest picture's pixels.
MEMORY, MEMORY_PIXEL = 4 << 30, 32


def _begin(settings: Settings) -> Answers:
    """What answers for the image processor of a model."""
    pictures = Pictures(settings.processor, None, settings.options)
    limit_memory(MEMORY + MEMORY_PIXEL * pictures.limits.most_pixels)
    return lambda question: _answer(pictures, *question)


def _answer(pictures: Pictures, url: str, what: str) -> dict[str, Any]:
    """The fields of a ProcessedImage, or what is wrong with the picture."""
    try:
        done = pictures.processed(url, what)
    except BadInput as error:
        return wrong(str(error), "messages")
    except (RecursionError, MemoryError) as error:
        return wrong(f"{what}: {first_line(error)}", "messages")
    return {
        "digest": done.digest.hex(),
        "shape": done.pixels.shape,
        "pixels": base64.b64encode(done.pixels.tobytes()).decode(),
        "num_tokens": done.num_tokens,
        "grid": done.grid,
    }


if __name__ == "__main__":
    answer_lines(_begin, PICTURES.cpu_seconds)
