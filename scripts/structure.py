"""How large and how entangled a checkout of this project is.

    python scripts/structure.py                      # this checkout
    git worktree add build/before COMMIT
    python scripts/structure.py --before build/before --output reports/examples/cpu/structure.json

1. Lines of code of the core (`CORE`), without comments, docstrings and option dataclasses.
2. The longest file and the folder with the most files.
3. Import cycles between modules, imports for annotations included.
4. Files of the package whose code runs in one decoding step of the embedded model, and from a
   prompt to its text.
5. Files of the package and of conf/ that act on a name: a knob's, a method's, a figure's.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What every request goes through. Kernels (folders "kernels") are not counted; what chooses and
# calls them is.
CORE = (
    "engine/*.py",
    "cache/*.py",
    "cache/compression/*.py",
    "attention/base.py",
    "attention/batch.py",
    "attention/eager.py",
    "quant/base.py",
    "quant/plain.py",
    "models/layers.py",
    "models/families/llama.py",
)
NAMES = ("block_size", "nf4", "kv_blocks_used")
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


def core_files(package: Path) -> list[Path]:
    """The files of the core."""
    return sorted(
        path for pattern in CORE for path in package.glob(pattern) if path.name != "options.py"
    )


def modules(package: Path) -> dict[str, Path]:
    """Every file of a package by its dotted name below the package; "__init__" is its root."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
    }


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, wherever in the file, and for
    annotations too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


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
    seen = set()

    def note(frame: Any, event: str, arg: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    root = f"{package}{os.sep}"
    return sorted(name.removeprefix(root) for name in seen if name.startswith(root))


def probe() -> dict[str, list[str]]:
    """The files that a token and a prompt pass through in the checkout that this process
    imports."""
    import minivllm
    from minivllm import LLM, SamplingParams

    package = Path(minivllm.__file__).parent
    params = SamplingParams(max_tokens=4)
    with LLM("tiny", overrides=["runtime.device=cpu", "cache.num_blocks=64"]) as llm:
        llm.generate([[5, 6, 7]], params)
        prompt = files_that_run(package, lambda: llm.generate([[5, 6, 7]], params))
        llm.engine.add_request("one", [5, 6, 7], SamplingParams(max_tokens=8))
        llm.engine.step()
        llm.engine.step()
        return {"token": files_that_run(package, llm.engine.step), "prompt": prompt}


def uses(path: Path, name: str) -> bool:
    """Whether a file acts on a name: Python holds it as an identifier or as a whole string, YAML
    outside of comments. Text that mentions it does not count."""
    text = path.read_text()
    if name not in text:  # most files, which need not be parsed
        return False
    if path.suffix != ".py":
        bare = re.sub(r"#.*", "", text)
        return re.search(rf"\b{name}\b", bare) is not None
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return any(token.string in (name, f'"{name}"') for token in tokens)


def files_with(checkout: Path, name: str) -> list[str]:
    """Files of the package and of conf/ that act on a name; presets and help only set it."""
    return [
        str(path.relative_to(checkout))
        for folder, suffix in (("minivllm", "*.py"), ("conf", "*.yaml"))
        for path in sorted((checkout / folder).rglob(suffix))
        if not {"preset", "hydra"} & set(path.parts) and uses(path, name)
    ]


def structure(checkout: Path) -> dict[str, Any]:
    """All figures of a checkout.

    Raises:
        SystemExit: its engine does not run.
    """
    package = checkout / "minivllm"
    done = subprocess.run(
        [sys.executable, __file__, PROBE],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: the engine does not run:\n{done.stderr[-2000:]}")
    files = modules(package)
    lengths = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    folders = Counter(str(path.parent.relative_to(checkout)) for path in files.values())
    longest, (folder, count) = max(lengths, key=lengths.__getitem__), folders.most_common(1)[0]
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    named = {
        "cycles": cycles(package),
        **json.loads(done.stdout.splitlines()[-1]),
        **{name: files_with(checkout, name) for name in NAMES},
    }
    return {
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "core_lines": sum(code_lines(path) for path in core_files(package)),
        "longest_file": {"name": longest, "lines": lengths[longest]},
        "largest_folder": {"name": folder, "files": count},
        "counts": {name: len(one) for name, one in named.items()},
        "named": named,
    }


def main() -> None:
    """Entry point; see the module's docstring."""
    from minivllm.platform import files
    from minivllm.platform.scripts import output_file

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
