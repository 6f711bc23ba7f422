"""Images through engines under test: the same tokens, and records of what towers did."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import SamplingParams
from minivllm.bench.driver import warm_up
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.making import WorkloadMaker
from minivllm.bench.records.feature_figures import EncoderFigures
from minivllm.bench.workloads.arrivals import Concurrency
from minivllm.config.compose import build, compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.engines.transformers.engine import TransformersEngine
from minivllm.errors import BadInput
from tests.engines.driving import run
from tests.qwen_vl import FAMILIES, make_checkpoint
from tests.seeing import IMAGE_TOKEN, add_tokenizer, encoded, make_smolvlm, picture
from tests.serving.raw import ask
from tests.serving.running import RunningServer, serving

WORKLOAD = ["workload=images", "workload.num_requests=4", "workload.output_len=6"]
SIZES = ["workload.width=60", "workload.height=40", "workload.input_len=5", "workload.reuse=0.4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("smolvlm")
    make_smolvlm(place)
    return place


def configuration(folder: Path, *overrides: str) -> dict[str, Any]:
    model = ["model=hf", f"model.path={folder}", "quant=fp32", "runtime.device=cpu"]
    return compose([*model, "runtime.threads=1", *WORKLOAD, *SIZES, *overrides])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[MinivllmEngine]:
    engine = MinivllmEngine(configuration(folder, "cache.num_blocks=64"))
    yield engine
    engine.close()


def check_transformers(engine: MinivllmEngine, config: dict[str, Any]) -> None:
    """Both engines make the same workload, and the same tokens of it."""
    workload = WorkloadMaker().make(engine, config["workload"], 0)
    peer = build(config["engine"], {"config": config})
    assert isinstance(peer, TransformersEngine)
    try:
        assert WorkloadMaker().make(peer, config["workload"], 0).hash == workload.hash
        tokens = [
            [t.token_ids for t in run(one, workload, Concurrency(4))] for one in (engine, peer)
        ]
        # Both count the tower's operations; transformers computes a picture that comes again, too.
        ours, theirs = (sum(s["encoder_flops"] for s in one.steps()) for one in (engine, peer))
        assert theirs >= ours > 0
    finally:
        peer.close()
    assert tokens[0] == tokens[1] and len(tokens[0]) == 4


def test_transformers_gives_the_same_tokens_for_the_same_images(
    engine: MinivllmEngine, folder: Path
) -> None:
    images = "workload.images={distribution: uniform, min: 1, max: 2}"
    check_transformers(engine, configuration(folder, "engine=transformers", images))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_same_tokens_for_families_with_positions(
    family: str, tmp_path: Path
) -> None:
    """Prompts of several lengths, which transformers pads."""
    make_checkpoint(tmp_path, family)
    changes = [
        "workload.images={distribution: uniform, min: 1, max: 3}",
        "workload.width={distribution: uniform, min: 20, max: 90}",
    ]
    engine = MinivllmEngine(configuration(tmp_path, "cache.num_blocks=64", *changes))
    try:
        check_transformers(engine, configuration(tmp_path, "engine=transformers", *changes))
    finally:
        engine.close()


def test_what_towers_did_is_counted_from_the_last_reset(
    engine: MinivllmEngine, folder: Path
) -> None:
    config = configuration(folder)
    workload = WorkloadMaker().make(engine, config["workload"], 1)
    distinct = len({name for request in workload.requests for name in request.images})
    for _ in range(2):  # cold each time
        engine.reset()
        run(engine, workload, Concurrency(4))
        figures = EncoderFigures.of(engine.liveness())
        assert figures is not None and figures.images_encoded == distinct
        assert figures.images_encoded + figures.encoder_cache_hits == 4
        assert figures.image_tokens == 4 * 112 and figures.encoder_flops > 0
        steps = engine.steps()
        assert sum(s["encoder_flops"] for s in steps) == pytest.approx(figures.encoder_flops)
        assert 0 < sum(s["encoder_ms"] for s in steps) == pytest.approx(figures.encoder_ms)
    assert EncoderFigures.of({"quant": {}}) is None


def test_a_file_of_prompts_names_pictures_beside_it(
    engine: MinivllmEngine, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(encoded(picture(50, 30)))
    line = {"prompt_token_ids": [5, IMAGE_TOKEN, 7], "images": ["one.png"], "max_tokens": 3}
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(line) + "\n" + json.dumps({"prompt_token_ids": [4, 5]}) + "\n")
    node = compose(["workload=file", f"workload.path={file}"])["workload"]
    workload = WorkloadMaker().make(engine, node, 0)
    first, second = workload.requests
    assert len(first.images) == 1 and len(first.prompt_token_ids) == 2 + 112 and not second.images
    traces = run(engine, workload, Concurrency(1))
    assert [trace.completed for trace in traces] == [True, True]
    file.write_text(json.dumps({**line, "prompt_token_ids": [5, 7]}))
    with pytest.raises(BadInput, match=r"prompts.jsonl.*0 placeholders.*1 images"):
        WorkloadMaker().make(engine, node, 0)
    file.write_text(json.dumps({**line, "images": ["two.png"]}))
    with pytest.raises(BadInput, match=r"two\.png"):
        WorkloadMaker().make(engine, node, 0)


# ---- a server that is sent pictures


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a tokenizer and a chat template."""
    place = tmp_path_factory.mktemp("chatting")
    make_smolvlm(place)
    add_tokenizer(place)
    return place


@pytest.fixture(scope="module")
def server(chatting: Path) -> Iterator[RunningServer]:
    """A process, since the whole way over HTTP is what is tested."""
    words = ("model=hf", f"model.path={chatting}", "quant=fp32", f"vision.folder={chatting}")
    with serving(*words, "decoding=greedy", "decoding.max_tokens=4") as running:
        yield running


def asking(folder: Path, *overrides: str) -> dict[str, Any]:
    """The configuration of a load on that server."""
    model = ["model=hf", f"model.path={folder}", "engine=openai"]
    return compose([*model, *WORKLOAD, *SIZES, *overrides])


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_server_is_sent_the_pictures_of_a_workload(
    api: str, server: RunningServer, chatting: Path
) -> None:
    pytest.importorskip("aiohttp")
    url = f"engine.url={server.url}/v1"
    knobs = [f"engine.api={api}", "workload.images=2", f"workload.ignore_eos={api == 'chat'}"]
    config = asking(chatting, url, *knobs)
    engine = build(config["engine"], {"config": config})
    try:
        workload = WorkloadMaker().make(engine, config["workload"], 0)
        assert all(len(request.images) == 2 for request in workload.requests)
        warm = warm_up(engine, workload, Concurrency(2), SamplingParams(), Clock(), 2, others=True)
        assert warm is not None
        engine.reset()
        traces = run(engine, workload, Concurrency(2))
        assert [trace.error for trace in traces] == [None] * 4
        counts = engine.liveness()
    finally:
        engine.close()
    # The server's template writes "u:" before the message and "a:" behind it, and this tokenizer a
    # space between two tokens of five.
    sent, counted = (counts["stream"][f"prompt_tokens_{what}"] for what in ("sent", "counted"))
    assert counted == sent + 4 * (len("u:a:") + 4) and sent > 4 * 2 * 112


def test_only_messages_have_a_place_for_pictures(server: RunningServer, chatting: Path) -> None:
    pytest.importorskip("aiohttp")
    config = asking(chatting, f"engine.url={server.url}/v1")
    engine = build(config["engine"], {"config": config})
    try:
        with pytest.raises(BadInput, match=r"workload\.images: .*engine=openai engine\.api=chat"):
            WorkloadMaker().make(engine, config["workload"], 0)
    finally:
        engine.close()


def said(server: RunningServer, *parts: Any, **further: Any) -> Any:
    body = {"model": "", "messages": [{"role": "user", "content": list(parts)}], **further}
    return ask(server.url, "/v1/chat/completions", {**body, "return_token_ids": True})


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_one_picture_is_the_same_from_a_file_and_from_a_uri(
    server: RunningServer, chatting: Path
) -> None:
    (chatting / "one.png").write_bytes(data := encoded(picture(50, 30)))
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    text = {"type": "text", "text": "what is this"}
    whole = [said(server, at(url), text) for url in (uri, f"file://{chatting}/one.png")]
    answers = [json.loads(one.body)["choices"][0]["token_ids"] for one in whole]
    assert answers[0] == answers[1] and len(answers[0]) == 4
    for url, words in (
        (uri.replace("iVBOR", "AAAAA"), "image 1 is broken or no picture"),
        ("file:///etc/hostname", "only files below vision.folder"),
        ("http://127.0.0.1:9/x.png", "no URL is fetched"),
    ):
        answer = said(server, at(url), text)
        assert answer.status == 400 and words in answer.error["message"]
