"""Tests of minivllm/a/b.py are tests/a/test_b.py, and those of scripts/b.py are
tests/scripts/test_b.py."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
# Files of tests that no one file of code has, and why.
ACROSS = {
    "analysis/test_false_positives.py": "a thousand ablations, from the plan to verdicts",
    "attention/test_backends.py": "one property of every backend",
    "bench/test_lies.py": "engines that lie, from their session to the report",
    "engine/test_differential.py": "a random search over all knobs",
    "engine/test_combinations.py": "policies, caches and ways of decoding in pairs",
    "engine/test_non_finite.py": "NaN from any layer through any sampler",
    "evaluation/test_tasks.py": "whole tasks through lm-eval",
    "experiments/test_ablation_sweep.py": "ablations from the command line to verdicts",
    "experiments/test_resume.py": "kills of a whole sweep",
    "extras/test_draft_graphs.py": "drafts made and verified in graphs, by any way of drafting",
    "extras/speculative/test_lossless.py": "one property of every way of drafting",
    "extras/speculative/test_masked_drafts.py": "masks, by any way of drafting",
    "kernels/cpu/test_processors.py": "C++ sources, which are no Python",
    "kernels/test_compiling.py": "every Triton kernel of the package",
    "models/test_parity.py": "every family, layer by layer",
    "models/test_smollm2.py": "a model that somebody else trained, beside other engines",
    "models/vision/test_qwen_parity.py": "two families, through the whole engine",
    "passes/test_plug_in.py": "a third party's pass",
    "quant/test_methods.py": "one property of every method",
    "quant/test_plug_in.py": "a third party's method",
    "serving/test_clients.py": "clients that nobody here wrote, against the whole server",
    "serving/test_generic_tools.py": "tools of a template that takes none, by every API",
    "serving/test_malformed.py": "bodies and frames of every API",
    "scripts/test_gpu_rehearsal.py": "every command of scripts/gpu_suite.sh",
    "test_compiled_ahead.py": "the bytecode that all test processes need",
    "test_docs.py": "the documentation",
    "test_forked.py": "what tests have in the place of subprocess",
    "test_layers.py": "who may import whom",
    "test_mirror.py": "the tests themselves",
    "test_plug_ins.py": "a third party's class of every kind",
    "test_pretended_gpu.py": "the tests of tests/gpu, without a GPU",
    "test_public_reports.py": "a table of the documentation",
    "test_size.py": "what git tracks",
    "test_terminal.py": "the command line on a real terminal",
}


def code_of(test: Path) -> list[Path]:
    """The files that a file of tests may be of."""
    package = TESTS.parent if test.parts[0] == "scripts" else TESTS.parent / "minivllm"
    stem = test.stem.removeprefix("test_")
    return [package / test.parent / f"{stem}{suffix}" for suffix in (".py", ".sh")]


def test_files_of_tests_mirror_files_of_code() -> None:
    """tests/gpu is what takes a GPU, of any file."""
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    files = [path for path in files if path.parts[0] != "gpu"]
    across = {str(path) for path in files if not any(code.is_file() for code in code_of(path))}
    assert across - ACROSS.keys() == set(), "name it as the file that it tests, or say why not"
    assert ACROSS.keys() - across == set(), "is gone, or mirrors a file of code now"
