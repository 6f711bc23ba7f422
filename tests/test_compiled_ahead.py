"""What is compiled ahead is what the processes of the tests would compile."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir

from tests import compiled_ahead


def test_tests_and_modules_are_compiled_and_what_is_wrong_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(compiled_ahead, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    module, test = tmp_path / "minivllm" / "module.py", tmp_path / "tests" / "test_it.py"
    for path in (module, test, tmp_path / "tests" / "test_wrong.py", tmp_path / "tests" / "no.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("assert 1 <" if path.stem in ("test_wrong", "no") else "assert 1 < 2\n")

    def known() -> bool:
        return _read_pyc(test, get_cache_dir(test) / f"{test.stem}{PYC_TAIL}") is not None

    assert not known()
    compiled_ahead.compile_ahead(pytestconfig)
    assert known() and Path(cache_from_source(str(module))).exists()
    test.write_text("assert 1 < 2 < 3\n")
    os.utime(test, (1, 1))
    assert not known()
    compiled_ahead.compile_ahead(pytestconfig)
    assert known()
