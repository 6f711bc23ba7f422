"""From a resolved configuration to an engine: the one place where the option classes meet."""

from __future__ import annotations

from typing import Any

import torch

from minivllm.config import build
from minivllm.engine.engine import Engine
from minivllm.engine.tokenizer import Tokenizer
from minivllm.errors import BadInput


def select_device(name: str) -> torch.device:
    """The device `runtime.device` asks for; "auto" takes a GPU if there is one.

    Raises:
        BadInput: torch knows no such device, or it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"runtime.device={name!r} is no device; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"runtime.device={name}: torch sees no GPU here; use runtime.device=cpu")
    return device


def build_engine(config: dict[str, Any]) -> Engine:
    """Load the model and put the engine together.

    Args:
        config: as `minivllm.config.compose()` returns it.

    Raises:
        BadInput: an option cannot be used with this model or on this machine.
    """
    device = select_device(config["runtime"]["device"])
    if config["runtime"]["threads"] is not None:
        torch.set_num_threads(config["runtime"]["threads"])
    policy = build(config["batching"])
    cache = build(config["cache"])
    loaded = build(config["model"], quant=build(config["quant"]), device=device)
    return Engine(
        loaded,
        Tokenizer.load(loaded.folder),
        policy,
        cache,
        lambda specs, kv: build(config["attention"], specs=specs, kv=kv),
        device,
        seed=config["measure"]["seed"],
    )
