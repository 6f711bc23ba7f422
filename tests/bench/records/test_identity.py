"""What makes two measurements the same one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records import identity
from minivllm.bench.records.measurement import Measurement
from minivllm.config.compose import compose

CONFIG: dict[str, Any] = {
    "model": {
        "_target_": "m",
        "path": "a/b",
        "weights": "auto",
        "max_model_len": None,
        "seed": 0,
        "architecture": {"x": 1},
    },
    "quant": {"_target_": "q", "dtype": "bfloat16"},
    "attention": {"_target_": "a"},
    "batching": {"_target_": "b", "max_num_seqs": 64},
    "cache": {"_target_": "c", "block_size": 16},
    "decoding": {"_target_": "d", "temperature": 0.0},
    "workload": {"_target_": "w", "num_requests": 4},
    "arrival": {"_target_": "p", "rate": 2.0},
    "engine": {"_target_": "e"},
    "runtime": {"device": "cpu", "threads": None},
    "measure": {
        "seed": 0,
        "repeats": 2,
        "timeout_s": 5,
        "slo": {"ttft_ms": None},
        "price": {"kwh": None},
    },
    "choices": {
        "model": "qwen3",
        "quant": "nf4",
        "batching": "continuous",
        "cache": "paged",
        "arrival": "poisson",
    },
    "name": None,
    "runs_dir": "runs",
}


def changed(path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    node, *rest = path.split(".")
    if rest:
        config[node][rest[0]] = value
    else:
        config[node] = value
    return config


TRACE = "minivllm.bench.workloads.from_file.trace.Trace"


def test_a_null_that_means_what_older_records_say_is_no_other_cell() -> None:
    ids = [
        identity.cell_id(changed("workload", {"_target_": TRACE, "block_tokens": tokens}), "f")
        for tokens in (512, None, 256)
    ]
    assert ids[0] == ids[1] != ids[2]


def test_an_unasked_knob_counts_only_away_from_its_default() -> None:
    ids = [
        identity.cell_id(changed("runtime", {"device": "cpu", **more}), "f")
        for more in ({}, {"cores": None}, {"cores": 1})
    ]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.path", "elsewhere"),
        ("model.package", "weights==1"),
        ("model.weights", "/a/folder"),
        ("model.architecture", None),
        ("measure.repeats", 9),
        ("measure.timeout_s", 9),
        ("measure.slo", {"ttft_ms": 100}),
        ("measure.price", {"kwh": 0.3}),
        ("measure.quality", True),
        ("quality", {"window": 512}),
        ("measure.telemetry_interval_s", 1.0),
        ("name", "mine"),
        ("runs_dir", "elsewhere"),
        ("arrival.rate", 2),
        ("decoding.temperature", 0),
        ("runtime.profile", False),
        ("runtime.profile", True),
    ],
)
def test_what_does_not_change_a_cell(path: str, value: Any) -> None:
    assert identity.cell_id(changed(path, value), "f") == identity.cell_id(CONFIG, "f")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.max_model_len", 100),
        ("quant.dtype", "float16"),
        ("attention._target_", "other"),
        ("batching.max_num_seqs", 8),
        ("cache.block_size", 32),
        ("decoding.temperature", 0.5),
        ("workload.num_requests", 5),
        ("arrival.rate", 2.5),
        ("engine._target_", "other"),
        ("runtime.threads", 1),
        ("measure.seed", 1),
        ("measure.warmup_requests", 0),
    ],
)
def test_what_changes_a_cell(path: str, value: Any) -> None:
    assert identity.cell_id(changed(path, value), "f") != identity.cell_id(CONFIG, "f")


def test_a_knob_that_asks_for_nothing_leaves_older_records_comparable() -> None:
    assert identity.cell_id(changed("runtime.cores", None), "f") == identity.cell_id(CONFIG, "f")
    assert identity.cell_id(changed("runtime.cores", "0"), "f") != identity.cell_id(CONFIG, "f")


@pytest.mark.parametrize(
    ("overrides", "known"),
    [
        ([], "a62e85aed3fd"),
        (["model=qwen3", "quant=nf4", "batching=continuous"], "598e9dfb3d3d"),
        (["cache=none"], "c540f97d8ba3"),
        (["quant=int8", "attention=sdpa"], "3087e7b9d741"),
        (["decoding=beam"], "92fa615c2f8c"),
        (["decoding=top_p", "decoding.seed=3"], "375d315bfb21"),
        (["workload=chat", "arrival=poisson", "arrival.rate=4"], "c3188c9c578a"),
        (["engine=transformers"], "30ddf0ef11c9"),
        (["engine=openai"], "e402e7be5325"),
        (["engine=simulated", "model=qwen3_8b"], "b7f6311836f6"),
    ],
)
def test_new_knobs_change_no_identity(overrides: list[str], known: str) -> None:
    """Records that exist stay comparable: a knob that is added counts only where it asks for
    something (`unasked`)."""
    assert identity.cell_id(compose(overrides), "f") == known


def test_the_fingerprint_changes_a_cell() -> None:
    assert identity.cell_id(CONFIG, "f") != identity.cell_id(CONFIG, "g")


def test_a_workload_file_counts_by_content(tmp_path: Path) -> None:
    ids = []
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
        ids.append(identity.cell_id(changed("workload.path", str(tmp_path / name)), "f"))
    assert ids[0] == ids[1] != ids[2]


def test_a_folder_of_sessions_counts_by_content(tmp_path: Path) -> None:
    ids = []
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.json").write_text(text)
        ids.append(identity.cell_id(changed("workload.path", str(tmp_path / name)), "f"))
    assert ids[0] == ids[1] != ids[2]


def test_a_file_in_the_home_folder_counts_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ids = []
    for text in ("one", "two"):
        (tmp_path / "prompts.jsonl").write_text(text)
        ids.append(identity.cell_id(changed("workload.path", "~/prompts.jsonl"), "f"))
    assert ids[0] != ids[1]


def test_runs_differ_by_arm_block_code_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    base = identity.run_id("cell", "cpu", "arm", 0)
    assert len(base) == 12 and int(base, 16) >= 0
    assert base == identity.run_id("cell", "cpu", "arm", 0)
    others = [
        identity.run_id("cell2", "cpu", "arm", 0),
        identity.run_id("cell", "cpu", "arm2", 0),
        identity.run_id("cell", "cpu", "arm", 1),
    ]
    monkeypatch.setattr(identity, "code_hash", lambda: "new code")
    others.append(identity.run_id("cell", "cpu", "arm", 0))
    monkeypatch.undo()
    monkeypatch.setattr(identity, "environment_hash", lambda *place: "new driver")
    others.append(identity.run_id("cell", "cpu", "arm", 0))
    assert len({base, *others}) == 6


def test_a_record_without_quality_does_not_stand_for_one_with_it(tmp_path: Path) -> None:
    def run(text: str | None = None, window: int = 512, **parts: Any) -> str:
        config = {**CONFIG, "quality": {"window": window, "text": text}, **parts}
        first, _ = identity.expand(config, "sweep", "arm", "runs", "f")
        assert first.cell_id == identity.cell_id(CONFIG, "f")  # speed is compared with speed
        return first.run_id

    (tmp_path / "text").write_text("one")
    text = str(tmp_path / "text")
    on = {"measure": {**CONFIG["measure"], "quality": True}}
    alone = {"task": {"_target_": identity.QUALITY_TASK}}
    assert run() == run(window=64) == identity.expand(CONFIG, "sweep", "arm", "runs", "f")[0].run_id
    runs = [run(), run(**on), run(window=64, **on), run(**alone), run(text, **on)]
    (tmp_path / "text").write_text("two")
    assert len({*runs, run(text, **on)}) == 6


def test_a_record_without_a_trace_does_not_stand_for_one_with_it() -> None:
    runs = [
        identity.expand(changed("runtime.profile", profile), "sweep", "arm", "runs", "f")[0].run_id
        for profile in (True, False)
    ]
    assert runs[1] == identity.expand(CONFIG, "sweep", "arm", "runs", "f")[0].run_id != runs[0]


def test_expand_gives_a_measurement_a_block() -> None:
    first, second = identity.expand(CONFIG, "sweep", "arm", "runs", "f")
    assert (first.block, second.block) == (0, 1)
    assert first.cell_id == second.cell_id and first.run_id != second.run_id
    assert first.path == Path("runs/sweep") / f"qwen3-nf4-continuous-poisson-{first.run_id}"
    assert first.cell == "qwen3-nf4-continuous-poisson"
    assert Measurement.from_dict(first.to_dict()) == first


def test_cell_names_are_safe_in_a_file_system() -> None:
    assert (
        identity.cell_name({"choices": {"model": "../ev il", "quant": "nf4", "batching": None}})
        == "ev-il-nf4"
    )
    assert identity.cell_name({}) == "cell"
    assert len(identity.cell_name({"choices": {"model": "m" * 500}})) <= 80


def test_engine_id_ignores_the_load() -> None:
    assert identity.engine_id(changed("arrival.rate", 9)) == identity.engine_id(CONFIG)
    assert identity.engine_id(changed("cache.block_size", 9)) != identity.engine_id(CONFIG)


@pytest.mark.parametrize("place", ["pruning", "speculative"])
def test_engine_id_has_the_load_that_decides_what_is_pruned(place: str) -> None:
    pruning = {"calibration": "workload"}
    calibrated = {**CONFIG, place: pruning if place == "pruning" else {"pruning": pruning}}
    other = {**calibrated, "workload": {**CONFIG["workload"], "num_requests": 99}}
    again = {**calibrated, "arrival": {}}
    ids = [identity.engine_id(one) for one in (calibrated, other, again)]
    assert ids[0] == ids[2] != ids[1]


def test_a_peer_is_not_named_after_our_batching() -> None:
    choices = {
        "model": "qwen3",
        "quant": "bf16",
        "batching": "continuous",
        "engine": "transformers",
    }
    assert identity.cell_name({"choices": choices}) == "qwen3-bf16-transformers"


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_a_knob_that_was_removed_changes_no_id(method: str) -> None:
    config = compose([f"pruning={method}"])
    ids = [
        identity.cell_id({**config, "pruning": {**config["pruning"], **former}}, "f")
        for former in ({}, {"pattern": "unstructured"}, {"pattern": "2:4"})
    ]
    assert ids[0] == ids[1] != ids[2]
