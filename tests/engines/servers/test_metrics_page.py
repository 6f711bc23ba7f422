"""Prometheus' text as totals, settings and differences."""

from __future__ import annotations

import pytest

from minivllm.engines.openai.stream_event import ServerError
from minivllm.engines.servers.metrics_page import MetricsPage

BEFORE = """# TYPE vllm:hits counter
vllm:hits_total{engine="0"} 3
vllm:hits_total{engine="1"} 4
vllm:config{cache_dtype="fp8"} 1
vllm:step_bucket{le="8.0"} 2
vllm:step_bucket{le="64.0"} 5
vllm:step_bucket{le="+Inf"} 5
"""


def test_counters_are_summed_over_labels_and_counted_from_before() -> None:
    before = MetricsPage.parse(BEFORE)
    after = MetricsPage.parse(BEFORE.replace("} 4", "} 10") + "vllm:drafts_total 2\n")
    assert before.total("vllm:hits_total") == 7 and before.total("vllm:drafts_total") is None
    assert after.since(before, "vllm:hits_total") == 6
    assert after.since(before, "vllm:drafts_total") == 2  # it came with the first draft
    assert after.since(before, "vllm:nothing") is None
    assert before.label("vllm:config", "cache_dtype") == "fp8"
    assert before.label("vllm:config", "size") is None is before.label("vllm:nothing", "size")


def test_the_largest_bucket_is_that_of_the_window() -> None:
    before = MetricsPage.parse(BEFORE)
    text = BEFORE.replace('le="8.0"} 2', 'le="8.0"} 4')
    text = text.replace('le="64.0"} 5', 'le="64.0"} 7').replace('Inf"} 5', 'Inf"} 7')
    assert MetricsPage.parse(text).largest_bucket(before, "vllm:step") == 8
    assert before.largest_bucket(before, "vllm:step") is None
    assert before.largest_bucket(before, "vllm:nothing") is None


def test_a_page_of_something_else_is_said_so() -> None:
    with pytest.raises(ServerError, match="not in Prometheus' format"):
        MetricsPage.parse("<html>nothing here</html>\n")
