"""An engine of one's own, as its page shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "your-own-engine.md"


def test_the_engine_of_the_page_is_measured(user_dir: Path, cli: Callable[..., Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in re.findall(r"^```\w+\n# mine/(\S+)\n(.*?)^```", page, re.M | re.S):
        (user_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (user_dir / name).write_text(text)
    code = [line for line in (user_dir / "my_engine.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 40
    config = f"--config-dir={user_dir / 'conf'}"
    done = cli(config, "engine=random", "batching.max_num_seqs=2", "measure.roofline=false")
    assert done.code == 0, done.err
    (record,) = (json.loads(path.read_text()) for path in Path("runs").glob("*/*/record.json"))
    assert record["status"] == "ok" and record["validity"]["ok"], record["validity"]
    refused = cli(config, "engine=random", "quant=nf4")
    assert refused.code == 2 and "quant=nf4 is not supported by engine=random" in refused.err
