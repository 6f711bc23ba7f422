"""parallel.replicas: engines in processes of their own behind the interface that one engine has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minivllm.bench.hardware.gpu import device_of, replica_gpus
from minivllm.bench.metrics.speculation import SpeculationReport
from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineOutput
from minivllm.engines.engine_pictures import EnginePictures, TakesImages
from minivllm.engines.replicas.merging import (
    Liveness,
    RoutedEngine,
    merged_info,
    merged_liveness,
    merged_speculation,
    merged_steps,
)
from minivllm.engines.replicas.messages import (
    Ask,
    Built,
    Loading,
    NextTokens,
    Outputs,
    Reply,
)
from minivllm.errors import BadInput
from minivllm.extras.vision.pictures import Pictures
from minivllm.parallel.handover import Content
from minivllm.parallel.options import OWN_ENGINE
from minivllm.platform.processes.channel import wait
from minivllm.platform.processes.heartbeat import BEAT_S, SILENT_S
from minivllm.platform.threads import thread_count
from minivllm.processes.group import EngineGroup
from minivllm.processes.handover import Routing
from minivllm.processes.link import PolledLink
from minivllm.processes.messages import Prefix, Submit
from minivllm.processes.router import RoutedRequest
from minivllm.processes.started import LocalProcess

MODULE = "minivllm.engines.replicas.replica"


def make_group(config: Mapping[str, Any]) -> EngineGroup:
    """What starts the replicas of a resolved configuration; see EngineGroup."""

    def start_here(of_one: Mapping[str, Any]) -> LocalProcess:
        threads = thread_count(of_one["runtime"], of_one["parallel"]["tensor"])
        return LocalProcess(MODULE, threads=threads)

    return EngineGroup(config, MODULE, partial(replica_gpus, dict(config)), start_here)


def is_replicated(config: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for several processes of minivllm's own engine."""
    view = Config.of(config)
    return view.parallel.replicas > 1 and view.target("engine") == OWN_ENGINE


class ReplicatedEngine(TakesImages, RoutedEngine):
    """Replicas of engine=minivllm behind one queue, as one engine.

    A measurement in which a replica has died is not that of its configuration, so the first death
    ends it.

    Args:
        config: the resolved configuration of the whole.
        progress: called with how far the weights of the first replica are, as (done, total).
        group: starts the replicas; None: as `parallel.backend` says.

    Raises:
        BadInput: an option cannot serve this model here, or there are too few GPUs.
        MemoryError: a replica has no room for the weights.
        Crashed: a replica has died, or is silent for too long.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        progress: Callable[[int, int], None] | None = None,
        group: EngineGroup | None = None,
    ) -> None:
        view = Config.of(config)
        begin = time.monotonic()
        self._num_ranks = view.parallel.tensor
        self._keep_prefixes = view.measure.prefix_cache == "warm"
        self._progress = progress
        self._outputs: list[EngineOutput] = []  # that poll() has to return yet
        self._open: set[str] = set()  # unfinished requests
        self._sessions: dict[str, str] = {}  # of requests that are to come
        self._links: list[PolledLink] = []
        self._looked_s = begin
        self._driven = DrivingTime()
        self._group = group
        self.routing = Routing(view.parallel, view.tree.get("cache") or {})
        try:
            self._group = group = group or make_group(view.tree)
            self._places, self._backend = group.places, group.name
            for number in range(len(self._places)):
                name, of_one = f"replica {number} of {len(self._places)}", group.config_of(number)
                self._links.append(PolledLink(name, group.start(number), of_one))
            built: list[Built] = [self._answer(link) for link in self._links]
            for link in self._links:
                link.silence.limit_s = SILENT_S
            self.routing.begin(built[0].cache)
        except BaseException:
            self.close()
            raise
        self._prefixes: dict[str, Content] = {}  # of requests whose prompt is computed
        self.tokenizer = built[0].tokenizer
        pictures = Pictures(built[0].processor, self.tokenizer, view.vision)
        self.pictures = EnginePictures.of(pictures)
        self._threads = [one.threads for one in built]
        device = device_of(view.tree, built[0].info.model.get("device"))
        gpus = [
            index for _, _, index in (p["device"].partition(":") for p in self._places) if index
        ]
        self.info = merged_info(
            [one.info for one in built],
            time.monotonic() - begin,
            f"cuda:{','.join(gpus)}" if device.startswith("cuda") and gpus else device,
        )
        self.info.processes = tuple(
            one.started.pid for one in self._links if one.started.host is None
        )
        self.info.unmetered = self._unmetered(device)
        self.info.warnings.append(self._note())

    def _unmetered(self, device: str) -> str | None:
        """Why the energy of the replicas cannot be read here; None: it can."""
        if hosts := self._hosts():
            return f"replicas compute on other machines: {', '.join(hosts)}"
        if device == "cuda":
            return "the cluster of RAY_ADDRESS has chosen the GPUs"
        return None

    def _hosts(self) -> list[str]:
        """Other machines on which replicas run."""
        hosts = [one.started.host for one in self._links]
        return [*dict.fromkeys(host for host in hosts if host is not None)]

    def _note(self) -> str:
        """Where the replicas run, for the record."""
        cores, ranks = [place.get("cores") for place in self._places], self._num_ranks
        where = "" if None in cores else f", pinned to cores {' | '.join(map(str, cores))}"
        if hosts := self._hosts():
            where += f"; on {', '.join(hosts)}, whose memory is not in host_rss_peak"
        each = f"{ranks} ranks each, of " if ranks > 1 else ""
        return (
            f"parallel.replicas={len(self._places)}: {each}{self._threads[0]} thread"
            f"{'s' * (self._threads[0] > 1)} each{where}; there is no roofline, as the steps of "
            "replicas overlap"
        )

    # ---- requests

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """See BenchEngine. A replica that is at rest says at once whether it takes the request;
        one that is rejected later ends with the reason `refused`."""
        session = self._sessions.pop(request_id, None)
        wanted = params.max_tokens or 0
        inputs = None if self.pictures is None else self.pictures.take(request_id, prompt_token_ids)
        handovers = None if inputs is not None else self.routing.handovers
        if handovers is not None:
            most = wanted or self.info.max_model_len - len(prompt_token_ids)
            params = handovers.split(request_id, prompt_token_ids, params, most)
        keyed = prompt_token_ids if inputs is None else inputs.keyed(prompt_token_ids)
        routed = RoutedRequest(request_id, keyed, wanted, session)
        number = self.routing.router.route(routed)
        confirm = not self._open
        hands_over = None
        if handovers is not None and wanted != 1:
            hands_over = handovers.by(number)
        message = Submit(request_id, prompt_token_ids, params, inputs, hands_over, confirm=confirm)
        self._driven.begin()
        link = self._links[number]
        link.channel.send(message)
        self._open.add(request_id)
        if confirm:
            try:
                self._answer(link)
            except BadInput:
                self._forget(request_id)
                raise

    def _forget(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._prefixes.pop(request_id, None)
        super()._forget(request_id)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Wait for the next tokens; see BenchEngine."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = 0.0 if self._outputs else max(0.0, end - time.monotonic())
            self._hear(min(left_s, BEAT_S))
            if self._outputs or not left_s:
                break
        outputs, self._outputs = self._outputs, []
        self._driven.note(sum(len(one.token_ids) for one in outputs))
        return [one if one.finish_reason is None else self._ended(one) for one in outputs]

    def _ended(self, output: EngineOutput) -> EngineOutput:
        """A replica is done with a request: its last output, or the handover."""
        request_id, rest = output.request_id, self._rest(output)
        if rest is None:
            return output
        tokens = [*rest.prompt, *output.token_ids]
        number = self.routing.continues_at(request_id, tokens, rest.params)
        prefix = self._prefixes.pop(request_id, b"")
        message = Submit(request_id, tokens, rest.params, prefix=prefix)
        self._links[number].channel.send(message)
        return replace(output, finish_reason=None)

    def _hear(self, timeout_s: float) -> None:
        """Wait for a message of any replica, and take what has come; see PolledLink for what is
        raised."""
        links = {link.channel: link for link in self._links}
        for channel in wait(list(links), timeout_s):
            for message in links[channel].receive():
                self._take(links[channel], message)
        if (now := time.monotonic()) - self._looked_s >= BEAT_S:
            self._looked_s = now
            for link in self._links:
                link.require_sign()

    def _take(self, link: PolledLink, message: Any) -> None:
        """Take a message of a replica."""
        match message:
            case Outputs(outputs):
                self._outputs += [_dated(one, link.started.ahead_s) for one in outputs]
            case NextTokens(names, tokens):
                self._outputs += [
                    EngineOutput(name, (token,)) for name, token in zip(names, tokens, strict=True)
                ]
            case Prefix(request_id, content):
                self._prefixes[request_id] = content
                assert self.routing.handovers is not None
                self.routing.handovers.received(request_id, content)
            case Loading(done, total):
                if link is self._links[0] and self._progress is not None:
                    self._progress(done, total)
            case Reply(value):
                link.answers.append(value)
            case _:
                link.answers.append(message)

    # ---- calls

    def _answer(self, link: PolledLink) -> Any:
        """What a replica answers, once it does."""
        while not link.answers:
            self._hear(BEAT_S)
        return link.answers.popleft()

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """The result of a method of every replica's engine."""
        for link in self._links:
            link.channel.send(Ask(method, arguments))
        return [self._answer(link) for link in self._links]

    def _end_all(self, method: str) -> None:
        self._ask(method)
        for request_id in list(self._open):
            self._forget(request_id)
        self._outputs.clear()  # what was under way
        self._driven = DrivingTime()
        if method == "reset" and not self._keep_prefixes and self.pictures is not None:
            self.pictures.reset()
        self._count_from_0()

    def steps(self) -> list[dict[str, Any]]:
        """See BenchEngine; each row has the number of its `replica` besides."""
        each = self._ask("steps")
        for link, rows in zip(self._links, each, strict=True):
            for row in rows if link.started.ahead_s else ():
                row["start_s"] += link.started.ahead_s
        return merged_steps(each)

    def speculation(self) -> SpeculationReport | None:
        return merged_speculation(self._ask("speculation"))

    def liveness(self) -> Liveness:
        """See BenchEngine. The group `parallel` has what the router did."""
        cores = [
            f"{one.started.host or ''} {place.get('cores') or place['device']}".strip()
            for one, place in zip(self._links, self._places, strict=True)
        ]
        merged = merged_liveness(self._ask("liveness"), self.routing.handovers)
        merged["parallel"] = {
            **merged.get("parallel", {}),  # of ranks
            **self.routing.report(),
            **self._driven.report(),
            "backend": self._backend,
            "threads": " | ".join(map(str, self._threads)),
            "placed_at": " | ".join(map(str, cores)),
        }
        return merged

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """See LogitsEngine; all replicas give the same, and the first one computes."""
        self._links[0].channel.send(Ask("logits", (token_ids,)))
        logits: NDArray[np.float32] = self._answer(self._links[0])
        return logits

    def close(self) -> None:
        for link in self._links:
            link.channel.close()  # all of them end at once
        while self._links:
            self._links.pop().started.stop()
        if self._group is not None:
            self._group.close()
        self.routing.close()


class DrivingTime:
    """The processor time that this process takes from the first request on, for each token."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._now_s = 0.0
        self._num_tokens = 0

    def begin(self) -> None:
        """Note that a request comes."""
        if self._begun_s is None:
            self._begun_s = time.process_time()

    def note(self, num_tokens: int) -> None:
        """Note tokens that have come."""
        self._num_tokens += num_tokens
        self._now_s = time.process_time()

    def report(self) -> dict[str, float]:
        """Microseconds a token; empty before the first one."""
        if self._begun_s is None or not self._num_tokens:
            return {}
        return {"driver_us": 1e6 * (self._now_s - self._begun_s) / self._num_tokens}


def _dated(output: EngineOutput, ahead_s: float) -> EngineOutput:
    """An output whose time is this machine's."""
    if not ahead_s or output.started_s is None:
        return output
    return replace(output, started_s=output.started_s + ahead_s)
