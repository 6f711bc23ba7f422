"""Python sources of the standard library: texts that every machine has (PSF licence)."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

# Generated tables and fixtures teach a language model nothing about Python.
SKIPPED_PARTS = {"site-packages", "encodings", "__pycache__", "lib2to3", "cjkencodings", "msilib"}


def split_standard_library() -> tuple[list[Path], list[Path]]:
    """(training files, held-out files) of this interpreter's standard library.

    The split is by file, decided by a hash of its path, so that it is the same on every machine.
    Test files are trained on only when the module they test is not held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    library: list[Path] = []
    tests: list[Path] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_PARTS & set(parts) or path.stat().st_size < 200:
            continue
        (tests if "test" in parts or "tests" in parts or "idle_test" in parts else library).append(
            path
        )

    def held_out(path: Path) -> bool:
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        # About 4 % of the files, none so large that it would be most of the sample.
        return digest[0] < 10 and path.stat().st_size < 100_000

    held = [path for path in library if held_out(path)]
    stems = {path.stem for path in held if path.stem != "__init__"} | {
        path.parent.name for path in held if path.stem == "__init__"
    }
    training = [path for path in library if not held_out(path)]
    training += [path for path in tests if not any(stem in path.stem for stem in stems)]
    return training, held
