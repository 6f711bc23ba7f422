"""Pictures in a conversation in the terminal: shown with one text, and remembered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm.errors import BadInput
from minivllm.interactive.chat import TerminalChat
from minivllm.interactive.local import LocalModel
from minivllm.interactive.model import picture_bytes, picture_uri
from minivllm.llm import LLM
from tests.interactive.characters import TEMPLATE, character_folder
from tests.interactive.test_chat import Shown
from tests.seeing import add_tokenizer, encoded, make_smolvlm, picture

__all__ = ["character_folder"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("smolvlm")
    make_smolvlm(folder)
    add_tokenizer(folder)
    overrides = ["decoding.max_tokens=3", "decoding.ignore_eos=true", "runtime.threads=1"]
    with LLM(str(folder), quant="fp32", device="cpu", overrides=overrides) as one:
        yield one


def test_a_picture_goes_with_the_next_text_and_stays_in_the_conversation(
    llm: LLM, tmp_path: Path
) -> None:
    path = tmp_path / "a cat.png"
    path.write_bytes(encoded(picture(20, 20)))
    screen = Shown()
    chat = TerminalChat(LocalModel(llm), screen)
    chat.handle("what")
    plain = chat.answers[-1].num_prompt_tokens
    chat.handle("/reset")
    chat.handle(f"/image {path}")
    assert screen.notes[-1] == f"{path} (20 x 20 pixels) goes with the next text"
    chat.handle("what")
    assert plain is not None and (seen := chat.answers[-1].num_prompt_tokens) is not None
    assert seen > plain + 160  # of the picture
    expected = llm.chat(chat.messages[:1])[0]
    assert len(expected.prompt_token_ids) == seen
    chat.handle("and")
    after = chat.answers[-1].num_prompt_tokens
    assert after is not None and seen < after < 2 * seen  # it is not shown again
    chat.handle(f"/image {path}")
    chat.handle("/reset")
    chat.handle("what")
    assert chat.answers[-1].num_prompt_tokens == plain


def test_what_cannot_be_shown_is_told(llm: LLM, tmp_path: Path, character_folder: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"hello")
    (tmp_path / "one.png").write_bytes(encoded(picture(9, 7)))
    screen = Shown()
    chat = TerminalChat(LocalModel(llm), screen)
    for command, words in (
        ("/image", "needs the path"),
        ("/image nowhere.png", "nowhere.png"),
        (f"/image {tmp_path / 'broken.png'}", "is broken or no picture"),
    ):
        assert chat.handle(command) and words in screen.notes[-1]
    with LLM(str(character_folder), quant="fp32", overrides=["decoding.max_tokens=2"]) as blind:
        assert blind.tokenizer is not None
        blind.tokenizer.chat_template = TEMPLATE
        chat = TerminalChat(LocalModel(blind), screen)
        chat.handle(f"/image {tmp_path / 'one.png'}")
        chat.handle("hi")
        assert "this model takes no images" in screen.notes[-1] and chat.messages == []


def test_a_uri_holds_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.jpg"
    path.write_bytes(data := encoded(picture(9, 7), "JPEG"))
    uri, size = picture_uri(str(path))
    assert uri.startswith("data:image/jpeg;base64,") and size == (9, 7)
    assert picture_bytes(uri) == data
    with pytest.raises(BadInput, match=r"/image .*gone\.png"):
        picture_uri(str(tmp_path / "gone.png"))
