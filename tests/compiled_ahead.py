"""Bytecode for test processes that start side by side: each imports every file at the same time as
the others, and would compile it as they do."""

from __future__ import annotations

import compileall
import contextlib
import os
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
    try_makedirs,
)

ROOT = Path(__file__).resolve().parents[1]


def compile_ahead(config: pytest.Config) -> None:
    """Compile what has no bytecode or old bytecode, on as many cores as there are; what cannot be
    compiled is told of where it is imported."""
    if sys.dont_write_bytecode:
        return
    files = [path for folder in ("minivllm", "tests") for path in (ROOT / folder).rglob("*.py")]
    cores = os.cpu_count() or 1
    children = []
    for part in range(cores):
        if not (child := os.fork()):
            try:
                for path in files[part::cores]:
                    with contextlib.suppress(Exception):
                        _compile(path, config)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _compile(path: Path, config: pytest.Config) -> None:
    names = ("conftest.py", *config.getini("python_files"))
    if ROOT / "tests" not in path.parents or not any(fnmatch(path.name, name) for name in names):
        compileall.compile_file(path, quiet=2)
        return
    folder = get_cache_dir(path)  # with the assertions that pytest rewrites
    bytecode = folder / f"{path.stem}{PYC_TAIL}"
    if try_makedirs(folder) and _read_pyc(path, bytecode) is None:
        source, code = _rewrite_test(path, config)
        _write_pyc(config.stash[assertstate_key], code, source, bytecode)
