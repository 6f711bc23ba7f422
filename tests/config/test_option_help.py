"""--help of an option: its knobs, with their defaults and comments."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from minivllm.config import compose

Cli = Callable[..., Any]


def test_an_option_s_knobs_are_told_with_their_comments(cli: Cli) -> None:
    done = cli("cache=paged", "--help")
    assert done.code == 0
    assert done.out.startswith("cache=paged: Keys and values in blocks")
    assert "  cache.block_size=16          tokens a block\n" in done.out
    assert "Other options of cache: contiguous, none" in done.out
    assert "preset=chat" not in done.out  # the list of groups is not printed, too


def test_what_an_option_starts_from_is_told_too(cli: Cli) -> None:
    out = cli("decoding=top_p", "--help").out
    assert "decoding.top_p=0.9\n" in out
    assert (
        "decoding.temperature=1.0" in out and "0 is greedy" in out
    )  # a comment of the option it starts from


def test_nested_knobs_and_presets(cli: Cli) -> None:
    out = cli("measure=default", "preset=kv_cache", "--help").out
    assert "  measure.slo.ttft_ms=null" in out
    assert "preset=kv_cache: " in out and "  sweep.params=" in out


def test_an_option_of_another_group_in_a_knob_is_told_as_it_is_set(cli: Cli) -> None:
    out = cli("speculative=draft", "--help").out
    assert "  model@speculative.model=null" in out and "  quant@speculative.quant=int4" in out
    assert "the draft's precision" in out and "speculative.quant=" not in out.replace("@specu", "")


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
