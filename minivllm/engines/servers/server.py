"""The base of every engine whose server is started here: command line, readiness, warm-up with
other prompts, an empty prefix cache, and counters from the server's /metrics and log."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from minivllm.bench.records.identity import digest, engine_id
from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineOutput
from minivllm.engines.installed import require
from minivllm.engines.openai.engine import OpenAIEngine
from minivllm.engines.openai.options import OpenAIOptions
from minivllm.engines.openai.stream_event import ServerError
from minivllm.engines.peer_process import StartedProcess
from minivllm.engines.servers.kept import KeptServer
from minivllm.engines.supported_knobs import require_supported
from minivllm.errors import BadInput
from minivllm.models.load.source import Source, resolve
from minivllm.platform.folders import TemporaryFolder
from minivllm.platform.support import ServerOptions
from minivllm.platform.threads import thread_count
from minivllm.platform.untrusted import printable


@dataclass(frozen=True)
class MetricsPage:
    """One reading of /metrics: its samples by name, one for each set of labels."""

    samples: Mapping[str, tuple[Sample, ...]]

    @classmethod
    def parse(cls, text: str) -> MetricsPage:
        """Read a page. Raises ServerError where it is none."""
        samples: dict[str, tuple[Sample, ...]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples[sample.name] = (*samples.get(sample.name, ()), sample)
        except (ValueError, KeyError, IndexError) as error:
            words = printable(str(error))
            raise ServerError(f"/metrics is not in Prometheus' format ({words})") from None
        return cls(samples)

    def total(self, name: str) -> float | None:
        """The sum over all sets of labels; None where there is no such metric."""
        found = self.samples.get(name)
        return None if found is None else float(sum(sample.value for sample in found))

    def label(self, name: str, label: str) -> str | None:
        """The value of a label of the first sample; None where there is none."""
        found = self.samples.get(name, ())
        return found[0].labels.get(label) if found else None

    def since(self, before: MetricsPage, name: str) -> float | None:
        """How much a counter has grown; one that has appeared meanwhile began at 0."""
        now = self.total(name)
        return None if now is None else now - (before.total(name) or 0.0)

    def largest_bucket(self, before: MetricsPage, name: str) -> float | None:
        """The upper bound of the highest bucket of a histogram that has got an observation since;
        None where none has."""
        earlier = {s.labels.get("le"): s.value for s in before.samples.get(f"{name}_bucket", ())}
        grown = sorted(
            (float(sample.labels["le"]), sample.value - earlier.get(sample.labels["le"], 0.0))
            for sample in self.samples.get(f"{name}_bucket", ())
        )
        total = grown[-1][1] if grown else 0.0  # buckets are cumulative
        return next((bound for bound, count in grown if total and count == total), None)


HOST = "127.0.0.1"
REST_S = 5.0  # for a server to notice that the last connections were closed
LOOK_S = 0.05
NOTES = (
    "the server's steps cannot be seen from outside: no breakdown, use of bandwidth or queueing "
    "time by request; first tokens include the way over HTTP",
)
FOUND = "the server had been started for an earlier measurement: load_s is the time to reach it"
UNRESTED = (
    f"the server still had requests {REST_S:g} s after their clients had left: its prefix cache "
    "may not have been empty"
)


class StartedServer(OpenAIEngine):
    """Starts a server for a configuration, and measures it over HTTP; subclasses say how their
    engine calls things.

    Attributes:
        reset_path: where a POST empties the prefix cache.
        fields: of every request, besides OpenAI's.
        counters: "group.counter" of liveness: the counter of /metrics, which is summed over its
            labels and counted from the last `reset`.
        labels: "group.counter": a metric and its label, whose value is a setting.
        log_facts: "group.counter": what the server's log says of it, as the pattern's group; the
            last match wins.
        queue: the histogram of /metrics with the seconds that requests waited to be run; "" where
            there is none.
        busy: gauges of /metrics of which one is above 0 while a request is under way.

    Args:
        config: the resolved configuration.
        options: the knobs of `engine`.

    Raises:
        BadInput: a knob is set that is not supported, there is no such program, or the server ends
            or is not ready in time; the last lines that it printed are in the message.
    """

    notes: tuple[str, ...] = NOTES
    reset_path: ClassVar[str]
    fields: ClassVar[Mapping[str, Any]] = {}
    counters: ClassVar[Mapping[str, str]] = {}
    labels: ClassVar[Mapping[str, tuple[str, str]]] = {}
    log_facts: ClassVar[Mapping[str, re.Pattern[str]]] = {}
    queue: ClassVar[str] = ""
    busy: ClassVar[tuple[str, ...]] = ()
    _largest: int

    def __init__(self, config: Mapping[str, Any], options: ServerOptions) -> None:
        require_supported(config)
        require(config)
        self.starter = f"engine={self.name}"
        self.view, self.own = Config.of(config), options
        self._facts: dict[str, str] = {}
        source = resolve(config["model"], allow_random=False)[1]
        port = options.port or free_port()
        self._kept: KeptServer | None = None
        self._ending = ExitStack()
        with self._ending:
            if options.linger_s:
                key = digest([engine_id(dict(config)), source.fingerprint])
                self._kept = KeptServer(key, port)
                self.folder, port = self._kept.folder, self._kept.port
            else:
                temporary = TemporaryFolder("minivllm-server-")
                self.folder = Path(self._ending.enter_context(temporary))
            command = shlex.join(self.command(source, port))
            print(f"{self.starter}: {command}", flush=True)
            super().__init__(config, self._reached_at(port, command))
            try:
                self._mark()
            except BaseException:
                self.close()
                raise
            self._ending = self._ending.pop_all()
        if self._kept is not None:
            self.info.processes = (self._kept.keeper,)
            self.info.warnings += [FOUND] * self._kept.found
        self.info.max_num_seqs = self.max_num_seqs
        self.info.weights_from = self.weights_from(source)
        self.info.warms_with_others = True

    def _mark(self) -> None:
        """Count from here."""
        self._before, self._began_s = self._page(), time.monotonic()
        self._others_s = 0.0 if self._kept is None else self._kept.others_cpu_s()

    def _reached_at(self, port: int, command: str) -> OpenAIOptions:
        return OpenAIOptions(
            url=f"http://{HOST}:{port}/v1",
            command=command,
            start_timeout_s=self.own.start_timeout_s,
            idle_timeout_s=self.own.idle_timeout_s,
            max_connections=self.own.max_connections,
            extra=dict(self.fields) or None,
            cache_reset=self.reset_path,
        )

    # ---- what an engine says of itself

    @abstractmethod
    def command(self, source: Source, port: int) -> list[str]:
        """The words that start the server at HOST. Raises BadInput for a value of a knob that the
        engine has not."""

    def dummy_weights(self, source: Source) -> dict[str, Any]:
        """Arguments for random weights: SGLang's and vLLM's dummy ones of the same architecture,
        without a tokenizer."""
        if source.weights != "random":
            return {}
        (self.folder / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
        return {"load-format": "dummy", "skip-tokenizer-init": True}

    def kv_dtype(self, known: Mapping[str, str | None], instead: str) -> str | None:
        """The server's own name of `cache.kv_dtype`. Raises BadInput for one that it has not."""
        dtype = self.view["cache"]["kv_dtype"]
        if dtype not in known:
            raise self.unsupported(f"cache.kv_dtype={dtype}", instead)
        return known[dtype]

    def weights_from(self, source: Source) -> Path | None:
        """The folder or file that the server reads weights from."""
        return source.weights_from

    @property
    def max_num_seqs(self) -> int:
        """Most requests that the server runs at once."""
        return int(self.view["batching"].get("max_num_seqs", 1))  # of batching=sequential

    @property
    def prefix_caching(self) -> bool:
        """Whether the server keeps prefixes."""
        return bool(self.view["cache"]["prefix_caching"])

    def unsupported(self, knob: str, instead: str) -> BadInput:
        """The error for a knob's value that the engine has not."""
        return BadInput(f"{knob} is not supported by {self.starter}: {instead}")

    # ---- starting

    def _environment(self) -> dict[str, str]:
        given = {str(name): str(value) for name, value in (self.own.env or {}).items()}
        threads = {"OMP_NUM_THREADS": str(thread_count(self.view["runtime"]))}
        return {**super()._environment(), **threads, **self.environment(), **given}

    def _start(self, words: list[str]) -> StartedProcess:
        if self._kept is None:
            return super()._start(words)
        self._kept.start(words, self._environment(), self.own.linger_s, self.own.suspend)
        return self._kept

    def environment(self) -> dict[str, str]:
        """Variables that the engine needs."""
        return {}

    def _listen(self, line: str) -> None:
        for path, pattern in self.log_facts.items():
            if found := pattern.search(line):
                self._facts[path] = next(filter(None, found.groups()))

    def _models(self) -> dict[str, int | None]:
        """The models of a server that says it is ready."""
        self._client.wait(self._client.ask("GET", self._client.beside("health")))
        return super()._models()

    # ---- measuring

    def _page(self) -> MetricsPage:
        address = self._client.beside("metrics")
        try:
            body = self._client.wait(self._client.ask("GET", address))
            return MetricsPage.parse(body.decode("utf-8", "replace"))
        except (OSError, ServerError) as error:
            raise BadInput(f"{self.starter}: GET {address}: {error}") from None

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        super().submit(request_id, prompt_token_ids, params)
        self._left[request_id] = params.max_tokens or self.info.max_model_len

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """See BenchEngine; the requests are counted that get tokens at once."""
        outputs = super().poll(timeout_s)
        for output in outputs:
            if output.token_ids and output.request_id in self._left:
                self._left[output.request_id] -= len(output.token_ids)
                self._streaming.add(output.request_id)
                self._largest = max(self._largest, len(self._streaming))
            if output.finish_reason is not None or self._left.get(output.request_id, 1) <= 0:
                self._streaming.discard(output.request_id)
                self._left.pop(output.request_id, None)
        return outputs

    def reset(self) -> None:
        """See BenchEngine; the counters of /metrics are read again."""
        super().reset()
        if hasattr(self, "info"):
            self._mark()

    def recount(self) -> None:
        """See PrimedEngine; the counters of /metrics are read again."""
        super().recount()
        self._mark()

    def _empty_cache(self) -> None:
        self._await_rest()
        super()._empty_cache()

    def _await_rest(self) -> None:
        """Wait until the server has noticed that no request is left."""
        deadline = time.monotonic() + REST_S
        while self.busy and time.monotonic() < deadline:
            page = self._page()
            if not any(page.total(name) for name in self.busy):
                return
            time.sleep(LOOK_S)
        if self.busy:
            self.info.warnings.append(UNRESTED)

    def _clear(self) -> None:
        super()._clear()
        self._left: dict[str, int] = {}  # tokens that a request has not got yet
        self._streaming: set[str] = set()  # those of them that have got the first
        self._largest = 0

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """What the server counted since `reset`, and its settings; see BenchEngine."""
        groups, now = super().liveness(), self._page()
        found: dict[str, float | str] = {"batching.largest_batch": float(self._largest)}
        found |= self.settings(now)
        found |= {k: v for k, (m, label) in self.labels.items() if (v := now.label(m, label))}
        counted = {k: now.since(self._before, m) for k, m in self.counters.items()}
        found |= {path: value for path, value in counted.items() if value is not None}
        if self._kept is not None:
            found |= self._idle_use()
            self._kept.read_log(self._listen)
        found |= self._facts
        if "cache.prefix_tokens_reused" not in found:  # an older server: the counts of its answers
            found["cache.prefix_tokens_reused"] = groups["cache"]["cached_prompt_tokens"]
        found |= self.derived(now, self._before, counted)
        for path, value in found.items():
            group, _, name = path.partition(".")
            groups.setdefault(group, {})[name] = value
        return groups

    def _idle_use(self) -> dict[str, float | str]:
        """What servers use that are kept, as shares of a core: this one between measurements, the
        others since `reset`."""
        assert self._kept is not None
        others_s = self._kept.others_cpu_s() - self._others_s
        found: dict[str, float | str] = {
            "engine.others_cpu": max(0.0, others_s) / (time.monotonic() - self._began_s)
        }
        if self._kept.idle_cpu is not None:
            found["engine.idle_cpu"] = self._kept.idle_cpu
        return found

    def settings(self, now: MetricsPage) -> dict[str, float | str]:
        """Further settings of the server, as "group.counter"."""
        return {}

    def derived(
        self, now: MetricsPage, before: MetricsPage, counted: Mapping[str, float | None]
    ) -> dict[str, float | str]:
        """Further counters, as "group.counter", made of others."""
        drafted, accepted = (
            counted.get(f"speculative.{name}") for name in ("draft_tokens", "accepted_tokens")
        )
        acceptance = accepted / drafted if drafted and accepted is not None else None
        rates = {"speculative.acceptance": acceptance}
        hits, queried = (
            counted.get(f"cache.prefix_tokens_{name}") for name in ("reused", "queried")
        )
        rates["cache.prefix_hit_rate"] = hits / queried if queried and hits is not None else None
        waited, count = (now.since(before, f"{self.queue}_{part}") for part in ("sum", "count"))
        rates["engine.queue_ms"] = 1e3 * waited / count if waited is not None and count else None
        return {name: rate for name, rate in rates.items() if rate is not None}

    def close(self) -> None:
        super().close()
        self._ending.close()


def free_port() -> int:
    """A port of this machine that nobody listens on at the time."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def interpreter(python: str | None) -> str:
    """The path of `engine.python`, which `require` has found."""
    return os.path.expanduser(str(python))
