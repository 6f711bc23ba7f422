"""Whether the knobs of images fit the model, before any weight is loaded. Free of torch."""

from __future__ import annotations

from minivllm.extras.vision.options import VisionOptions, require_no_vision
from minivllm.models.load.source import Source
from minivllm.models.registry import sees
from minivllm.models.vision.processor import ImageProcessor
from minivllm.models.vision.registry import image_processor


def fitting_processor(options: VisionOptions, source: Source) -> ImageProcessor | None:
    """The image processor of a model, by the model's files and the knobs; None for a model that
    takes no images.

    Raises:
        BadInput: a knob is set for a model that takes none; its image processor, or a setting over
            that, is wrong.
    """
    if sees(source.config["architectures"][0]):
        return image_processor(source.config, source.folder, options.processor or {})
    require_no_vision(options)
    return None
