"""Whether the knobs of images fit the model, before any weight is loaded. Free of torch."""

from __future__ import annotations

from minivllm.extras.vision.options import VisionOptions, require_no_vision
from minivllm.models.load.source import Source
from minivllm.models.vision.registry import image_processor, sees


def require_vision_fits(options: VisionOptions, source: Source) -> bool:
    """Check what the files of the model say.

    Returns:
        Whether the model takes images.

    Raises:
        BadInput: a knob is set for a model that takes none; its image processor, or a setting over
            that, is wrong.
    """
    if sees(source.config["architectures"][0]):
        image_processor(source.config, source.folder, options.processor or {})
        return True
    require_no_vision(options)
    return False
