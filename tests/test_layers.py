"""Who may import whom, what must not cost torch, and how large the engine may grow."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.scripts.load import load_script

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minivllm"
structure = load_script("structure")

# Every room imports only rooms named above it; what lies in no folder of the list belongs to the
# file's own entry.
ROOMS = (
    *("masking", "redaction", "errors", "platform"),
    # the inference engine
    *("parallel", "kernels", "cache", "attention", "quant", "models", "engine", "extras", "passes"),
    # the measuring half
    *("config", "passes.pruning.calibration", "fit", "assembly", "processes"),
    *(f"bench.{room}" for room in ("workloads", "hardware", "records", "metrics")),
    *("engines", "bench.microbench"),
    *("bench", "analysis", "report", "tracking", "experiments"),
    # the faces
    *(
        "outputs",
        "prompts",
        "streams",
        "llm",
        "serving",
        "interactive",
        "tasks",
        "evaluation",
        "cli",
        "__main__",
    ),
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
    **dict.fromkeys(("config", "processes", "tracking", "experiments", "cli"), HEAVY),
    **dict.fromkeys(
        ("engine.scheduler", "engine.batching", "engine.request", "cache.pool", "cache.manager"),
        HEAVY,
    ),
    **dict.fromkeys(
        (
            "bench.supervisor",
            "bench.worker_process",
            "bench.driver",
            "bench.quality",
            "bench.quality_reference",
        ),
        HEAVY,
    ),
    **dict.fromkeys(("engines.supported_knobs", "engines.installed"), HEAVY),
    **dict.fromkeys(("engines.vllm.engine", "engines.openai.engine"), HEAVY),
    **dict.fromkeys(("interactive.chat", "interactive.remote", "tasks.chat"), HEAVY),
    **dict.fromkeys(("serving.server", "serving.app", "serving.http", "serving.openai"), HEAVY),
}
# Imported in one fresh process that must not end up with torch.
TORCH_FREE = (
    "minivllm",
    "minivllm.cli",
    "minivllm.config.compose",
    "minivllm.processes.router",
    "minivllm.platform.threads",
    "minivllm.engine.scheduler",
    "minivllm.extras.scheduling.scheduler",
    "minivllm.extras.speculative.proposers.ngram",
    "minivllm.extras.speculative.proposers.suffix",
    "minivllm.engine.options",
    "minivllm.cache.pool",
    "minivllm.cache.manager",
    "minivllm.models.load.source",
    "minivllm.models.config",
    "minivllm.models.registry",
    "minivllm.tasks.bench",
    "minivllm.tasks.capacity",
    "minivllm.tasks.chat",
    "minivllm.interactive.remote",
    "minivllm.tasks.compare",
    "minivllm.tasks.convert",
    "minivllm.tasks.kernels",
    "minivllm.tasks.quality",
    "minivllm.tasks.report",
    "minivllm.serving.server",
    "minivllm.bench.supervisor",
    "minivllm.bench.driver",
    "minivllm.bench.quality_evaluator",
    "minivllm.bench.metrics.metrics",
    "minivllm.bench.workloads.synthetic",
    "minivllm.bench.workloads.from_file.trace",
    "minivllm.bench.workloads.shared_prefix",
    "minivllm.bench.workloads.multi_turn",
    "minivllm.bench.workloads.from_file.file",
    "minivllm.analysis.capacity",
    "minivllm.engines.simulated.engine",
    "minivllm.bench.workloads.arrivals",
    "minivllm.bench.records.reading",
    "minivllm.report.page",
    "minivllm.report.studies.standalone.kernels",
    "minivllm.report.studies.standalone.page",
    "minivllm.engines.supported_knobs",
    "minivllm.engines.vllm.engine",
    "minivllm.engines.openai.engine",
    "minivllm.analysis.ablation.effects",
    "minivllm.experiments.sweep",
    "minivllm.experiments.preview",
    "minivllm.experiments.search",
    "minivllm.experiments.studies",
    "minivllm.tracking.mlflow",
    "hydra_plugins.minivllm_sweeper.plan_sweeper",
)
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60  # but for a Triton kernel, which is one function whatever it does


MODULES = structure.modules(PACKAGE)


@cache
def room(name: str) -> str:
    """The entry of ROOMS that a module belongs to."""
    return max(
        (room for room in ROOMS if name == room or name.startswith(f"{room}.")), key=len, default=""
    )


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = [
        f"{name}:{line} imports {imported}"
        for name in MODULES
        if room(name)
        for line, imported in structure.own_imports(MODULES, name)
        if room(imported) and ROOMS.index(room(imported)) > ROOMS.index(room(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_room() -> None:
    assert [name for name in MODULES if not room(name)] == ["__init__"]


def test_no_modules_import_each_other() -> None:
    assert structure.cycles(PACKAGE) == []


@pytest.mark.parametrize("place", FORBIDDEN)
def test_a_room_does_without_what_it_must_not_load(place: str) -> None:
    wrong = [
        f"{name}:{line} imports {imported}"
        for name, path in MODULES.items()
        if name == place or name.startswith(f"{place}.")
        for line, imported in structure.imports(path)
        if any(
            imported == banned or imported.startswith(f"{banned}.") for banned in FORBIDDEN[place]
        )
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("options.py")), ids=lambda path: path.parent.name
)
def test_options_import_only_errors_and_platform(path: Path) -> None:
    allowed = (*sys.stdlib_module_names, "minivllm.errors", "minivllm.platform")
    wrong = [
        name
        for _, name in structure.imports(path)
        if not any(f"{name}.".startswith(f"{top}.") for top in allowed)
    ]
    assert not wrong, f"{path} imports {', '.join(wrong)}"


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


def test_files_stay_short() -> None:
    lines = {str(path): len(path.read_text().splitlines()) for path in MODULES.values()}
    assert {name: count for name, count in lines.items() if count > MOST_FILE_LINES} == {}


def test_functions_stay_short() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_FUNCTION_LINES
        and not any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
    ]
    assert long == []


def test_a_name_means_one_class() -> None:
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    classes = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    twice = [name for name, times in Counter(classes).items() if times > 1 and name[0] != "_"]
    assert twice == []
