"""What stands in front of the engine, on a GPU: pictures, GGUF files, a server, a conversation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.interactive.chat import TerminalChat
from minivllm.interactive.local import LocalModel
from tests import gguf_files
from tests.extras.vision.test_encoder import PROMPTS, encoder_of
from tests.interactive.characters import TEMPLATE, character_folder
from tests.interactive.test_chat import Shown
from tests.seeing import make_smolvlm
from tests.serving.raw import ask
from tests.serving.running import serving

__all__ = ["character_folder"]

pytestmark = pytest.mark.gpu
KNOBS = ["cache.num_blocks=96", "cache.block_size=16", "vision.encoder_cache_tokens=0"]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


def test_pictures_are_those_of_the_cpu(tmp_path: Path) -> None:
    """And no event of a tower that has ended is kept."""
    make_smolvlm(tmp_path)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(tmp_path), quant="fp32", device=device, overrides=KNOBS) as llm:
            outputs = [llm.generate(one, PARAMS)[0].outputs[0] for one in PROMPTS]
            found.append([one.token_ids for one in outputs])
            encoder = encoder_of(llm)
            assert len(encoder._events) <= 2  # of the last prompt
            assert encoder.counts()["encoder_ms"] > 0 and not encoder._events
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["Q4_0", "Q8_0", "Q6_K"])
def test_a_gguf_file_gives_the_logits_of_the_cpu(form: str, tmp_path: Path) -> None:
    path = gguf_files.write(
        tmp_path / "model.gguf", gguf_files.LLAMA, gguf_files.tensors(form=form)
    )
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(path), quant="fp32", device=device, overrides=["cache.num_blocks=8"]) as llm:
            found.append(llm.logits(list(range(3, 40))).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3 * found[0].abs().max())


def test_a_server_streams_what_it_answers() -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with serving("runtime.device=cuda", is_forked=False) as server:
        whole = json.loads(ask(server.url, "/v1/completions", body).body)["choices"][0]
        lines = ask(server.url, "/v1/completions", {**body, "stream": True}).body.decode()
    parts = [line.removeprefix("data: ") for line in lines.splitlines() if "data: {" in line]
    text = "".join(json.loads(part)["choices"][0]["text"] for part in parts)
    assert text == whole["text"] and whole["finish_reason"] == "length" and len(parts) > 1


def test_a_conversation_is_remembered(character_folder: Path) -> None:
    knobs = ["decoding.max_tokens=6", "decoding.ignore_eos=true"]
    with LLM(str(character_folder), quant="fp32", device="cuda", overrides=knobs) as llm:
        assert llm.tokenizer is not None
        llm.tokenizer.chat_template = TEMPLATE
        chat = TerminalChat(LocalModel(llm), Shown())
        assert chat.handle("hi") and chat.handle("and now")
        first, second = (answer.num_prompt_tokens for answer in chat.answers)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert second > first
