"""What is a record: types, versions, numbers that cannot be; whatever else lies in record.json is
refused with a reason."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given

from minivllm.bench.records.reading import flatten
from minivllm.bench.records.record import SCHEMA_VERSION
from minivllm.bench.records.schema import current, impossible
from minivllm.errors import BadInput
from tests.damage import changed
from tests.report.synthetic import make_record

GOOD = json.loads(json.dumps(make_record().to_dict(), default=str))


def with_value(path: str, value: Any, record: dict[str, Any] = GOOD) -> dict[str, Any]:
    """A copy in which one field has another value."""
    made = copy.deepcopy(record)
    node, keys = made, path.split(".")
    for key in keys[:-1]:
        node = node.setdefault(key, {})
    node[keys[-1]] = value
    return made


def test_a_record_is_what_it_was() -> None:
    assert current(GOOD) == GOOD


def test_an_older_record_is_migrated() -> None:
    first = with_value("schema_version", 1)
    del first["digests"]
    assert current(first) == GOOD | {"schema_version": SCHEMA_VERSION, "digests": None}
    assert first["schema_version"] == 1


@pytest.mark.parametrize("version", [0, 9, SCHEMA_VERSION + 1, "one", "1", True, 1.0, [1], None])
def test_other_versions_are_refused(version: Any) -> None:
    with pytest.raises(BadInput, match="schema_version"):
        current(with_value("schema_version", version))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("metrics", [], "metrics is a list, not an object"),
        ("metrics.ttft_ms", [1], "metrics.ttft_ms is a list, not an object"),
        ("metrics.ttft_ms.p50", "fast", "metrics.ttft_ms.p50 is text, not a number"),
        ("metrics.ttft_ms.p50", True, "metrics.ttft_ms.p50 is true or false, not a number"),
        ("metrics.ttft_ms.n", 1.5, "metrics.ttft_ms.n is a number, not a whole number"),
        ("metrics.duration_s", float("nan"), "metrics.duration_s is no finite number"),
        ("memory.weights", 10**400, "memory.weights is no finite number, or too large"),
        ("status", "fine", "status is 'fine', none of ok, oom"),
        ("run_id", None, "run_id is missing"),
        ("validity.reasons", "because", "validity.reasons is text, not a list"),
        ("validity.notes", ["a", 3], r"validity.notes\[1\] is a number, not text"),
        ("config", None, "config is null, not an object"),
        ("config.arrival", "poisson", "config.arrival is text, not an object"),
        ("provenance.packages", ["torch"], "provenance.packages is a list, not an object"),
        ("provenance.device.name", [], "provenance.device.name is a list, not text"),
        ("provenance.started_at", 12, "provenance.started_at is a number, not text"),
        ("ablation", {"design": "pairs"}, "ablation.metric is missing"),
        ("liveness.quant", 3, "liveness.quant is a number, not an object"),
        ("digests", {"steps.parquet": 1}, "digests.steps.parquet is a number, not text"),
    ],
)
def test_a_wrong_type_is_named(path: str, value: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        current(with_value(path, value))


def test_deep_values_are_refused() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    with pytest.raises(BadInput, match=r"config\.batching is nested more than 32 deep"):
        current(with_value("config.batching", deep))


def test_a_number_that_cannot_be_makes_a_record_invalid() -> None:
    record = with_value("metrics.itl_ms.p50", -3.0)
    read = current(record)
    assert read["status"] == "invalid" and read["validity"]["ok"] is False
    assert read["validity"]["reasons"] == ["metrics.itl_ms.p50 is -3: no measurement gives that"]
    for path, value in (("energy.joules_above_idle", -2.0), ("memory.kv_waste", -1e-9)):
        assert not impossible(with_value(path, value))
    for value in (float("nan"), float("inf"), -float("inf")):
        (reason,) = impossible(with_value("roofline.mbu", value))
        assert reason.startswith("roofline.mbu is ")


@pytest.mark.fuzz("records")
@given(changed(GOOD))
def test_any_damage_is_refused_in_one_line_or_harmless(record: Any) -> None:
    try:
        read = current(record)
    except BadInput as error:
        assert str(error) and "\n" not in str(error)
        return
    row = flatten(read)
    assert row["status"] in ("ok", "invalid", "oom", "error", "timeout", "crashed")
