"""A fake engine without torch that answers at once, or goes wrong in a chosen way: for testing the
processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineInfo, EngineOutput
from minivllm.errors import BadInput
from minivllm.platform.support import EVERY_KNOB, Support

MAX_MODEL_LEN = 256


class FaultyEngine:
    """Echoes growing token ids, one a request and step.

    Args:
        config: the resolved configuration.
        fault: None, or what goes wrong: "reject_build", "raise_build", "raise", "kill", "segfault",
            "hang", "allocate", "memory_error", "exit", "reject_request", "raise_once" (only where
            the file `state` is missing), "empty" (no tokens), "profile_raise", "profile_kill",
            "profile_hang" (these only once it is profiled), "paragraph" (an error of several
            lines), "native" (writes `token` past Python's streams, also when it closes).
        delay_s: time of a step.
        state: a file that remembers across processes, for "raise_once"; also counts the builds.
        token: a secret.
        meeting: a folder; the first step leaves the file `begun` there, and the second waits for
            the file `go`.
        progress: told of loading once.
    """

    support = Support(knobs=EVERY_KNOB)  # so that a test may set any of them

    def __init__(
        self,
        config: dict[str, Any],
        fault: str | None = None,
        delay_s: float = 0.0005,
        state: str | None = None,
        token: str = "",
        meeting: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if progress is not None:
            progress(45, 99)
        print(f"building an engine with fault={fault}")
        if fault == "reject_build":
            raise BadInput("engine.fault: this engine cannot be built")
        if fault == "raise_build":
            raise ValueError("cannot build")
        self.fault, self.delay_s, self.token = fault, delay_s, token
        self.state = Path(state) if state else None
        self.meeting = Path(meeting) if meeting else None
        self.first_life = self.state is not None and not self.state.exists()
        if self.state:
            with self.state.open("a") as file:
                file.write(f"{os.getpid()}\n")
        self.hoard: list[bytearray] = []
        self.running: dict[str, int] = {}
        self.prompts: dict[str, int] = {}  # tokens that no step has computed
        self._steps: list[dict[str, Any]] = []
        self.info = EngineInfo(
            name="faulty",
            weights="random",
            fingerprint="f" * 12,
            vocab_size=1000,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(0,),
            max_num_seqs=4,
            load_s=0.25,
            memory={"weights": 1000, "weights_16bit": 2000},
            warnings=["weights are random"],
        )

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if self.fault == "reject_request":
            raise BadInput("the request is larger than the cache: raise cache.num_blocks")
        self.running[request_id] = params.max_tokens or 1
        self.prompts[request_id] = len(prompt_token_ids)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """See BenchEngine; this is where most faults strike."""
        self._go_wrong()
        while self.meeting and self._steps and not (self.meeting / "go").exists():
            time.sleep(self.delay_s)
        time.sleep(self.delay_s)
        start = time.monotonic() - self.delay_s
        batch = list(self.running)[: self.info.max_num_seqs]
        first = [self.prompts.pop(request_id) for request_id in batch if request_id in self.prompts]
        self._steps.append(
            {
                "start_s": start,
                "num_requests": len(batch),
                "num_tokens": sum(first) + len(batch) - len(first),
                "num_prefill_tokens": sum(first),
                "context_tokens": 10 * len(batch),
                "waiting": len(self.running) - len(batch),
                "kv_blocks_used": len(batch),
                "kv_blocks_total": 100,
                "kv_slots_wasted": 4,
                "kv_slots_allocated": 16,
                "forward_ms": 1000 * self.delay_s,
            }
        )
        if self.meeting:
            (self.meeting / "begun").touch()
        outputs = []
        for request_id in batch:
            self.running[request_id] -= 1
            done = self.running[request_id] == 0
            if done:
                del self.running[request_id]
            tokens = () if self.fault == "empty" else (7,)
            outputs.append(EngineOutput(request_id, tokens, "length" if done else None, start))
        return outputs

    def _go_wrong(self) -> None:
        if self.fault == "raise" or (self.fault == "raise_once" and self.first_life):
            raise RuntimeError("the engine broke")
        if self.fault == "paragraph":
            raise RuntimeError("\nCUDA error: the device broke\nCompile with a flag\nto see more\n")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "exit":
            os._exit(7)
        if self.fault == "hang":
            print("hanging", flush=True)
            time.sleep(3600)
        if self.fault == "native":
            os.write(2, f"native code has {self.token}\n".encode())
        if self.fault == "memory_error":
            raise MemoryError("no more")
        if self.fault == "allocate":
            self.hoard.append(bytearray(os.urandom(1 << 20) * 64))
            time.sleep(0.02)

    @contextmanager
    def phases(self) -> Iterator[None]:
        """See ProfiledEngine: there are none."""
        if self.fault is not None:
            self.fault = self.fault.removeprefix("profile_")
        yield

    def reset(self) -> None:
        self.running.clear()
        self.prompts.clear()
        self._steps.clear()

    def steps(self) -> list[dict[str, Any]]:
        return list(self._steps)

    def liveness(self) -> dict[str, dict[str, float | str]]:
        return {"engine": {"steps": float(len(self._steps))}}

    def text(self, token_ids: list[int]) -> str | None:
        """See BenchEngine: there is no tokenizer."""
        return None

    def encode(self, text: str) -> list[int]:
        raise BadInput("no tokenizer")

    def close(self) -> None:
        if self.fault == "native":
            os.write(1, f"closed with {self.token}\n".encode())
