"""--help of an option: its knobs, with their defaults and sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from minivllm.config import compose
from minivllm.config.option_help import declared

Cli = Callable[..., Any]


def test_an_option_s_knobs_have_their_defaults_sentences_and_ranges(cli: Cli) -> None:
    done = cli("cache=paged", "--help")
    assert done.code == 0
    assert done.out.startswith("cache=paged: Keys and values in blocks")
    assert "  cache.block_size=16          Tokens a block. (at least 1)\n" in done.out
    assert "cache.kv_dtype=auto " in done.out and "(auto, int8, fp8)\n" in done.out
    assert "Other options of cache: contiguous, none" in done.out
    assert "preset=chat" not in done.out  # the list of groups is not printed, too


def test_what_an_option_starts_from_is_there_too(cli: Cli) -> None:
    out = cli("decoding=top_p", "--help").out
    assert "decoding.top_p=0.9 " in out
    assert "decoding.temperature=1.0" in out and "0 is greedy" in out  # the class is greedy's


def test_nested_knobs_and_presets(cli: Cli) -> None:
    out = cli("measure=default", "workload=chat", "preset=kv_cache", "--help").out
    assert "measure=default: How to measure." in out
    assert "  measure.slo.ttft_ms=null            Longest time to the first token" in out
    assert "  workload.input_len={distribution: uniform, min: 64, max: 256} Prompt tokens" in out
    assert "preset=kv_cache: " in out and "  sweep.params=" in out


def test_an_option_of_another_group_in_a_knob_is_shown_as_it_is_set(cli: Cli) -> None:
    out = cli("speculative=draft", "--help").out
    assert "  model@speculative.model=null" in out and "  quant@speculative.quant=int4" in out
    assert "The draft's precision" in out and "speculative.quant=" not in out.replace("@specu", "")


def test_an_ablation_has_the_sentences_of_its_knobs(cli: Cli) -> None:
    out = cli("+ablation=pairs", "--help").out
    assert "  ablation.max_arms=64 " in out and "More arms are an error" in out
    assert "blocks; ten are needed" in out  # a comment of the file


def test_every_knob_has_a_sentence() -> None:
    for name, cls in (*compose.OPTIONS.items(), *compose.TARGETLESS.items()):
        found = declared(cls)
        assert {item.name for item in fields(cls)} <= {*found}, name
        assert all(knob.sentence.endswith(".") for knob in found.values()), name


def test_every_option_has_help(cli: Cli) -> None:
    """One of each group at a time: Hydra looks all groups up in each command."""
    options = (
        [f"{group}={path.stem}" for path in sorted((compose.conf_dir() / group).glob("*.yaml"))]
        for group in ("quant", "batching", "attention")
    )
    for together in zip_longest(*options):
        asked = [option for option in together if option]
        done = cli(*asked, "--help")
        told = [line.partition(":")[0] for line in done.out.splitlines()]
        assert done.code == 0 and {*asked} <= {*told}, done.err


def test_a_user_s_option_has_help(
    cli: Cli, user_dir: Any, plug_in: Callable[[str, str, str], None]
) -> None:
    plug_in("quant", "mine", "# What it is.\n_target_: my_quant.Mine\nprice: 5$ # costs $NAME\n")
    out = cli(f"--config-dir={user_dir / 'conf'}", "quant=mine", "--help").out
    assert (
        "quant=mine: What it is.\n  my_quant.Mine\n" in out
        and "quant.price=5$" in out
        and "costs $NAME" in out
    )
