"""Make the folder of wheels that a machine with a GPU and no network needs, and try them.

    python scripts/gpu_wheels.py                        # into build/wheels, which git ignores
    python scripts/gpu_wheels.py --present pip.txt      # `pip list --format freeze` of that machine
    python scripts/gpu_wheels.py --cuda 12.8 13.0

The machine has Python 3.12 on Linux, x86-64, in an image with PyTorch: by default the packages in
IMAGE. The others that pyproject.toml names for measuring and serving are downloaded in the
versions of constraints.txt, with what they need themselves. A package without a wheel is built, if
it is pure Python. Of bitsandbytes only the libraries of the given CUDA versions are kept. All
wheels are installed into an empty folder, by Python 3.12 where it is found, and imported there.

Prints the size of the tree (what git tracks, and new files) and of the wheels; the exit code is 1
if both together are larger than --limit.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from program import exit_code, new_parser

from minivllm.errors import BadInput

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
LIMIT_MIB = 50
VERSION = "3.12"
EXTRAS = ("run", "serve", "gguf")
# What an image with PyTorch has of the packages that are needed.
IMAGE = """
annotated-doc anyio certifi charset-normalizer click contourpy cycler filelock fonttools fsspec h11
hf-xet httpcore httpx huggingface-hub idna jinja2 kiwisolver markdown-it-py markupsafe matplotlib
mdurl ninja numpy nvidia-ml-py packaging pandas pillow prometheus-client psutil pyarrow pygments
pyparsing python-dateutil pyyaml requests rich safetensors scipy setuptools shellingham six
tokenizers torch tqdm transformers triton typer typing-extensions urllib3 xxhash
"""
PRESENT = frozenset(IMAGE.split())
# pip takes each of these by its exact name only.
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
]
INSTALL = "-m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target"
# Prints, for each module that the arguments name, the module that its import lacks; null: none.
IMPORT = """
import importlib, json, sys
lacks = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        lacks[name] = None
    except ModuleNotFoundError as error:
        lacks[name] = error.name
print(json.dumps(lacks))
"""


def marker_environment() -> dict[str, str]:
    """The values of environment markers on the machine."""
    return {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": VERSION,
        "python_full_version": f"{VERSION}.3",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "extra": "",
    }


def missing(present: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """The packages that the machine lacks, by canonical name, with their versions in
    constraints.txt.

    What each needs is read from the package as it is installed here.

    Args:
        present: names of the machine's packages.
        root: the folder of pyproject.toml and constraints.txt.

    Raises:
        BadInput: a package has no version, or is not installed here.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.partition("#")[0].strip().split("==") for line in lines if "==" in line)
    versions = {canonicalize_name(name): version.strip() for name, version in pins.items()}
    there = {canonicalize_name(name) for name in present}
    environment = marker_environment()
    left = [*project["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]
    found: dict[str, str] = {}
    while left:
        needed = Requirement(left.pop())
        name = canonicalize_name(needed.name)
        if needed.marker is not None and not needed.marker.evaluate(environment):
            continue
        if name in there or name in found:
            continue
        if name not in versions:
            raise BadInput(f"constraints.txt has no version of {name}")
        found[name] = versions[name]
        try:
            left += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            raise BadInput(f"{name} is not installed here: make install") from None
    return dict(sorted(found.items()))


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fetch(name: str, version: str, folder: Path) -> None:
    """Put the wheel of a package into a folder; without one, that of its sources.

    Raises:
        BadInput: there is neither, or the sources are not pure Python.
    """
    pinned = f"{name}=={version}"
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    tags = ["--python-version", VERSION, "--implementation", "cp", *platforms]
    common = ["--disable-pip-version-check", "--quiet", "--no-deps", pinned]
    got = pip("download", "--only-binary=:all:", *tags, "--dest", str(folder), *common)
    if got.returncode == 0:
        return
    before = {*folder.iterdir()}
    built = pip("wheel", "--wheel-dir", str(folder), *common)
    if built.returncode:
        raise BadInput(f"{pinned}: no wheel ({last_line(got)}), no sources ({last_line(built)})")
    (wheel,) = {*folder.iterdir()} - before
    if not wheel.name.endswith("-none-any.whl"):
        wheel.unlink()
        raise BadInput(f"{pinned} has no wheel for the machine, and is not pure Python")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a failed command's errors."""
    return (done.stderr.strip().splitlines() or ["no message"])[-1]


def is_foreign(name: str, cuda: Sequence[str]) -> bool:
    """Whether a file of bitsandbytes is the library of another accelerator or CUDA version."""
    library = Path(name).name
    kept = {f"libbitsandbytes_cuda{version.replace('.', '')}.so" for version in cuda}
    return library.startswith("libbitsandbytes_") and library not in {
        *kept,
        "libbitsandbytes_cpu.so",
    }


def trim(wheel: Path, cuda: Sequence[str]) -> int:
    """Leave out of bitsandbytes' wheel what `is_foreign`; returns how many files.

    Raises:
        BadInput: the wheel has no library for one of the CUDA versions.
    """
    with zipfile.ZipFile(wheel) as old:
        contents = {info.filename: old.read(info) for info in old.infolist()}
    libraries = {Path(name).name for name in contents}
    for version in cuda:
        if f"libbitsandbytes_cuda{version.replace('.', '')}.so" not in libraries:
            raise BadInput(f"{wheel.name} has no library for CUDA {version}")
    kept = {name: content for name, content in contents.items() if not is_foreign(name, cuda)}
    (record,) = (name for name in kept if name.endswith(".dist-info/RECORD"))
    rows = [f"{name},{digest(data)},{len(data)}" for name, data in kept.items() if name != record]
    kept[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for name, content in kept.items():
            new.writestr(name, content)
    return len(contents) - len(kept)


def digest(content: bytes) -> str:
    """The digest of a file as a wheel's RECORD has it."""
    coded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={coded.rstrip(b'=').decode()}"


def interpreters() -> list[str]:
    """Commands that may be Python 3.12 on this machine."""
    own = [sys.executable, shutil.which(f"python{VERSION}")]
    places = ("~/.pyenv/versions", "~/.local/share/uv/python")
    managed = [
        str(path)
        for place in places
        for path in sorted(Path(place).expanduser().glob(f"*{VERSION}*/bin/python{VERSION}"))
    ]
    return [path for path in (*own, *managed) if path]


def find_python() -> str | None:
    """A Python 3.12 with pip; None where there is none."""
    probe = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
    for path in interpreters():
        done = subprocess.run([path, "-c", probe], capture_output=True, text=True, check=False)
        if done.stdout.strip() == VERSION:
            return path
    return None


def modules_of(wheel: Path) -> list[str]:
    """The top-level packages and modules that a wheel installs, but for private ones."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist() if name.endswith(".py")}
    names = {top.removesuffix(".py") for top in tops}
    return sorted(name for name in names if name.isidentifier() and not name.startswith("_"))


def try_wheels(folder: Path, python: str) -> list[str]:
    """Install all wheels of a folder into an empty one, and import what they install.

    Returns:
        The modules that the imports need beside the wheels.

    Raises:
        BadInput: an installation or an import fails.
    """
    wheels = sorted(folder.glob("*.whl"))
    with tempfile.TemporaryDirectory() as target:
        command = [python, *INSTALL.split(), target, *map(str, wheels)]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            raise BadInput(f"{folder}: the wheels cannot be installed: {last_line(installed)}")
        modules = sorted({module for wheel in wheels for module in modules_of(wheel)})
        environment = {**os.environ, "PYTHONPATH": target}
        command = [python, "-c", IMPORT, *modules]
        imported = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
    if imported.returncode:
        raise BadInput(f"{folder}: an installed module fails: {last_line(imported)}")
    lacks: dict[str, str | None] = json.loads(imported.stdout.splitlines()[-1])
    beside = {name for name in lacks.values() if name is not None}
    if own := {name.partition(".")[0] for name in beside} & {*modules}:
        raise BadInput(f"{folder}: {', '.join(sorted(own))} is installed and cannot be imported")
    return sorted(beside)


def tree_bytes(root: Path = ROOT) -> int:
    """Bytes of what git tracks and of new files that it does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run([*command, "--exclude-standard"], capture_output=True, check=True)
    paths = {root / name for name in done.stdout.decode().split("\0") if name}
    return sum(path.lstat().st_size for path in paths if path.is_file())


def sizes(tree: int, wheels: int, limit_mib: float) -> tuple[str, bool]:
    """Both sizes and their sum in MiB, in words, and whether the sum is within the limit."""
    parts = [number / MIB for number in (tree, wheels, tree + wheels)]
    fits = tree + wheels <= limit_mib * MIB
    words = "within" if fits else "above"
    text = "tree {:.1f} MiB, wheels {:.1f} MiB, together {:.1f} MiB".format(*parts)
    return f"{text}: {words} {limit_mib:g} MiB", fits


def make(folder: Path, packages: dict[str, str], cuda: Sequence[str]) -> None:
    """Fill a folder with the wheels of the packages, and nothing else. Raises BadInput, see
    `fetch` and `trim`."""
    for old in folder.glob("*.whl"):
        old.unlink()
    for name, version in packages.items():
        fetch(name, version, folder)
    for wheel in folder.glob("bitsandbytes-*.whl"):
        whole = wheel.stat().st_size / MIB
        count, left = trim(wheel, cuda), wheel.stat().st_size / MIB
        print(f"bitsandbytes: {whole:.1f} to {left:.1f} MiB without {count} libraries")


def main() -> int:
    """Entry point; see the module's docstring. Returns the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--present", type=argparse.FileType(), help="packages of the machine")
    parser.add_argument("--cuda", nargs="+", default=["13.0"], help="versions of the machine")
    parser.add_argument("--limit", type=float, default=LIMIT_MIB, help="MiB of tree and wheels")
    given = parser.parse_args()
    present: Iterable[str] = PRESENT
    if given.present is not None:
        lines = (line.partition("#")[0].strip() for line in given.present)
        present = [line.split("==")[0].split()[0] for line in lines if line]
    packages = missing(present)
    print("needed:", ", ".join(f"{name} {version}" for name, version in packages.items()))
    given.folder.mkdir(parents=True, exist_ok=True)
    make(given.folder, packages, given.cuda)
    if (python := find_python()) is None:
        print(f"not tried: there is no Python {VERSION} with pip here")
    else:
        beside = try_wheels(given.folder, python)
        print(f"installed and imported by {python}; needed beside them: {', '.join(beside)}")
    wheels = sorted(given.folder.glob("*.whl"))
    text, fits = sizes(tree_bytes(), sum(wheel.stat().st_size for wheel in wheels), given.limit)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / MIB:6.2f} MiB  {wheel.name}")
    print(text)
    wheels_there = f"{os.path.relpath(given.folder)}/*.whl"
    print(f"to install them: python3 {INSTALL} SITE {wheels_there}; export PYTHONPATH=SITE")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
