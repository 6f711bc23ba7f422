"""Who may import whom, what must not cost torch, and how large the engine may grow."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minivllm"

INFERENCE = ("engine", "cache", "attention", "models", "quant")
OUTSIDE = (
    *("hydra", "omegaconf", "fastapi", "uvicorn", "starlette", "httpx", "requests", "aiohttp", "pandas"),
    *(
        f"minivllm.{name}"
        for name in ("bench", "peers", "ablation", "report", "serve", "tasks", "evaluation")
    ),
    *(f"minivllm.{name}" for name in ("cli", "config", "options", "explain", "assembly", "llm")),
)
HEAVY = ("torch", "transformers", "bitsandbytes", "triton")
# folder (or file) -> what it must not import, not even inside a function
FORBIDDEN = {
    **dict.fromkeys(INFERENCE, OUTSIDE),
    "report": (
        *HEAVY,
        "hydra",
        *(f"minivllm.{name}" for name in (*INFERENCE, "tasks", "cli", "config")),
        *(
            f"minivllm.ablation.{name}"
            for name in ("arms", "plan", "preview", "repeats", "schedule", "search", "studies", "sweep")
        ),
    ),
    "ablation": HEAVY,
    "tracking": (*HEAVY, *(f"minivllm.{name}" for name in INFERENCE)),
    **dict.fromkeys(
        tuple(
            f"ablation/{name}.py"
            for name in ("analysis", "comparison", "design", "findings", "metric", "remarks", "statistics")
        ),
        (*HEAVY, "hydra", *(f"minivllm.{name}" for name in (*INFERENCE, "tasks", "cli", "config"))),
    ),
    "cli.py": HEAVY,
    "config.py": HEAVY,
    "options": (*HEAVY, "hydra"),
    "explain.py": HEAVY,
    "engine/scheduler.py": HEAVY,
    "engine/batching.py": HEAVY,
    "engine/request.py": HEAVY,
    "cache/pool.py": HEAVY,
    "bench/supervisor.py": HEAVY,
    "bench/quality.py": HEAVY,
    "bench/reference.py": HEAVY,
    "peers/honoured.py": HEAVY,
    "peers/tables.py": HEAVY,
    "peers/presence.py": HEAVY,
    "peers/vllm.py": HEAVY,
    "peers/openai.py": HEAVY,
    "bench/driver.py": (
        *HEAVY,
        *(f"minivllm.{name}" for name in ("engine.engine", "models", "cache", "attention")),
    ),
}
# Imported in one fresh process that must not end up with torch.
TORCH_FREE = (
    "minivllm",
    "minivllm.cli",
    "minivllm.config",
    "minivllm.threads",
    "minivllm.engine.scheduler",
    "minivllm.engine.params",
    "minivllm.cache.pool",
    "minivllm.cache.manager",
    "minivllm.models.source",
    "minivllm.models.config",
    "minivllm.tasks.bench",
    "minivllm.tasks.capacity",
    "minivllm.tasks.compare",
    "minivllm.tasks.convert",
    "minivllm.tasks.kernels",
    "minivllm.tasks.quality",
    "minivllm.tasks.report",
    "minivllm.bench.supervisor",
    "minivllm.bench.driver",
    "minivllm.bench.judge",
    "minivllm.bench.metrics",
    "minivllm.bench.workloads",
    "minivllm.bench.traces",
    "minivllm.bench.shared_prefix",
    "minivllm.bench.multi_turn",
    "minivllm.bench.files",
    "minivllm.bench.capacity",
    "minivllm.bench.simulated",
    "minivllm.bench.arrivals",
    "minivllm.bench.records",
    "minivllm.report",
    "minivllm.report.kernels",
    "minivllm.peers.honoured",
    "minivllm.peers.tables",
    "minivllm.peers.vllm",
    "minivllm.peers.openai",
    "minivllm.ablation.analysis",
    "minivllm.ablation.sweep",
    "minivllm.ablation.preview",
    "minivllm.ablation.search",
    "minivllm.ablation.studies",
    "minivllm.tracking.mlflow",
    "hydra_plugins.minivllm_sweeper.plan_sweeper",
)
# Lines of code. What every request goes through is to be read in one sitting; what only a knob
# brings in, a further backend, a format of checkpoints, a policy is a file of its own. Kernels (folders "kernels") are not
# counted, what chooses and calls them is.
MOST_CORE_LINES = 3100
CORE = (
    "engine",
    "cache",
    "attention/base.py",
    "attention/eager.py",
    "quant/base.py",
    "quant/plain.py",
    "models/layers.py",
    "models/llama.py",
)
# Of the core: only a knob brings them in.
ASIDE = {
    *(PACKAGE / "cache" / name for name in ("disk.py", "eviction.py", "offload.py")),
    *(
        PACKAGE / "engine" / name
        for name in ("bad_words.py", "beam.py", "capture.py", "chat_template.py", "compiled.py", "graphs.py")
    ),
}
MOST_FILE_LINES = 420


def sources(place: str) -> list[Path]:
    path = PACKAGE / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports at run time, wherever in the file."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(inner for child in node.body for inner in ast.walk(child))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            module = node.module or ""
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("place", [place for place in FORBIDDEN if (PACKAGE / place).exists()])
def test_imports_stay_within_their_layer(place: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(place)
        for line, name in imports(path)
        if any(name == banned or name.startswith(f"{banned}.") for banned in FORBIDDEN[place])
    ]
    assert not wrong, "\n".join(wrong)


def test_the_scan_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "import torch.nn\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from minivllm.bench import driver\n"
    )
    assert [name for _, name in imports(file)] == [
        "torch.nn",
        "typing.TYPE_CHECKING",
        "minivllm.bench.driver",
    ]


def said(script: str) -> tuple[str, str]:
    """Output and errors of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return done.stdout, done.stderr


def test_what_plans_and_reports_never_loads_torch() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} loads torch'\n"
        "print('clean')"
    )
    output, errors = said(script)
    assert output == "clean\n", errors


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings. Explanations are not what makes it large."""
    text = path.read_text()
    ignored = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in ignored
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_code_is_counted_without_its_explanations(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        '"""What it\nis."""\n\n# why\nx = (\n    1,\n)\n\n\ndef f():\n    """One."""\n    return x  # so\n'
    )
    assert code_lines(file) == 5


def test_the_core_stays_readable() -> None:
    lines = {
        path: code_lines(path)
        for place in CORE
        for path in sources(place)
        if "kernels" not in path.parts and path not in ASIDE
    }
    assert sum(lines.values()) <= MOST_CORE_LINES, "the core of the inference engine is no longer small"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_FILE_LINES


def test_an_engine_decodes_without_torch_s_compiler_and_what_it_does_not_need() -> None:
    script = (
        "import sys\n"
        "from minivllm import LLM, SamplingParams\n"
        "with LLM('tiny', overrides=['cache.num_blocks=16']) as llm:\n"
        "    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'transformers', 'triton', 'bitsandbytes', 'pandas')"
        " if name in sys.modules])"
    )
    output, errors = said(script)
    assert output == "[]\n", output + errors
