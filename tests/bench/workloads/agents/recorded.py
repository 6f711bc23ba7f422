"""Hand-made sessions in the forms of recorded ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BLOCK = 64


def call(
    t: float, prompt: int, output: int, ids: list[int], api: float | None = 2.0, **more: Any
) -> dict[str, Any]:
    """A request of a weka session."""
    took = {} if api is None else {"api_time": api}
    fixed = {"type": "n", "model": "m", "stop": "tool_use", "input_types": [], "output_types": []}
    return {"t": t, "in": prompt, "out": output, "hash_ids": ids, **fixed, **took, **more}


def subagent(t: float, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A sub-agent of a weka session."""
    fixed = {"type": "subagent", "agent_id": "a", "subagent_type": "Explore", "status": "completed"}
    return {"t": t, **fixed, "models": ["m"], "requests": requests, **more}


def weka(requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A weka session."""
    fixed = {"id": "x", "models": ["m"], "block_size": BLOCK, "hash_id_scope": "local"}
    return {**fixed, "tool_tokens": 0, "system_tokens": 0, "requests": requests, **more}


def growing(turns: int, first: int, growth: int, wait_s: float = 3.0) -> dict[str, Any]:
    """A session whose prompts grow by whole blocks, with one sub-agent in the middle."""
    requests: list[dict[str, Any]] = []
    t, next_id = 0.0, 1_000_000
    for turn in range(turns):
        blocks = first + turn * growth
        requests.append(call(t, blocks * BLOCK, 40, list(range(blocks))))
        t += 2.0 + wait_s
        if turn == turns // 2:
            inner = [
                call(2.0 * i, (first + i) * BLOCK, 30, list(range(next_id, next_id + first + i)))
                for i in range(3)
            ]
            requests.append(subagent(t - wait_s + 0.5, inner))
            t += 6.0
    return weka(requests, tool_tokens=BLOCK, system_tokens=BLOCK)


def write(path: Path, *values: Any) -> Path:
    """A file with a value a line, or with one alone."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path
