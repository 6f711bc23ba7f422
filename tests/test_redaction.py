"""Nothing secret is stored or shown: names and forms of secrets, texts, configurations, identities,
a whole sweep."""

from __future__ import annotations

import json
import signal
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import BadInput, redaction
from minivllm.bench.records.identity import cell_id
from minivllm.bench.records.record import portable
from minivllm.config.compose import build, compose
from minivllm.experiments.plan import essential
from minivllm.masking import MASK, is_secret
from minivllm.platform import files
from minivllm.redaction import clean, hide, redact
from tests.engines import fake_server


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "X-Api-Key",
        "OPENAI_API_KEY",
        "token",
        "hf_token",
        "HF_TOKEN",
        "access-token",
        "KEY",
        "password",
        "db_password2",
        "DB_PWD",
        "secret",
        "client_secret",
        "Authorization",
        "auth",
        "credentials",
        "cookie",
        "aws_secret_access_key",
        "X-Amz-Signature",
        "private_key",
        "sig",
        "authToken",
        "api_keys",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "api_key_env",
        "max_tokens",
        "token_ids",
        "stop_token_ids",
        "eos_token",
        "top_k",
        "tokenizer",
        "keys",
        "PWD",
        "joules_per_output_token",
        "cost_per_million_output_tokens",
        "cache_key",
        "author",
        "monkey",
        "passes",
        "tokens",
    ],
)
def test_names_of_what_is_no_secret(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("engine.extra.api_key=abc quant=int8", "engine.extra.api_key=*** quant=int8"),
        ("engine.extra={top_k: 5, token: 'a b'}", "engine.extra={top_k: 5, token: '***'}"),
        ("vllm serve m --api-key a b --port 1", "vllm serve m --api-key *** --port 1"),
        ("serve --api-key=abc --hf-token abc m", "serve --api-key=*** --hf-token *** m"),
        ("HF_TOKEN=abc vllm serve --tokenizer gpt2", "HF_TOKEN=*** vllm serve --tokenizer gpt2"),
        (
            "http://us:p@ss@host:80/v1?a=1&api_key=b&c=2",
            "http://***@host:80/v1?a=1&api_key=***&c=2",
        ),
        ("postgresql+psycopg2://u:p@h/db", "postgresql+psycopg2://***@h/db"),
        ("http://h/v1?key=abc", "http://h/v1?key=***"),
        ("curl -H 'X-Api-Key: abc' -u me:pw", "curl -H 'X-Api-Key: ***' -u ***"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("sent Bearer abc.defgh there", "sent Bearer *** there"),
        ("['--api-key', 'abc', '--port']", "['--api-key', '***', '--port']"),
        (
            """{"apiKey": "a b", "eos_token": "</s>"}""",
            """{"apiKey": "***", "eos_token": "</s>"}""",
        ),
        ("it was hf_" + "a1" * 12 + ", yes", "it was ***, yes"),
        ("engine.extra.api_key=${oc.env:FOO} x", "engine.extra.api_key=${oc.env:FOO} x"),
        (
            "{api_key: ${oc.decode:${oc.env:FOO,null}}}",
            "{api_key: ${oc.decode:${oc.env:FOO,null}}}",
        ),
        ("api_key=${oc.env:FOO,mysecret} x", "api_key=*** x"),
        ("f(a=1,api_key=b) c={d=e,token=f}", "f(a=1,api_key=*** c={d=e,token=***}"),
        ("extra: {token: abc}", "extra: {token: ***}"),
        ("a:\n  api_key: abc\n  b: 1", "a:\n  api_key: ***\n  b: 1"),
    ],
)
def test_texts(text: str, hidden: str) -> None:
    assert hide(text) == hide(text, strict=True) == hide(hidden) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "cache.foo: no such key: foo; did you mean key=[a,b]?",
        "the first token: 5 s after its key",
        "KeyError: 'model'",
        "write KEY=VALUE; max_tokens=5 and stop_token_ids=[1]",
        "Basic authentication is not a bearer of news",
        "file:///home/x@y/z",
    ],
)
def test_sentences_stay(text: str) -> None:
    assert hide(text) == text


PIECES = (*"=:'\"{}[], -&?@/", "key", "token", "${oc.env:")


@given(st.text(max_size=200) | st.lists(st.sampled_from(PIECES)).map("".join))
def test_hiding_is_total_and_done_once(text: str) -> None:
    assert hide(hide(text)) == hide(text)


def test_hiding_takes_time_in_proportion() -> None:
    for piece in (
        "a.a.",
        "a=[",
        "a='",
        "--a b ",
        "eyJ-",
        "${oc.env:",
        "{, ",
        'api_key="\\',
        "a://",
    ):
        once = hide(piece * (100_000 // len(piece)))  # minutes, if it went back for each
        assert hide(once) == once


def test_configurations() -> None:
    config = {
        "url": "https://u:p@h/v1",
        "api_key": "abc",
        "api_key_env": "NAME",
        "number": {"token": 123, "use_auth_token": True, "password": None, "max_tokens": 5},
        "credentials": {"user": "me", "more": ["a", {"b": "c"}]},
        "words": ["--port", "1", "--api-key", "abc"],
        "command": "KEY=abc serve",
    }
    assert redact(config) == {
        "url": "https://***@h/v1",
        "api_key": MASK,
        "api_key_env": "NAME",
        "number": {"token": MASK, "use_auth_token": True, "password": None, "max_tokens": 5},
        "credentials": {"user": MASK, "more": [MASK, {"b": MASK}]},
        "words": ["--port", "1", "--api-key", MASK],
        "command": "KEY=*** serve",
    }
    assert clean({"a": ["api_key=x", 1.5, None]}) == {"a": ["api_key=***", 1.5, None]}


def test_what_a_configuration_taught_is_hidden_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "from-environ")
    monkeypatch.setenv("UNTOLD", "by-its-name-only")
    said = (
        "it echoes pa@ss-word, pa%40ss-word, from-environ and by-its-name-only, but password-free"
    )
    assert hide(said) == said
    redaction.learn(
        {
            "engine": {
                "url": "http://user:pa%40ss-word@h",
                "api_key_env": "UNTOLD",
                "extra": {"token": "passwo"},
            }
        }
    )
    assert hide(said) == "it echoes ***, ***, *** and ***, but password-free"
    assert "pa@ss" not in str(BadInput(said))


def test_values_from_the_environment_are_stored_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "marker-one")
    monkeypatch.setenv("HOW_MANY", "7")
    overrides = [
        "engine=openai",
        "+engine.extra.user='${oc.decode:${oc.env:MY_API_KEY}}'",
        "+engine.extra.again=${engine.extra.user}",
        "workload.num_requests='${oc.decode:${oc.env:HOW_MANY}}'",
    ]
    overrides.insert(1, "engine.extra={}")
    config = compose(overrides)
    assert config["engine"]["extra"] == {"user": "marker-one", "again": "marker-one"}
    assert config["workload"]["num_requests"] == 7
    stored = portable(config)
    assert stored["engine"]["extra"] == {
        "user": "${oc.decode:${oc.env:MY_API_KEY}}",
        "again": "${engine.extra.user}",
    }
    assert stored["workload"]["num_requests"] == "${oc.decode:${oc.env:HOW_MANY}}"
    assert "as_written" not in stored and "as_written" not in compose([])
    monkeypatch.setenv("MY_API_KEY", "marker-two")
    assert cell_id(compose(overrides), "f") == cell_id(config, "f"), (
        "a secret is no part of an identity"
    )
    monkeypatch.setenv("HOW_MANY", "8")
    assert cell_id(compose(overrides), "f") != cell_id(config, "f"), "what is measured is"


@pytest.mark.parametrize(
    "override",
    [
        "engine.url=http://me:SECRET@127.0.0.1:1/v1",
        "engine.url='http://127.0.0.1:1/v1?api_key=SECRET'",
        "engine.extra={nested: {headers: {Authorization: 'Bearer SECRET'}}}",
        "engine.command='env HF_TOKEN=SECRET vllm serve --api-key SECRET --port 1'",
    ],
)
def test_two_keys_are_one_cell_and_one_sweep(override: str) -> None:
    one, other = (override.replace("SECRET", key) for key in ("key-aaa", "key-bbb"))
    ids = {cell_id(compose(["engine=openai", text]), "f") for text in (one, other)}
    assert len(ids) == 1 and essential([one]) == essential([other])
    assert "key-aaa" not in json.dumps(portable(compose(["engine=openai", one])))
    assert ids != {cell_id(compose(["engine=openai"]), "f")}


def test_a_private_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    files.write_private_json(path, ["secret"])
    assert json.loads(path.read_text()) == ["secret"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_console_hides(capsys: pytest.CaptureFixture[str]) -> None:
    redaction.learn({"engine": {"extra": {"api_key": "marker-one"}}})
    with redaction.console():
        print("token: 5 of marker-one")
        print("marker-one", file=sys.stderr)
    assert capsys.readouterr() == ("token: 5 of ***\n", "***\n")
    print("marker-one")
    assert capsys.readouterr().out == "marker-one\n"


def test_what_was_learned_is_masked_as_it_was_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "marker-of-then")
    redaction.learn({"engine": {"extra": {"api_key": "marker-0"}}})
    monkeypatch.delenv("SOME_TOKEN")
    for number in range(1, 1000):
        redaction.learn({"engine": {"extra": {"api_key": f"marker-{number}"}}})
    assert len(redaction._unread) <= redaction.MOST_UNREAD
    assert hide("marker-of-then, marker-0 and marker-999, but no marker") == (
        "***, *** and ***, but no marker"
    )
    assert not redaction._unread and "marker-500" in redaction.known()


def test_a_wrong_configuration_leaves_texts_masked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    redaction.learn({"engine": "abc", "model": {"api_key": "marker-one"}})
    assert hide("it is marker-one") == "it is ***"
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "wrong.yaml").write_text("# @package _global_\nengine: abc\n")
    for overrides, words in (
        (["preset=wrong"], "^engine='abc': choose an option, e.g. engine="),
        (["+as_written=3"], "^as_written is no setting: leave it out$"),
    ):
        with pytest.raises(BadInput, match=words):
            compose(overrides, tmp_path)
        assert hide("it is marker-one") == "it is ***"
    with monkeypatch.context() as patch:
        patch.setattr(redaction, "_remember", lambda value: [][0])
        redaction.learn({"api_key": "marker-two"})
        with pytest.raises(IndexError):
            hide("a text")
    assert hide("it is marker-one") == "it is ***"


def test_reading_that_is_interrupted_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(value: str) -> None:
        raise KeyboardInterrupt

    redaction.learn({"api_key": "marker-one"})
    with monkeypatch.context() as patch:
        patch.setattr(redaction, "_remember", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hide("a text")
    assert hide("it is marker-one") == "it is ***"


class Taking:
    """An engine of a user's own that takes its secret out of its knobs."""

    def __init__(self, auth: dict[str, str]) -> None:
        self.key = auth.pop("api_key")


def test_what_a_class_takes_out_of_its_knobs_is_masked() -> None:
    config = {"engine": {"_target_": f"{__name__}.Taking", "auth": {"api_key": "marker-one"}}}
    redaction.learn(config)
    assert build(config["engine"]).key == "marker-one" and config["engine"]["auth"] == {}
    assert hide("marker-one is wrong") == "*** is wrong"


def test_a_signal_handler_masks_while_its_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    remember, masked = redaction._remember, list[str]()

    def interrupted(value: str) -> None:
        monkeypatch.setattr(redaction, "_remember", remember)
        with redaction._lock:
            signal.raise_signal(signal.SIGUSR1)
        remember(value)

    def handler(number: int, frame: Any) -> None:
        masked.append(hide("marker-one and marker-two"))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        redaction.learn({"api_key": "marker-one"})
        redaction.learn({"api_key": "marker-two"})
        monkeypatch.setattr(redaction, "_remember", interrupted)
        assert hide("marker-one and marker-two") == "*** and ***"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert masked == ["*** and ***"] and not redaction._unread


def test_a_configuration_that_is_printed_has_no_secrets(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "marker-env")
    given = ("engine=openai", "engine.extra={token: marker-one, user: '${oc.env:MY_KEY}'}")
    for flags in (("--cfg", "job"), ("--cfg", "job", "--resolve")):
        result = cli(*flags, *given)
        assert result.code == 0 and "token: ***" in result.out and "marker" not in result.out
        keys = ("preset=serve", "task.api_keys=[marker-one, 'marker two', '${oc.env:MY_KEY}']")
        result = cli(*flags, *keys)
        assert result.code == 0 and "  - ***\n  - ***\n" in result.out
        assert "marker" not in result.out
    refused = cli(*given, "engine.extra.token=marker-two,marker-three")
    assert refused.code == 2 and "marker" not in refused.err


def test_nothing_secret_is_left_of_a_sweep(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, plan, log, page, tables and console, of a server that repeats in its error what it
    was sent."""
    pytest.importorskip("aiohttp")
    secrets = [f"marker-{name}" for name in ("url", "query", "extra", "nested", "env", "bearer")]
    monkeypatch.setenv("OPENAI_API_KEY", "marker-bearer")
    monkeypatch.setenv("THE_KEY", "marker-env")
    server, url = fake_server.in_thread(
        events=[{"error": {"message": f"not for {' '.join(secrets)}"}}]
    )
    result = cli(
        "-m",
        "engine=openai",
        f"engine.url='{url.replace('//', '//me:marker-url@')}?api_key=marker-query'",
        "engine.extra={return_token_ids: true, api_key: marker-extra, a: [{password: "
        "marker-nested}], user: '${oc.env:THE_KEY}'}",
        "sweep.name=hidden",
        "workload.num_requests=2",
        "workload.input_len=8",
        "workload.output_len=4",
    )
    server.shutdown()
    assert result.code == 1, result.err
    left = [path for path in Path().rglob("*") if path.is_file()]
    assert {"plan.json", "record.json", "config.yaml", "run.log", "index.html"} <= {
        path.name for path in left
    }
    for path in left:
        assert not any(secret.encode() in path.read_bytes() for secret in secrets), path
    assert not any(secret in result.out + result.err for secret in secrets)
    (record,) = Path("runs/hidden").glob("*/record.json")
    assert "not for *** *** *** *** *** ***" in record.read_text()
    assert (
        json.loads(record.read_text())["config"]["engine"]["extra"]["user"] == "${oc.env:THE_KEY}"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-m", "hydra/sweeper=basic"), "hydra/sweeper=basic stores the command in multirun.yaml"),
        (("hydra.output_subdir=.hydra",), "hydra.output_subdir=.hydra stores the command"),
        (("-m", "hydra.output_subdir=x"), "hydra.output_subdir=x stores the command"),
    ],
)
def test_hydra_is_not_let_store_a_secret(
    cli: Callable[..., Any], flags: tuple[str, ...], words: str
) -> None:
    secret = ("engine=openai", "+engine.extra.api_key=marker-one")
    result = cli(*flags, *secret)
    assert result.code == 2 and "marker" not in result.err
    assert f"+engine.extra.api_key=***: {words}" in result.err and "${oc.env:NAME}" in result.err
    assert not list(Path().rglob("*"))


def test_overwritten_secrets_keep_the_length_of_a_file() -> None:
    redaction.learn({"engine": {"extra": {"api_key": "mårker-one"}}})
    line = "\xff has mårker-one".encode() + b"\xff, that is it\n"
    assert len(redaction.blank(line)) == len(line) and b"rker" not in redaction.blank(line)
    assert redaction.blank(b"none \xff\n") == b"none \xff\n"


PLAIN_KEYS = {
    "OPENAI_API_KEY": "ollama",
    "VLLM_API_KEY": "openai",
    "SERVICE_TOKEN": "greedy",
    "DB_PASSWORD": "minivllm",
    "SOME_SECRET": "fixed_length",
    "OTHER_TOKEN": "a1b2c3d4e5",
}


def test_words_in_the_environment_change_no_record_and_no_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overrides = ["engine=openai", "model=tiny", "decoding=greedy", "engine.url=http://h/a1b2c3d4e5"]
    before = compose(overrides)
    stored, identity = portable(before), cell_id(before, "f")
    for name, value in PLAIN_KEYS.items():
        monkeypatch.setenv(name, value)
    config = compose(overrides)
    assert cell_id(config, "f") == identity
    assert essential(overrides) == sorted(overrides)
    now = portable(config)
    assert now["engine"].pop("url") == "http://h/***" and stored["engine"].pop("url")
    assert now == stored == clean(now)
    assert hide("no a1b2c3d4e5 for ollama") == "no *** for ollama"


def test_what_a_configuration_is_made_of_stays() -> None:
    redaction.learn({"engine": {"extra": {"api_key": "an-own-module"}}})
    config = {"choices": {"task": "an-own-module"}, "auth": {"_target_": "an-own-module.Key"}}
    assert clean(redact(config)) == config
    assert clean({"choices": {"api_key": "abc"}}) == {"choices": {"api_key": MASK}}


def test_a_whole_value_is_hidden_in_a_text() -> None:
    assert hide("{api_key: abc def}") == "{api_key: ***}"
    assert hide("{api_key: abc def, top_k: 3}") == "{api_key: ***, top_k: 3}"
    assert hide("{auth: {user: abc}}") == "{auth: ***}"


@given(
    st.lists(
        st.sampled_from(
            [
                "api",
                "key",
                "keys",
                "pass",
                "word",
                "pwd",
                "secret",
                "token",
                "tokens",
                "access",
                "auth",
                "sig",
                "dsn",
                "hf",
                "x",
                "s",
            ]
        ),
        min_size=1,
    )
)
def test_a_text_that_is_not_looked_at_closely_has_no_secret(words: list[str]) -> None:
    for name in ("_".join(words), "".join(words), "".join(map(str.title, words)), "-".join(words)):
        assert redaction.suspicious(f"{name}=abc") or not is_secret(name)


def test_threads_learn_and_hide_at_once() -> None:
    def work(number: int) -> bool:
        for i in range(40):
            redaction.learn({"engine": {"extra": {"api_key": f"marker-{number}-{i}"}}})
            if hide(f"it is marker-{number}-{i} here") != "it is *** here":
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_threads_compose_at_once_and_keep_their_variables_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(3):
        monkeypatch.setenv(f"USER_{number}", f"person-{number}")

    def work(number: int) -> Any:
        given = (
            "engine.extra={}"
            if number == 2
            else f"engine.extra={{user: '${{oc.env:USER_{number}}}'}}"
        )
        config = compose(["engine=openai", given])
        return config["engine"]["extra"], [entry[1] for entry in config.get("as_written", ())]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    assert found == [
        ({"user": "person-0"}, ["${oc.env:USER_0}"]),
        ({"user": "person-1"}, ["${oc.env:USER_1}"]),
        ({}, []),
    ]
