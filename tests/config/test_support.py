"""Which settings say something of what was measured."""

from __future__ import annotations

import sys

import pytest

from minivllm.bench.records.identity import cell_name
from minivllm.bench.records.reading import flatten
from minivllm.config.compose import compose
from minivllm.config.support import is_elsewhere, is_remote, is_reported, supported_settings
from minivllm.platform.support import Knobs, Support


def test_every_setting_of_the_own_engine_says_something() -> None:
    assert supported_settings(compose([])) is None
    assert is_reported(None, "quant") and is_reported(None, "cache", "block_size")
    config = compose(["quant=nf4"])
    columns = flatten({"config": config})
    assert {f"config.{key}" for key in ("quant._target_", "cache.block_size")} <= columns.keys()
    assert {f"choices.{key}" for key in config["choices"]} <= columns.keys()


@pytest.mark.parametrize(
    ("engine", "told", "untold"),
    [
        ("transformers", ["model", "quant", "quant.dtype"], ["batching", "attention", "cache"]),
        ("vllm", ["batching", "cache.block_size"], ["cache.eviction", "batching.watermark"]),
        ("openai", ["decoding.temperature", "model.path"], ["model", "quant", "runtime.threads"]),
        ("simulated", ["quant", "batching.preemption"], ["attention", "runtime.threads", "vision"]),
    ],
)
def test_what_an_engine_does_not_support_says_nothing_of_it(
    engine: str, told: list[str], untold: list[str]
) -> None:
    settings = supported_settings(compose([f"engine={engine}"]))
    said = {key: is_reported(settings, *key.split(".")) for key in (*told, *untold)}
    assert said == dict.fromkeys(told, True) | dict.fromkeys(untold, False)
    assert is_reported(settings, "workload", "input_len"), "the harness's own"


def test_a_servers_model_has_the_servers_name() -> None:
    config = compose(["engine=openai", "model=qwen3"])
    assert is_remote(config) and is_elsewhere(config)
    assert "choices.model" not in flatten({"config": config})
    row = flatten({"config": config, "served_model": "llama", "memory": {"host_rss_peak": 9}})
    assert row["choices.model"] == "llama" and row["memory.host_rss_peak"] is None
    started = compose(["engine=openai", "engine.command=serve"])
    assert is_remote(started) and not is_elsewhere(started)
    assert not is_remote(compose(["engine=vllm_server"]))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["engine=openai"], "openai"),
        (["engine=openai", "engine.model=org/llama"], "org-llama-openai"),
        (["engine=transformers"], "tiny-bf16-transformers"),
        (["engine=simulated"], "tiny-bf16-continuous-simulated"),
        ([], "tiny-bf16-continuous"),
    ],
)
def test_a_cell_is_named_after_what_its_engine_supports(overrides: list[str], name: str) -> None:
    assert cell_name(compose(overrides)) == name


class Silent:
    """An engine of a user's own without `support`."""


class Declared:
    """One that declares a precision."""

    support = Support(knobs={"quant": Knobs(("dtype",))})


def test_a_class_of_the_users_own_is_labelled_with_what_it_declares() -> None:
    config = compose([])
    config["choices"]["engine"] = "mine"
    config["engine"] = {"_target_": f"{__name__}.Silent"}
    assert supported_settings(config) == [] and cell_name(config) == "mine"
    config["engine"] = {"_target_": f"{__name__}.Declared"}
    assert supported_settings(config) == ["quant", "quant.dtype"]
    assert cell_name(config) == "bf16-mine"
    assert "choices.batching" not in flatten({"config": config})
    config["engine"] = {"_target_": "nowhere.Mine"}
    assert "nowhere" not in sys.modules
    assert supported_settings(config) is None, "not looked at: nothing is imported for a label"
