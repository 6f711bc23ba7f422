"""docs/guides/peers.md says what each peer supports, in the words of the tables that refuse the
rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.targets.support.supported_knobs import defaults, require_supported, support_of
from minivllm.config.compose import OPTIONS, compose
from minivllm.platform.options import type_hints
from minivllm.platform.support import ALL, EngineOptions

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "peers.md"
# Supported knobs by peer, then group.
PEERS = {
    cls.support.engine.removeprefix("engine="): cls.support.knobs
    for cls in OPTIONS.values()
    if issubclass(cls, EngineOptions) and cls.support.knobs is not None
}


def table() -> str:
    groups = dict.fromkeys(group for knobs in PEERS.values() for group in knobs)
    lines = [
        f"| | {' | '.join(f'`{name}`' for name in PEERS)} |",
        "| --- " * (len(PEERS) + 1) + "|",
    ]
    for group in groups:
        cells = []
        for peer in PEERS.values():
            names = peer[group].names if group in peer else ()
            cells.append("all" if names == ALL else ", ".join(f"`{name}`" for name in names) or "–")
        lines.append(f"| `{group}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    shown = re.search(
        r"<!-- supported -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.S
    )
    assert shown is not None and shown[1].strip() == table(), f"put this there:\n{table()}"


def test_every_table_names_knobs_that_exist() -> None:
    standard = defaults()
    for peer, groups in PEERS.items():
        for group, knobs in groups.items():
            known = {*standard[group], *(n for t in knobs.targets for n in type_hints(OPTIONS[t]))}
            assert knobs.names == ALL or set(knobs.names) <= known, (peer, group)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine=transformers", "quant=int8"],
            "quant=int8 is not supported by engine=transformers: use quant=bf16",
        ),
        (
            ["engine=transformers", "batching=static"],
            "batching=static is not supported by engine=transformers: leave it out, "
            "engine=transformers has its own batching",
        ),
        (
            ["engine=transformers", "runtime.profile=true"],
            "runtime.profile=true is not supported by engine=transformers",
        ),
        (
            ["engine=simulated", "runtime.profile=true"],
            "runtime.profile=true is not supported by engine=simulated",
        ),
        (
            ["engine=openai", "runtime.threads=1"],
            "runtime.threads=1 is not supported by engine=openai",
        ),
    ],
)
def test_a_knob_is_refused_before_anything_is_started(
    cli: Any, overrides: list[str], message: str
) -> None:
    done = cli(*overrides)
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1, done.err
    assert "loading" not in done.out and not Path("runs").exists()


def test_a_server_that_is_started_here_is_given_threads() -> None:
    config = compose(["engine=openai", "engine.command=serve", "runtime.threads=1"])
    support = support_of(config["engine"])
    assert support is not None and support.knobs is not None
    assert "threads" in support.knobs["runtime"].names
    require_supported(config, support)
