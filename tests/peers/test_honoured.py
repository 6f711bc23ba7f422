"""docs/peers.md says what each peer honours, in the words of the tables that refuse the rest."""

from __future__ import annotations

import re
from pathlib import Path

from minivllm.peers import openai, transformers, transformers_continuous, vllm
from minivllm.peers.honoured import ALL

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
PEERS = {
    "transformers": transformers.HONOURED,
    "transformers_continuous": transformers_continuous.HONOURED,
    "vllm": vllm.HONOURED,
    "openai": openai.HONOURED_WITH_COMMAND,
}


def table() -> str:
    groups = dict.fromkeys(group for peer in PEERS.values() for group in peer.groups)
    lines = [f"| | {' | '.join(f'`{name}`' for name in PEERS)} |", "| --- " * (len(PEERS) + 1) + "|"]
    for group in groups:
        cells = []
        for peer in PEERS.values():
            names = peer.groups[group].names if group in peer.groups else ()
            cells.append("all" if names == ALL else ", ".join(f"`{name}`" for name in names) or "–")
        lines.append(f"| `{group}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    shown = re.search(r"<!-- honoured -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.S)
    assert shown is not None and shown[1].strip() == table(), f"put this there:\n{table()}"


def test_every_table_names_knobs_that_exist() -> None:
    from minivllm.peers.honoured import defaults

    standard = defaults()
    for peer in PEERS.values():
        for group, knobs in peer.groups.items():
            assert knobs.names == ALL or set(knobs.names) <= standard[group].keys(), (peer.peer, group)
