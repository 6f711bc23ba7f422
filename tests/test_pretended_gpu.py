"""Tests of tests/gpu on a pretended GPU: every tensor is where it has to be, and nothing waits that
need not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = [
    *("test_device.py", "test_graphs.py::test_attention_without_graphs_says_so[qwen3]"),
    "test_graphs.py::test_a_decoding_step_waits_for_nothing[qwen3-false-false]",
    "test_graphs.py::test_a_decoding_step_waits_for_nothing[qwen3-true-true]",
    "test_graphs.py::test_drafts_of_one_request_at_a_time_are_replayed[qwen3]",
]
ENGINES = [
    "test_cuda.py::test_logits_equal_those_of_the_cpu[qwen3-sdpa-paged]",
    "test_cuda.py::test_every_family_is_that_of_the_cpu[gemma3_text]",
    "test_cuda.py::test_every_family_is_that_of_the_cpu[qwen3_moe]",
    "test_cuda.py::test_greedy_and_sampled_tokens_equal_those_of_the_cpu[qwen3-continuous]",
    "test_cuda.py::test_every_precision_stays_near_float32[qwen3-int8]",
    "test_cuda.py::test_a_graph_holds_grouped_experts",
    "test_cuda.py::test_a_smaller_cache_is_that_of_the_cpu[qwen3-eviction=streaming]",
    "test_cuda.py::test_blocks_come_back_from_host_and_disk_as_they_left[qwen3]",
    "test_faces.py::test_pictures_are_those_of_the_cpu",
    "test_faces.py::test_a_gguf_file_gives_the_logits_of_the_cpu[Q6_K]",
    "test_faces.py::test_a_conversation_is_remembered",
]


@pytest.mark.slow
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a real one")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(STEPS, id="steps"),
        pytest.param(ENGINES, id="engines", marks=pytest.mark.real),  # pytest, for longer
    ],
)
def test_on_a_pretended_gpu(names: list[str]) -> None:
    plugins = ("-p", "tests.pretended_gpu", "-p", "no:cacheprovider")
    chosen = [f"tests/gpu/{name}" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-rs", *chosen],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
