"""What a child says to pictures of clients."""

from __future__ import annotations

import base64

import numpy as np

from minivllm.extras.vision.options import VisionOptions
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.vision.smolvlm_processor import SmolVLMProcessor
from minivllm.serving.children.picture_child import _answer
from tests.seeing import IMAGE_TOKEN, PROCESSOR, VISION, encoded, picture

CONFIG = {"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "vision_config": VISION}


def test_a_picture_or_what_is_wrong_with_it() -> None:
    processor = SmolVLMProcessor(CONFIG, PROCESSOR)
    pictures = Pictures(processor, None, VisionOptions())
    image = picture(20, 30)
    url = f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"
    answer, expected = _answer(pictures, url, "image 1"), processor.process(image)
    pixels = np.frombuffer(base64.b64decode(answer["pixels"]), np.uint8)
    assert (pixels.reshape(answer["shape"]) == expected.pixels).all()
    assert bytes.fromhex(answer["digest"]) == expected.digest
    assert (answer["num_tokens"], tuple(answer["grid"])) == (expected.num_tokens, expected.grid)
    for wrong in ("data:image/png;base64,aGVsbG8=", "file:///etc/passwd", "http://a.example/"):
        status, message, _, param = _answer(pictures, wrong, "image 7")["error"]
        assert status == 400 and message.startswith("image 7") and param == "messages"
