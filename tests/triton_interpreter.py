"""Triton's interpreter prepares its language once a kernel, not at each call of a function within
it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest


def prepare_once(patch: pytest.MonkeyPatch) -> None:
    """Leave out what the interpreter has done already, a third of its time; nothing where no kernel
    has been imported."""
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is None:
        return
    import triton.language as tl

    prepare: Callable[..., Any] = interpreter._patch_lang

    def prepare_if_needed(function: Any) -> Any:
        languages = [
            value for value in function.__globals__.values() if value is tl or value is tl.core
        ]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return prepare(function)
        return interpreter._LangPatchScope()  # of which nothing is to be undone

    patch.setattr(interpreter, "_patch_lang", prepare_if_needed)
