"""No secret is left of an override, and nothing else is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from minivllm.config.compose import load
from minivllm.config.overrides import as_overrides, hidden, model_overrides, without_secrets
from minivllm.errors import BadInput
from minivllm.experiments.plan import product
from minivllm.redaction import redact


@pytest.mark.parametrize(
    "text",
    [
        "workload.path=data/key=3/x.jsonl",
        "workload.path='key=3/x.jsonl'",
        "workload.path=data/pat=3/sig=1/auth=2/x.jsonl",
        "decoding.stop=[sig: x]",
        "decoding.stop=['auth: x','Key: y']",
        "engine.extra={a: ${oc.env:X}, api_key: ${oc.env:FOO}}",
        "~engine.extra",
        "cache.block_size=16",
    ],
)
def test_overrides_without_secrets_stay(text: str) -> None:
    assert hidden(text) == text
    name, _, value = text.partition("=")
    assert redact({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key=abc", "key=***"),
        ("+engine.extra.auth=abc", "+engine.extra.auth=***"),
        ("engine.extra={api_key: abc def}", "engine.extra={api_key: ***}"),
        ("engine.extra={api_key: abc def, b: [x y]}", "engine.extra={api_key: ***, b: [x\\ y]}"),
        ("engine.extra={auth: {user: abc}}", "engine.extra={auth: {user: ***}}"),
        (
            "engine.extra={a: ${oc.env:X}, token: 'a b'}",
            "engine.extra={a: ${oc.env:X}, token: '***'}",
        ),
        ("engine.url='http://h/v1?sig=abc'", "engine.url='http://h/v1?sig=***'"),
        (
            "engine.command='serve --key=abc --auth abc'",
            "engine.command='serve --key=*** --auth ***'",
        ),
        ("engine.extra.api_key=abc,def", "engine.extra.api_key=***"),
        ('engine.extra.api_key="abc def', "engine.extra.api_key=***"),
        ("engine.extra.api_key=[abc, def", "engine.extra.api_key=***"),
        (
            'engine.extra={headers: {Authorization: "abc def',
            "engine.extra={headers: {Authorization=***",
        ),
        ("engine.command='serve --api-key \"abc def", "engine.command='serve --api-key=***"),
        ("engine.url=http://h/v1?api_key=abc", "engine.url=http://h/v1?api_key=***"),
    ],
)
def test_overrides(text: str, expected: str) -> None:
    assert hidden(text) == hidden(expected) == expected


def test_arms_may_differ_in_such_paths() -> None:
    given = ["workload.path='data/key=3/x','data/key=4/x'", "decoding.stop=['sig: x'],['sig: y']"]
    sweep = product(OverridesParser.create().parse_overrides(given))
    assert len({arm.name for arm in sweep.arms}) == 4


def test_a_launcher_is_shown_no_secret() -> None:
    given = [
        "engine=openai",
        "engine.url=http://me:marker-one@h/v1",
        "engine.extra={api_key: marker-two, n: [1]}",
    ]
    config = load(given)
    assert config.engine.url == "http://me:marker-one@h/v1"
    shown = without_secrets(config)
    assert "marker" not in str(shown)
    assert shown.engine.url == "http://***@h/v1" and shown.engine.extra == {
        "api_key": "***",
        "n": [1],
    }
    assert shown.hydra.overrides.task[0] == "engine=openai"
    assert config.engine.url == "http://me:marker-one@h/v1", (
        "a sweeper composes trials of the other"
    )
    assert without_secrets(load(["engine=openai"])) == load(["engine=openai"])


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ([], []),
        (["quant=int8", "serve"], ["quant=int8", "serve"]),  # no first word: Hydra refuses it
        (["--cfg", "job"], ["--cfg", "job"]),
        (["+ablation=pairs"], ["+ablation=pairs"]),
        (["~tracker"], ["~tracker"]),
        (["serve"], ["preset=serve"]),
        (["chat", "qwen3", "quant=int8"], ["preset=chat", "model=qwen3", "quant=int8"]),
        (["bench"], ["task=bench"]),
        (["bench", "a/b"], ["task=bench", "model=hf", "model.path='a/b'"]),
        (["-m", "bench", "quant=int8,nf4"], ["-m", "task=bench", "quant=int8,nf4"]),
        (["report"], ["task=report"]),
        (["compare", "before", "it's"], ["task=compare", "runs=['before','it\\'s']"]),
    ],
)
def test_leading_words_name_a_task_and_what_it_works_on(
    command: list[str], overrides: list[str]
) -> None:
    assert as_overrides(command) == overrides


def test_a_word_that_is_no_task_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"^serv: no such task; did you mean serve\?"):
        as_overrides(["serv"])
    with pytest.raises(BadInput, match=r"^b: after the task chat one word may name the model"):
        as_overrides(["chat", "a", "b"])


def test_a_model_is_an_option_or_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("")
    assert model_overrides("tiny") == ["model=tiny"]
    assert model_overrides("mine") == ["model=hf", "model.path='mine'"]
    assert model_overrides("mine", tmp_path) == ["model=mine"]
    assert model_overrides("x" * 300)[0] == "model=hf"
