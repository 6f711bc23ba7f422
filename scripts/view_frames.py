"""How fast the live view's page draws: frames a second in headless Chromium.

    python scripts/view_frames.py [--blocks 10000] [--requests 256] [--seconds 5]

The engine's own scheduler and block pool, without a model, make a recording in which that many
requests hold most of that many blocks; the page plays it, and the frames that the browser gives it
are counted, with the time that the page's own scripts take of each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheLayout
from minivllm.engine.batching import Continuous
from minivllm.engine.events import EventBus, StepEnded
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.scheduler import Scheduler
from minivllm.extras.observation.observer import StepObserver
from minivllm.report.view.page import recorded_page

BLOCK_SIZE = 16
STEP_S = 0.025
OUTPUT = 128  # tokens of each request
# Counts frames while the recording plays, and what the page does in each.
COUNT = """(seconds) => new Promise((resolve) => {
  const { view, show, seek } = minivllmView;
  seek(view.timeline.items.findIndex((_, at) => view.timeline.rowAt(at).running > 0) + 8);
  show({ speed: 1, isPlaying: true });
  const inner = requestAnimationFrame;
  let [frames, busy, first] = [0, 0, null];
  globalThis.requestAnimationFrame = (call) => inner((now) => {
    const begin = performance.now();
    call(now);
    busy += performance.now() - begin;
  });
  const tick = (now) => {
    first ??= now;
    if (now - first >= 1000 * seconds) {
      resolve({
        frames_per_s: (1000 * frames) / (now - first), script_ms: busy / frames,
        running: view.timeline.rowAt(view.index).running, blocks: view.timeline.engine.num_blocks,
        used: view.timeline.rowAt(view.index).used,
      });
      return;
    }
    frames += 1;
    inner(tick);
  };
  inner(tick);
})"""


class Clock:
    """Seconds that the recording moves."""

    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def recording(blocks: int, requests: int, steps: int) -> list[dict[str, Any]]:
    """Items of steps in which so many requests hold most of so many blocks, and others wait.

    Args:
        blocks: of the cache.
        requests: that run at once.
        steps: number of them.
    """
    clock, items = Clock(), list[dict[str, Any]]()
    cache = CacheManager(CacheLayout(BLOCK_SIZE, blocks + 1))
    policy = Continuous(requests, max_num_batched_tokens=blocks * BLOCK_SIZE, watermark=0)
    scheduler = Scheduler(policy, cache, EventBus(), clock)
    StepObserver(scheduler, lambda bundle: items.append(json.loads(json.dumps(bundle))))
    prompt = blocks // requests * BLOCK_SIZE - OUTPUT
    params = SamplingParams(ignore_eos=True)
    for index in range(requests * (2 + 2 * steps // OUTPUT)):
        most = prompt + OUTPUT // 2 + index % (OUTPUT // 2)  # they end one after the other
        request = Request(f"r{index}", [1] * prompt, params, max_num_tokens=most, seed=0)
        scheduler.add(request)
    for _ in range(steps):
        plan = scheduler.plan()
        clock.time_s += STEP_S
        for part in plan.scheduled:
            scheduler.computed(part)
            if part.request.append(1) is not None:
                scheduler.finish(part.request, "length")
        scheduler.events.emit(StepEnded(clock(), plan))
        clock.time_s += STEP_S / 50
    return items


def measure(items: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Frames a second while the page plays so many seconds of a recording."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        file.write_text(recorded_page("frames", items), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(file.as_uri())
        page.locator("#grid").wait_for()
        measured: dict[str, Any] = page.evaluate(COUNT, seconds)
        browser.close()
    return measured


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    items = recording(args.blocks, args.requests, steps=int(args.seconds / STEP_S) + 40)
    print(json.dumps(measure(items, args.seconds), indent=1))


if __name__ == "__main__":
    main()
