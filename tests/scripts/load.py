"""The programs of scripts/, which is no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load_script(name: str) -> Any:
    """The module that scripts/<name>.py is."""
    spec = importlib.util.spec_from_file_location(f"scripts.{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(SCRIPTS) not in sys.path:  # as Python does for a program: scripts import one another
        sys.path.append(str(SCRIPTS))
    sys.modules[spec.name] = module  # where a dataclass looks for the names in its annotations
    spec.loader.exec_module(module)
    return module
