"""Pictures of prompts and of messages: which are read, and where they stand in the prompt."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minivllm import LLM, BadInput, SamplingParams
from minivllm.extras.vision.options import VisionOptions
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.load.messages import ImageParts
from tests.seeing import IMAGE_TOKEN, add_tokenizer, encoded, make_smolvlm, picture

ONE = picture(20, 20)
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("smolvlm")
    make_smolvlm(folder)
    add_tokenizer(folder)
    overrides = ["runtime.threads=1", "cache.num_blocks=64", f"vision.folder={folder}"]
    with LLM(str(folder), quant="fp32", device="cpu", overrides=overrides) as llm:
        yield llm


def data_uri(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


def asked(source: Any, **part: Any) -> list[dict[str, Any]]:
    image = part or {"type": "image", "image": source}
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [image, {"type": "text", "text": "what is this"}]},
    ]


def test_a_text_and_a_conversation_have_their_picture_between_marks(llm: LLM) -> None:
    output = llm.generate({"prompt": "<image>what", "multi_modal_data": {"image": ONE}}, PARAMS)[0]
    ids = output.prompt_token_ids
    assert output.prompt == "<image>what" and ids.count(IMAGE_TOKEN) == 10 * 16
    fake, mark = (llm.tokenizer.token_id(t) for t in ("<fake_token_around_image>", "<row_1_col_1>"))
    assert ids[:3] == [fake, mark, IMAGE_TOKEN] and ids.count(fake) == 11
    talk = llm.chat(asked(ONE), PARAMS)[0]
    assert talk.prompt == "s: be briefu:<image>what is thisa:"
    assert talk.prompt_token_ids.count(IMAGE_TOKEN) == 160


def test_however_a_picture_is_given_it_is_the_same(llm: LLM, tmp_path: Path) -> None:
    loaded = llm.engine.loaded.vision
    assert loaded is not None and loaded.folder is not None
    inside = loaded.folder / "in side.png"
    inside.write_bytes(encoded(ONE))
    url = {"type": "image_url", "image_url": {"url": data_uri(ONE)}}
    forms = [
        asked(ONE),
        asked(str(inside)),
        asked(encoded(ONE)),
        asked(np.asarray(ONE)),
        asked(None, **url),
        asked(None, type="input_image", image_url=data_uri(ONE)),
        asked(None, type="image_url", image_url={"url": f"file://{loaded.folder}/in%20side.png"}),
        asked(None, type="image_pil", image_pil=ONE),
    ]
    outputs = llm.chat(forms, PARAMS)
    assert len({tuple(one.prompt_token_ids) for one in outputs}) == 1
    assert len({tuple(one.outputs[0].token_ids) for one in outputs}) == 1
    other = llm.chat(asked(picture(20, 20, seed=9)), PARAMS)[0]
    assert other.prompt_token_ids == outputs[0].prompt_token_ids


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1/x.png", "no URL is fetched"),
        ("ftp://x/y.png", "no URL is fetched"),
        ("cat.png", "no URL is fetched"),
        ("data:image/png,abc", "is base64"),
        ("data:image/png;base64,!!!", "no base64"),
        ("data:image/png;base64,aGVsbG8=", "is broken or no picture"),
        ("file:///etc/passwd", "only files below vision.folder"),
        ("file:///x/../../etc/passwd", "only files below vision.folder"),
    ],
)
def test_only_data_uris_and_files_of_the_folder_are_read(url: str, words: str, llm: LLM) -> None:
    with pytest.raises(BadInput, match=words):
        llm.chat(asked(None, type="image_url", image_url={"url": url}), PARAMS)


def test_a_link_out_of_the_folder_is_not_followed(llm: LLM, tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    outside.write_bytes(encoded(ONE))
    (folder := tmp_path / "folder").mkdir()
    (folder / "link.png").symlink_to(outside)
    assert llm.pictures.prompts is not None
    pictures = Pictures(
        llm.pictures.prompts.processor, llm.tokenizer, VisionOptions(folder=str(folder))
    )
    parts = ImageParts("<image>", sources=[("url", f"file://{folder}/link.png")])
    with pytest.raises(BadInput, match="only files below"):
        pictures.add([IMAGE_TOKEN], parts)


def test_what_messages_of_others_say_is_no_path(llm: LLM) -> None:
    from minivllm.models.load.messages import parse_messages

    with pytest.raises(BadInput, match="image_url with a data: URI"):
        parse_messages(asked("/etc/passwd"), images=llm.pictures.parts())


def test_limits_and_mismatches_are_told(llm: LLM) -> None:
    small = VisionOptions(max_images=1, max_megapixels=0.0002, max_image_mb=0.001)
    assert llm.pictures.prompts is not None
    pictures = Pictures(llm.pictures.prompts.processor, llm.tokenizer, small)
    for given, words in (
        ([ONE, ONE], "vision.max_images=1"),
        ([ONE], "20 x 20 pixels"),
        ([encoded(picture(40, 40))], r"vision\.max_image_mb"),
        ([7], "is a int"),
    ):
        with pytest.raises(BadInput, match=words):
            pictures.insert([IMAGE_TOKEN], given)
    with pytest.raises(BadInput, match=r"2 placeholders of images.* and 1 images"):
        llm.generate({"prompt": "<image><image>", "multi_modal_data": {"image": ONE}})
    with pytest.raises(BadInput, match="audio and video are not served"):
        llm.generate({"prompt": "a", "multi_modal_data": {"audio": b""}})


def test_a_model_without_images_says_so() -> None:
    with pytest.raises(BadInput, match="takes no images"):
        Pictures(None, None, VisionOptions()).insert([1], [ONE])
