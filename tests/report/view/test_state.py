"""The page's state against state.py's, after every item. (That one is compared with the engine's
own state by tests.engine.imaginary.)"""

from __future__ import annotations

from typing import Any

from minivllm.report.view.state import ViewState
from tests.report.view.conftest import Recorded

STATES = """() => {
  const { view } = globalThis.minivllmView;
  return [...view.timeline.items.keys()].map((index) => {
    const state = view.timeline.at(index);
    const requests = [...state.requests.values()].map((one) => [
      one.number, one.id, one.state, one.numTokens, one.numComputed, one.blocks,
    ]);
    return [requests, [...state.cached], state.numWaiting, state.numUsedBlocks];
  });
}"""


def python_states(items: list[dict[str, Any]]) -> list[Any]:
    """The same of state.py."""
    view, states = ViewState(), []
    for item in items:
        view.apply(item)  # type: ignore[arg-type]
        requests = [
            [n, r.new.request_id, r.state, r.num_tokens, r.num_computed, [*r.blocks]]
            for n, r in view.requests.items()
        ]
        cached = [list(pair) for pair in view.cached.items()]
        states.append([requests, cached, view.num_waiting, view.num_used_blocks])
    return states


def test_the_page_has_pythons_state_after_every_item(recorded: Recorded) -> None:
    told, page = python_states(recorded.bundles), recorded.page.evaluate(STATES)
    assert len(page) == len(told) > 100
    assert page == told
    assert any(len(cached) > 3 for _, cached, _, _ in page)


def test_the_state_is_the_same_when_the_view_goes_back(recorded: Recorded) -> None:
    """It is rebuilt from the last one that the timeline has kept."""
    told = python_states(recorded.bundles)
    backwards = STATES.replace(".keys()]", ".keys()].reverse()")
    assert recorded.page.evaluate(backwards) == told[::-1]
