"""Pictures of clients are decoded where a process may die of them, and answered over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from minivllm import LLM, SamplingParams
from minivllm.extras.vision.options import VisionOptions
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.load.messages import ImageParts
from minivllm.models.vision.smolvlm_processor import SmolVLMProcessor
from minivllm.platform.processes.mortal import MortalProcess
from minivllm.serving.children.picture_decoder import PictureDecoder
from minivllm.serving.errors import ApiError
from tests.seeing import (
    IMAGE_TOKEN,
    PROCESSOR,
    VISION,
    add_tokenizer,
    encoded,
    make_smolvlm,
    picture,
)
from tests.serving.raw import ask
from tests.serving.running import RunningServer, serving

CONFIG = {"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "vision_config": VISION}
SMALL = encoded(picture(20, 20))


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose few bytes are so many white pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\xff" * (3 * width + 1) * height, 9)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", pixels), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.fixture
def decoder() -> Iterator[PictureDecoder]:
    pictures = Pictures(SmolVLMProcessor(CONFIG, PROCESSOR), None, VisionOptions(max_images=2))
    found = PictureDecoder(pictures)
    yield found
    found.turns.stop()


def add(decoder: PictureDecoder, *urls: str) -> Any:
    parts = ImageParts("<image>", sources=[("url", url) for url in urls])
    return asyncio.run(decoder.add([5, *[IMAGE_TOKEN] * len(urls)], parts, "a"))


def test_a_child_gives_what_this_process_would(decoder: PictureDecoder) -> None:
    pictures = Pictures(SmolVLMProcessor(CONFIG, PROCESSOR), None, VisionOptions())
    parts = ImageParts("<image>", sources=[("url", url_of(SMALL))])
    ids, inputs = pictures.add([5, IMAGE_TOKEN], parts)
    found_ids, found = add(decoder, url_of(SMALL))
    assert inputs is not None and found_ids == ids and found.spans == inputs.spans
    (expected,), (image,) = inputs.images, found.images
    assert (image.digest, image.grid, image.num_tokens) == (
        *(expected.digest, expected.grid, expected.num_tokens),
    )
    assert image.pixels.dtype == expected.pixels.dtype
    assert (image.pixels == expected.pixels).all()
    decoder.turns.stop()  # what comes again needs no child
    assert add(decoder, url_of(SMALL))[1].images == (image,)
    assert all(one._process is None for one in decoder.turns._processes)


def test_what_is_wrong_with_a_picture_is_the_clients_error(decoder: PictureDecoder) -> None:
    for url, words in (
        (url_of(b"no picture"), "image 1 is broken or no picture"),
        (url_of(bomb(9000, 9000)), "image 1 has 9000 x 9000 pixels"),
        ("https://a.example/x.png", "no URL is fetched"),
    ):
        with pytest.raises(ApiError, match=words) as caught:
            add(decoder, url)
        assert (caught.value.status, caught.value.param) == (400, "messages")
    with pytest.raises(ApiError, match="the prompt has 3 images"):
        add(decoder, *[url_of(SMALL)] * 3)


def test_a_picture_ends_a_child_and_not_the_server(
    decoder: PictureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(decoder, url_of(SMALL))
    (child,) = {one._process for one in decoder.turns._processes} - {None}
    answer_of = decoder.turns._answer_of

    def killed(process: MortalProcess, waiting: Any) -> dict[str, Any]:
        assert child is not None
        child.kill()
        return answer_of(process, waiting)

    monkeypatch.setattr(decoder.turns, "_answer_of", killed)
    other = url_of(encoded(picture(21, 20)))
    with pytest.raises(ApiError, match="the image takes more than 20 s, or more memory") as caught:
        add(decoder, other)
    assert caught.value.param == "messages"
    assert add(decoder, other)[1] is not None


# ---- over HTTP


@pytest.fixture(scope="module")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    make_smolvlm(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def seeing(seeing_folder: Path) -> Iterator[RunningServer]:
    words = ("model=hf", f"model.path={seeing_folder}", "task.served_model_name=seer")
    with serving(*words, "decoding=greedy", "quant=fp32") as running:
        yield running


TEXT = "what is this"
URL = {"url": url_of(SMALL)}
PART = {"type": "image_url", "image_url": URL}
CHAT = [{"role": "user", "content": [PART, {"type": "text", "text": TEXT}]}]
DATA = base64.b64encode(SMALL).decode()
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 6},
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": URL["url"]},
                    {"type": "input_text", "text": TEXT},
                ],
            }
        ],
        "max_output_tokens": 6,
    },
    "/v1/messages": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": SOURCE}, {"type": "text", "text": TEXT}],
            }
        ],
        "max_tokens": 6,
    },
}


def answered(path: str, body: Any) -> tuple[str, int]:
    """The text of an answer, and the tokens of its prompt."""
    match path:
        case "/v1/chat/completions":
            return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]
        case "/v1/responses":
            return body["output"][0]["content"][0]["text"], body["usage"]["input_tokens"]
    used = body["usage"]
    return body["content"][0]["text"], used["input_tokens"] + used["cache_read_input_tokens"]


def over_socket(url: str) -> str:
    with connect(f"{url.replace('http', 'ws')}/ws/generate") as socket:
        asked = {"type": "generate", "id": "a", "messages": CHAT, "max_tokens": 6}
        socket.send(json.dumps(asked))
        text = ""
        while (message := json.loads(socket.recv()))["type"] == "token":
            text += message["text"]
    assert message["type"] == "done", message
    return text.strip()


def test_every_api_answers_about_the_picture_as_the_python_face_does(
    seeing: RunningServer, seeing_folder: Path
) -> None:
    params = SamplingParams(max_tokens=6)
    with LLM(
        str(seeing_folder), quant="fp32", device="cpu", overrides=["runtime.threads=1"]
    ) as llm:
        (own,) = llm.chat([CHAT], params)
        (blind,) = llm.chat([[{"role": "user", "content": TEXT}]], params)
    expected = own.outputs[0].text.strip(), len(own.prompt_token_ids)
    assert expected[0] and expected[0] != blind.outputs[0].text.strip()
    assert expected[1] > 160  # rows of the image
    for path, body in BODIES.items():
        answer = ask(seeing.url, path, {"model": "seer", **body})
        assert answer.status == 200, answer.body
        text, count = answered(path, json.loads(answer.body))
        assert (text.strip(), count) == expected, path
    assert over_socket(seeing.url) == expected[0]


def test_a_broken_picture_is_a_400_of_every_api_and_the_server_goes_on(
    seeing: RunningServer,
) -> None:
    large = base64.b64encode(bomb(9000, 9000)).decode()
    for path, body in BODIES.items():
        given = json.loads(json.dumps({"model": "seer", **body}).replace(DATA, large))
        answer = ask(seeing.url, path, given)
        assert answer.status == 400, path
        assert "9000 x 9000 pixels, and at most" in answer.error["message"]
    (path, body), *_ = BODIES.items()
    assert ask(seeing.url, path, {"model": "seer", **body}).status == 200
