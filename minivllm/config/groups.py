"""The config groups and sections, and the option dataclass of each, found in the `options.py` files
of all rooms."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

GROUPS: dict[str, str] = {
    "task": "what to do",
    "model": "which model; model=hf model.path=... takes any checkpoint folder or hub id",
    "quant": "how weights are stored",
    "pruning": "what of the model is left out",
    "attention": "attention kernel",
    "batching": "which requests share a step",
    "cache": "where keys and values are kept",
    "decoding": "how tokens are chosen",
    "speculative": "which tokens are guessed ahead and verified together",
    "vision": "images of prompts, for models that take them",
    "workload": "what is asked",
    "arrival": "when it is asked",
    "engine": "what is measured",
    "runtime": "device and threads",
    "parallel": "how many engines and devices serve together",
    "measure": "repeats, seeds, timeouts, SLOs, prices",
    "tracker": "who else is told of a record",
}
SECTIONS = ("quality", "sweep", "report", "view")  # settings below a key of the root configuration


def _found() -> dict[str, type]:
    """The option dataclasses of every `options.py` in the package, by the names that they give."""
    root = Path(__file__).resolve().parents[1]
    classes: dict[str, type] = {}
    for file in sorted(root.rglob("options.py")):
        module = import_module(".".join((root.name, *file.relative_to(root).with_suffix("").parts)))
        for cls in vars(module).values():
            if isinstance(cls, type):
                classes |= dict.fromkeys(vars(cls).get("names", ()), cls)
    return classes


_BY_NAME = _found()
# By `_target_`. A class of the user's own is not here: it is checked against its constructor when
# it is built.
OPTIONS: dict[str, type] = {name: cls for name, cls in _BY_NAME.items() if "." in name}
# Groups and sections whose options are plain settings and name no class; `ablation` is there only
# where it is added.
TARGETLESS: dict[str, type] = {name: cls for name, cls in _BY_NAME.items() if "." not in name}
