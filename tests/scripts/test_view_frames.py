"""The script that counts frames records what it says."""

from __future__ import annotations

from minivllm.report.view.state import ViewState
from tests.scripts.load import load_script


def test_as_many_requests_as_asked_for_hold_most_blocks() -> None:
    script = load_script("view_frames")
    items = script.recording(blocks=200, requests=16, steps=150)
    view, used = ViewState(), []
    for item in items:
        view.apply(item)
        states = [one.state for one in view.requests.values()]
        assert len(states) - view.num_waiting <= 16
        used.append(view.num_used_blocks)
    assert len(items) == 151 and max(used) > 140
    assert sum("done" in str(item.get("states")) for item in items) > 8
