"""Who may import whom, what must not cost torch, and how large the engine may grow."""

from __future__ import annotations

import ast
import graphlib
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

# Every room imports only rooms named above it; what lies in no folder of the list belongs to the
# file's own entry.
ROOMS = (
    *("masking", "redaction", "errors", "platform"),
    # the inference engine
    *("kernels", "cache", "attention", "quant", "models", "engine", "extras", "passes"),
    # the measuring half
    *("config", "assembly"),
    *(
        f"bench.{room}"
        for room in ("workloads", "hardware", "records", "metrics", "targets", "microbench")
    ),
    *("bench", "analysis", "report", "tracking", "experiments"),
    # the faces
    *("outputs", "prompts", "llm", "tasks", "evaluation", "cli", "__main__"),
)
INFERENCE = ROOMS[: ROOMS.index("config")]
# What the inference engine does not know, and what costs seconds: libraries that a room must not
# import, not even in a function.
OUTSIDE = (
    "hydra",
    "omegaconf",
    "fastapi",
    "uvicorn",
    "starlette",
    "httpx",
    "requests",
    "aiohttp",
    "pandas",
)
HEAVY = ("torch", "transformers", "bitsandbytes", "triton")
FORBIDDEN = {
    **dict.fromkeys(INFERENCE, OUTSIDE),
    **dict.fromkeys(("analysis", "report"), (*HEAVY, "hydra")),
    **dict.fromkeys(("config", "tracking", "experiments", "cli"), HEAVY),
    **dict.fromkeys(
        ("engine.scheduler", "engine.batching", "engine.request", "cache.pool", "cache.manager"),
        HEAVY,
    ),
    **dict.fromkeys(
        ("bench.supervisor", "bench.driver", "bench.quality", "bench.quality_reference"), HEAVY
    ),
    **dict.fromkeys(("bench.targets.supported_knobs", "bench.targets.installed"), HEAVY),
    **dict.fromkeys(("bench.targets.vllm", "bench.targets.openai"), HEAVY),
}
# Imported in one fresh process that must not end up with torch.
TORCH_FREE = (
    "minivllm",
    "minivllm.cli",
    "minivllm.config.compose",
    "minivllm.platform.threads",
    "minivllm.engine.scheduler",
    "minivllm.engine.options",
    "minivllm.cache.pool",
    "minivllm.cache.manager",
    "minivllm.models.load.source",
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
    "minivllm.bench.quality_evaluator",
    "minivllm.bench.metrics.metrics",
    "minivllm.bench.workloads.synthetic",
    "minivllm.bench.workloads.trace",
    "minivllm.bench.workloads.shared_prefix",
    "minivllm.bench.workloads.multi_turn",
    "minivllm.bench.workloads.file",
    "minivllm.analysis.capacity",
    "minivllm.bench.targets.simulated",
    "minivllm.bench.workloads.arrivals",
    "minivllm.bench.records.reading",
    "minivllm.report",
    "minivllm.report.studies.kernels",
    "minivllm.bench.targets.supported_knobs",
    "minivllm.bench.targets.vllm",
    "minivllm.bench.targets.openai",
    "minivllm.analysis.ablation",
    "minivllm.experiments.sweep",
    "minivllm.experiments.preview",
    "minivllm.experiments.search",
    "minivllm.experiments.studies",
    "minivllm.tracking.mlflow",
    "hydra_plugins.minivllm_sweeper.plan_sweeper",
)
# Lines of code. What every request goes through is to be read in one sitting; what only a knob
# brings in lies in extras/, a policy, a pass, a further backend or family. Kernels (folders
# "kernels") are not counted, what chooses and calls them is.
MOST_CORE_LINES = 2925
CORE = (
    "engine/*.py",
    "cache/*.py",
    "attention/base.py",
    "attention/batch.py",
    "attention/eager.py",
)
CORE += ("quant/base.py", "quant/plain.py", "models/layers.py", "models/families/llama.py")
MOST_FILE_LINES = 450


def module_name(path: Path) -> str:
    """The dotted name of a file, below the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, wherever in the file, and for
    annotations too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def own_imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and module of what a module imports of the package."""
    for line, imported in imports(MODULES[name]):
        below = imported.removeprefix("minivllm.")
        if below != imported:
            yield line, below if below in MODULES else below.rpartition(".")[0]


def room(name: str) -> str:
    """The entry of ROOMS that a module belongs to."""
    return max(
        (room for room in ROOMS if name == room or name.startswith(f"{room}.")), key=len, default=""
    )


@pytest.mark.parametrize("name", [name for name in MODULES if room(name)])
def test_a_room_imports_only_rooms_above_it(name: str) -> None:
    wrong = [
        f"{name}:{line} imports {imported}"
        for line, imported in own_imports(name)
        if room(imported) and ROOMS.index(room(imported)) > ROOMS.index(room(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_room() -> None:
    assert [name for name in MODULES if not room(name)] == ["__init__"]


def test_no_two_modules_import_each_other() -> None:
    graph = {name: {imported for _, imported in own_imports(name)} - {name, ""} for name in MODULES}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("place", FORBIDDEN)
def test_a_room_does_without_what_it_must_not_load(place: str) -> None:
    wrong = [
        f"{name}:{line} imports {imported}"
        for name, path in MODULES.items()
        if name == place or name.startswith(f"{place}.")
        for line, imported in imports(path)
        if any(
            imported == banned or imported.startswith(f"{banned}.") for banned in FORBIDDEN[place]
        )
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("options.py")), ids=module_name)
def test_options_import_only_errors_and_platform(path: Path) -> None:
    allowed = (*sys.stdlib_module_names, "minivllm.errors", "minivllm.platform")
    wrong = [
        name
        for _, name in imports(path)
        if not any(f"{name}.".startswith(f"{top}.") for top in allowed)
    ]
    assert not wrong, f"{path} imports {', '.join(wrong)}"


def test_the_scan_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "import torch.nn\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from minivllm.bench import driver\n"
    )
    assert {name for _, name in imports(file)} == {
        "torch.nn",
        "typing.TYPE_CHECKING",
        "pandas",
        "minivllm.bench.driver",
    }


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
    """Lines that hold code: no blank ones, no comments, no docstrings. Explanations are not what
    makes it large."""
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
        '"""What it\n'
        'is."""\n'
        "\n"
        "# why\n"
        "x = (\n"
        "    1,\n"
        ")\n"
        "\n"
        "\n"
        "def f():\n"
        '    """One."""\n'
        "    return x  # so\n"
    )
    assert code_lines(file) == 5


def test_the_core_stays_readable() -> None:
    files = {
        path for pattern in CORE for path in PACKAGE.glob(pattern) if path.name != "options.py"
    }
    lines = {path: code_lines(path) for path in files}
    assert sum(lines.values()) <= MOST_CORE_LINES, (
        "the core of the inference engine is no longer small"
    )


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
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'transformers', 'triton', "
        "'bitsandbytes', 'pandas') if name in sys.modules])"
    )
    output, errors = said(script)
    assert output == "[]\n", output + errors
