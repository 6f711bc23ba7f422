"""How large and how entangled a checkout of this project is, counted by running it.

    python scripts/structure.py                      # this checkout
    git worktree add build/before COMMIT
    python scripts/structure.py --before build/before --output reports/examples/cpu/structure.json

1. The ways: files of the package whose code runs, and their lines of code, on a CPU with the
   embedded model: in a decoding step; from a prompt to its text; to build `LLM("tiny")`; from a
   request over HTTP to its stream, in the server's and the engine's process together. A file runs
   if one of its functions, or the file as a module, is called meanwhile; all its lines count.
   Files of a way in one process are in the order in which they run first.
2. The routes of `cache.block_size` and `quant=nf4`: files of the package in which a function has
   the value, as an argument, a local or what it returns, or an object or dictionary that has it,
   while an engine is built and answers a prompt. The route of an ITL, the median of a simulated
   cell, to the main table of a report's page: files in which a function has that number, see
   `record_calls`.
3. Files and lines of code of the package, without comments and docstrings; the longest file, and
   the folder with the most files.
4. Import cycles between modules, imports for annotations included.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KNOBS = ("runtime.device=cpu", "runtime.threads=1", "cache.num_blocks=64")
BLOCK_SIZE = 88  # of the traced cache; no other number of the engine, no length of its files
# A cell whose median ITL no other figure equals.
CELL = (
    *("engine=simulated", "engine.bandwidth_gb_s=10", "engine.tflops=1", "engine.overhead_ms=1"),
    *("workload.num_requests=3", "measure.seed=5"),
)
SERVER = ("preset=serve", "model=tiny", "task.port=0", "runtime.device=cpu", "runtime.threads=1")
# Writes a page of its main table alone.
TABLE = """
import sys
from pathlib import Path
from minivllm.report import results
from minivllm.report.html import Conclusion, Front, Section, page
from minivllm.report.inputs import read
data = results.section(read(Path(sys.argv[1])).cells, Path(sys.argv[1]))
page(Front("", "", Conclusion("", [])), [Section("results", "", data)], {})
"""
PATIENCE_S = 300
SETTLE_S = 1.0  # until a request is logged and counted, after the end of its stream
PROBE = "--probe"  # starts the program as a process of a checkout


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
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
    for node in ast.walk(ast.parse(text)):  # docstrings of fields are such statements, too
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def modules(package: Path) -> dict[str, Path]:
    """Every file of a package by its dotted name below the package; "__init__" is its root."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
    }


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, wherever in the file, and for
    annotations too; each file is parsed once."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return found


def own_imports(files: dict[str, Path], name: str) -> Iterator[tuple[int, str]]:
    """Line and module of what a module imports of its own package."""
    for line, imported in imports(files[name]):
        below = imported.removeprefix("minivllm.")
        if below != imported:
            yield line, below if below in files else below.rpartition(".")[0]


def cycles(package: Path) -> list[list[str]]:
    """Groups of modules that reach each other by imports, the largest first."""
    files = modules(package)
    direct = {name: {own for _, own in own_imports(files, name)} & files.keys() for name in files}
    reached: dict[str, set[str]] = {}
    for name in files:
        found, waiting = set[str](), [name]
        while waiting:
            new = direct[waiting.pop()] - found
            found |= new
            waiting.extend(new)
        reached[name] = found
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in files
        if name in reached[name]
    }
    return sorted((list(group) for group in groups if len(group) > 1), key=len, reverse=True)


def files_that_run(package: Path, action: Callable[[], object]) -> list[str]:
    """Files of the package whose functions are called while `action` runs."""
    seen: dict[str, None] = {}  # in the order in which they run first

    def note(frame: Any, event: str, arg: object) -> None:
        if event == "call":
            seen[frame.f_code.co_filename] = None

    _profiled(note, action)
    return below(package, seen)


def files_that_hold(
    package: Path, action: Callable[[], object], is_value: Callable[[Any], bool]
) -> list[str]:
    """Files of the package with a function that has a value when it returns, as an argument or a
    local, while `action` runs."""
    seen = set()

    def note(frame: Any, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "return" and file not in seen and "minivllm" in file:
            values = (arg, *frame.f_locals.values())
            seen.update([file] if any(map(is_value, values)) else [])

    _profiled(note, action)
    return below(package, sorted(seen))


def _profiled(note: Callable[[Any, str, object], None], action: Callable[[], object]) -> None:
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)


def below(package: Path, names: Iterable[str]) -> list[str]:
    """Those of these files that lie in the package, by their place in it."""
    root = f"{package}{os.sep}"
    return [name.removeprefix(root) for name in names if name.startswith(root)]


def has_block_size(value: Any) -> bool:
    """Whether this is the block size of the traced cache, or has it."""
    if isinstance(value, dict):
        return value.get("block_size") == BLOCK_SIZE
    return (type(value) is int and value == BLOCK_SIZE) or (
        getattr(value, "__dict__", {}).get("block_size") == BLOCK_SIZE
    )


def has_nf4(value: Any) -> bool:
    """Whether this is the quantisation method NF4, or its options."""
    if isinstance(value, dict):
        return str(value.get("_target_")).endswith(".NF4")
    return type(value).__name__ == "NF4"


def probe() -> dict[str, list[str]]:
    """What runs in the checkout that this process imports."""
    import minivllm
    from minivllm import LLM, SamplingParams

    package = Path(minivllm.__file__).parent
    params = SamplingParams(max_tokens=4)
    llms: list[LLM] = []
    built = files_that_run(
        package, lambda: llms.append(LLM("tiny", overrides=["runtime.device=cpu", KNOBS[2]]))
    )
    with llms[0] as llm:
        llm.generate(["def main("], params)
        prompt = files_that_run(package, lambda: llm.generate(["def main("], params))
        llm.engine.add_request("one", [5, 6, 7], SamplingParams(max_tokens=8))
        llm.engine.step()
        llm.engine.step()
        token = files_that_run(package, llm.engine.step)

    def answer(*overrides: str) -> None:
        with LLM("tiny", overrides=[*KNOBS, *overrides]) as llm:
            llm.generate(["def main("], params)

    return {
        "token": token,
        "prompt": prompt,
        "build": built,
        "block_size": files_that_hold(
            package, lambda: answer(f"cache.block_size={BLOCK_SIZE}"), has_block_size
        ),
        "nf4": files_that_hold(package, lambda: answer("quant=nf4"), has_nf4),
    }


def probed(checkout: Path) -> dict[str, list[str]]:
    """What runs in a checkout's engine: see `probe`, which this starts as a process.

    Raises:
        SystemExit: its engine does not run.
    """
    done = subprocess.run(
        [sys.executable, __file__, PROBE],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: the engine does not run:\n{done.stderr[-2000:]}")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def served(checkout: Path) -> list[str]:
    """The files that run in any process of a server from a request to its line in the log.

    Raises:
        SystemExit: the server does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "run.py", *SERVER, f"runs_dir={folder}/runs"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        pipes |= {"cwd": checkout, "env": recording(checkout, folder)}
        with subprocess.Popen(command, text=True, **pipes) as process:
            try:
                assert process.stdout is not None
                lines = iter(process.stdout.readline, "")
                found = (re.search(r"http://\S+/v1", line) for line in lines)
                url = next((match.group() for match in found if match), None)
                if url is None:
                    raise SystemExit(f"{checkout}: the server does not start")
                stream(url)
                time.sleep(SETTLE_S)
                pids = [int(one.stem) for one in Path(folder).glob("*.ready")]
                alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
                for pid in alive:
                    os.kill(pid, signal.SIGUSR1)
                stream(url)
                time.sleep(SETTLE_S)
                for pid in alive:
                    os.kill(pid, signal.SIGUSR2)
                results = [Path(folder) / f"{pid}.json" for pid in alive]
                until = time.monotonic() + PATIENCE_S
                while not all(one.exists() for one in results) and time.monotonic() < until:
                    time.sleep(0.1)
                seen = {name for one in results for name in json.loads(one.read_text())}
            finally:
                process.terminate()
    return below(checkout / "minivllm", sorted(seen))


def recording(checkout: Path, folder: str, **more: str) -> dict[str, str]:
    """The environment of a process of a checkout that records its files into a folder."""
    paths = (str(Path(__file__).with_name("record_calls")), str(checkout))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RECORD_CALLS": folder, **more}


def measured(checkout: Path) -> list[str]:
    """The files that the median ITL of a cell has on its way from the driver to a page's table.

    Raises:
        SystemExit: the cell is not measured, or another figure of it equals its median ITL.
    """
    with tempfile.TemporaryDirectory() as place:
        folders = (f"runs_dir={place}/runs", f"reports_dir={place}/reports")

        def run(command: list[str], env: dict[str, str]) -> None:
            subprocess.run(command, cwd=checkout, env=env, check=True, stdout=subprocess.DEVNULL)

        plain = [sys.executable, "run.py", *CELL, "name=plain", *folders]
        run(plain, {**os.environ, "PYTHONPATH": str(checkout)})
        (record,) = Path(place).glob("runs/plain/*/record.json")
        metrics = json.loads(record.read_text())["metrics"]
        itl = metrics.pop("itl_ms")["p50"]
        if repr(itl) in json.dumps(metrics):
            raise SystemExit(f"{checkout}: another figure equals the median ITL, {itl} ms")
        seen = set()
        table = [sys.executable, "-c", TABLE, f"{place}/runs/traced"]
        for command in ([sys.executable, "run.py", *CELL, "name=traced", *folders], table):
            files = Path(place) / f"files-{len(seen)}"
            files.mkdir()
            run(command, recording(checkout, str(files), RECORD_VALUE=float(itl).hex()))
            found = {name for one in files.glob("*.json") for name in json.loads(one.read_text())}
            # the cell has a report of its own, all of it
            faces = () if command is table else ("analysis", "report", "experiments", "tasks")
            ignored = tuple(f"{checkout / 'minivllm' / room}{os.sep}" for room in faces)
            seen |= {name for name in found if not ignored or not name.startswith(ignored)}
    return below(checkout / "minivllm", sorted({*seen}))


def stream(url: str) -> None:
    """One streamed completion of six tokens at an API."""
    body = {"prompt": "def main(", "max_tokens": 6, "stream": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert b"[DONE]" in answer.read()


def structure(checkout: Path) -> dict[str, Any]:
    """All figures of a checkout.

    Raises:
        SystemExit: its engine or its server does not run, or its cell is not measured.
    """
    package = checkout / "minivllm"
    files = modules(package)
    lengths = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    folders = Counter(str(path.parent.relative_to(checkout)) for path in files.values())
    longest, (folder, count) = max(lengths, key=lengths.__getitem__), folders.most_common(1)[0]
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    named = {"cycles": cycles(package), **probed(checkout)}
    named |= {"itl": measured(checkout), "http": served(checkout)}
    ways = ("token", "prompt", "build", "http")
    return {
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "files": len(files),
        "code_lines": sum(code_lines(path) for path in files.values()),
        "longest_file": {"name": longest, "lines": lengths[longest]},
        "largest_folder": {"name": folder, "files": count},
        "counts": {name: len(one) for name, one in named.items()},
        "way_lines": {way: sum(code_lines(package / name) for name in named[way]) for way in ways},
        "named": named,
    }


def main() -> None:
    """Entry point; see the module's docstring."""
    from program import output_file

    from minivllm.platform import files

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="an older checkout of the project")
    parser.add_argument("--output", type=output_file, help="also write everything to this file")
    args = parser.parse_args()
    if args.before is not None and not (args.before / "minivllm").is_dir():
        parser.error("--before must be a checkout of this project, such as a git worktree")

    checkouts = {"before": args.before, "after": ROOT}
    result = {
        name: structure(path.resolve()) for name, path in checkouts.items() if path is not None
    }
    if args.output is not None:
        files.write_json(args.output, result)
    for figures in result.values():
        del figures["named"]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] == [PROBE]:  # imports only what every checkout has
        print(json.dumps(probe()))
    else:
        main()
