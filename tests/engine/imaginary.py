"""An imaginary model and memory: what the scheduler's plans would read and write, checked token by
token."""

from __future__ import annotations

import json
import zlib
from typing import Any

from minivllm.cache.manager import CacheManager
from minivllm.cache.prefix import PrefixNode
from minivllm.cache.spec import CacheLayout
from minivllm.cache.tiers.offload import Finished
from minivllm.engine.batching import BatchingPolicy
from minivllm.engine.events import StepEnded
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Group, Request, RequestState
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.extras.beam import BeamSearch, Hypothesis
from minivllm.extras.observation.observer import StepObserver
from minivllm.extras.scheduling.batching import Sequential
from minivllm.extras.scheduling.scheduler import make_preemption, make_scheduler
from minivllm.report.view.state import ViewState


def continuations(beam: Request) -> list[tuple[float, int]]:
    """An imaginary model's likeliest tokens after those of `beam`."""
    state = zlib.crc32(bytes(beam.token_ids))
    chances = [(-((state >> (6 * token)) % 64) / 16 - token / 1000, token) for token in range(5)]
    return sorted(chances, reverse=True)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


class SlowDisk:
    """A disk that does its jobs when a test says so, and fails if it says so. See `Disk`."""

    backlogged = False

    def __init__(self, host: dict[int, list[tuple[int, int]]]) -> None:
        self.host = host
        self.records: dict[int, list[tuple[int, int]]] = {}
        self.jobs: list[tuple[int, int | None, list[tuple[int, int]]]] = []
        self.finished: list[Finished] = []

    def work(self, count: int | None = None, broken: bool = False) -> None:
        """Do the first `count` jobs, or all. Broken: writes leave the record unreadable, reads
        fail."""
        done, self.jobs = self.jobs[:count], self.jobs[len(self.jobs) if count is None else count :]
        for record, slot, content in done:
            if slot is None:
                self.records.pop(record, None)
                if not broken:
                    self.records[record] = content
            elif not broken and record in self.records:
                self.host[slot] = list(self.records[record])
            failed = broken or (slot is not None and record not in self.records)
            self.finished.append(Finished(record, slot, "broken" if failed else None))

    def poll(self) -> list[Finished]:
        finished, self.finished = self.finished, []
        return finished


def hypotheses(first: Request) -> list[Hypothesis]:
    """What a beam search came to, by its first beam."""
    assert isinstance(first.group, BeamSearch)
    return first.group.hypotheses


class Machine:
    """Carries plans out on positions and token ids in place of keys and values, and samples
    (position mod 5); beams by `continuations`."""

    def __init__(self, policy: BatchingPolicy, layout: CacheLayout) -> None:
        self.clock = Clock()
        size = layout.block_size
        self.blocks = {block: [(-1, -1)] * size for block in range(layout.num_blocks)}
        self.host = {
            slot: [(-1, -1)] * size for slot in range(layout.host_slots + layout.offload_slots)
        }
        self.disk = SlowDisk(self.host)
        self.scheduler = make_scheduler(
            policy,
            CacheManager(layout, self.disk),
            make_preemption(policy.preemption),
            self.clock,
        )
        self.requests: list[Request] = []
        self.view = ViewState()
        self.observer = StepObserver(self.scheduler, self.view.apply)

    def request(
        self,
        prompt: list[int],
        output: int,
        n: int = 1,
        arrival_s: float | None = None,
        **params: object,
    ) -> Request:
        """A request and its further samples, not yet added."""
        made = [
            Request(
                f"{len(self.requests)}.{index}",
                prompt,
                SamplingParams(ignore_eos=True, **params),  # type: ignore[arg-type]
                max_num_tokens=len(prompt) + output,
                seed=index,
                arrival_s=self.clock.time_s if arrival_s is None else arrival_s,
            )
            for index in range(n)
        ]
        if made[0].params.beam_width > 1:
            BeamSearch(made)
        elif n > 1:
            Group(made)
        return made[0]

    def add(self, prompt: list[int], output: int, n: int = 1, **params: object) -> Request:
        """Add a request; raises as the scheduler does."""
        first = self.request(prompt, output, n, **params)  # type: ignore[arg-type]
        self.scheduler.add(first)
        self.requests += [first, *first.unstarted]
        return first

    def add_beams(self, prompt: list[int], output: int, width: int, **params: object) -> Request:
        """Add a beam search, which may also end at token 0; raises as the scheduler does."""
        return self.add(prompt, output, width, beam_width=width, stop_token_ids=(0,), **params)

    def carry_out(self, plan: StepPlan) -> list[Request]:
        """Move, write, check what would be read, and sample. The requests that ended."""
        size = self.scheduler.cache.layout.block_size
        pool = self.scheduler.cache.pool
        self.disk.jobs += [
            (record, None, list(self.host[slot])) for slot, record in plan.transfers.spills
        ]
        saved = [slot for _, slot in plan.transfers.saves]
        assert len(saved) == len(set(saved)), "a slot is written twice, in no order"
        for block, slot in plan.transfers.saves:
            self.host[slot] = list(self.blocks[block])
        for source, target in plan.transfers.copies:
            self.blocks[target] = list(self.blocks[source])
        for slot, block in plan.transfers.loads:
            self.blocks[block] = list(self.host[slot])
        for record, slot in plan.transfers.reads:
            self.host[slot] = [(-2, -2)] * size
            self.disk.jobs.append((record, slot, []))
        for part in plan.scheduled:
            blocks = part.request.cache.block_table.blocks
            for position in range(part.start, part.end):
                index = position - part.request.cache.num_evicted
                block = blocks[index // size]
                assert pool.ref_counts[block] == 1, "a block is written while it is shared"
                self.blocks[block][index % size] = (position, part.request.token_ids[position])
        for part in plan.scheduled:
            held = self.held(part)
            assert all(part.request.token_ids[position] == token for position, token in held), (
                "a request would read another's tokens"
            )
            positions = [position for position, _ in held]
            assert positions == sorted(set(positions)), (
                "a token would be read twice, or out of order"
            )
            assert positions[-part.num_tokens :] == list(range(part.start, part.end))
            assert len(positions) == part.end - part.request.cache.num_evicted
        eviction = self.scheduler.cache.layout.eviction
        if eviction is not None and eviction.scored:
            mass = [
                [
                    float(sum(token for _, token in self.blocks[block]))
                    for block in part.request.cache.block_table.blocks
                ]
                for part in plan.scheduled
            ]
            steps = [
                (p.request.cache, p.request.num_cached_tokens, p.num_tokens) for p in plan.scheduled
            ]
            assert self.scheduler.cache.evictor is not None
            self.scheduler.cache.evictor.observe(steps, mass)
        done = []
        sampling = [part.request for part in plan.scheduled if part.samples]
        for part in plan.scheduled:
            self.scheduler.computed(part)
        searches: dict[BeamSearch, None] = {}
        for beam in sampling:
            if isinstance(beam.group, BeamSearch):
                beam.group.take(beam, continuations(beam), self.scheduler)
                searches[beam.group] = None
        for search in searches:
            if search.ready and not search.advance(self.scheduler):
                self.scheduler.finish(search.beams[0], "stop")
                done.append(search.beams[0])
        for request in sampling:
            if request.is_joint:
                continue
            others = list(request.unstarted)
            for other in others:
                self.scheduler.fork(request, other)
            for one in (request, *others):
                if one.append((one.num_tokens + one.seed) % 5) is not None:
                    self.scheduler.finish(one, "length")
                    done.append(one)
        self.scheduler.events.emit(StepEnded(self.clock(), plan))
        return done

    def held(self, part: ScheduledRequest) -> list[tuple[int, int]]:
        """(position, token) of all that a part of a step reads."""
        blocks = part.request.cache.block_table.blocks
        held = [entry for block in blocks for entry in self.blocks[block]]
        return held[: part.end - part.request.cache.num_evicted]

    def step(self) -> list[Request]:
        """Plan a step and carry it out; time goes on, to where something can be done if nothing is
        now."""
        plan = self.scheduler.plan()
        done = self.carry_out(plan)
        self.disk.work()
        self.clock.time_s += 0.001
        if plan.next_poll_s is not None:
            self.clock.time_s = max(self.clock.time_s, plan.next_poll_s)
        return done

    def run(self, most_steps: int = 10_000) -> list[Request]:
        """Step until all is done; the requests in the order in which they ended."""
        done: list[Request] = []
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished:
                return done
            done += self.step()
        raise AssertionError("requests starve")

    def run_alone(self, prompt: list[int], output: int, width: int) -> list[Hypothesis]:
        """What a beam search comes to, one round after the other and without any cache."""
        first = self.request(prompt, output, width, beam_width=width, stop_token_ids=(0,))
        machine = Machine(Sequential(), CacheLayout(len(prompt) + output, width + 1))
        machine.scheduler.add(first)
        machine.run()
        return hypotheses(first)

    def check(self) -> None:
        """Nothing is lost, leaked or held twice."""
        cache = self.scheduler.cache
        cache.pool.check_integrity(request.cache.block_table for request in self.requests)
        self.check_view()
        held = [slot for request in self.requests for slot in request.cache.host_slots]
        assert len(held) == len(set(held))
        assert len(held) + cache.swap.num_free <= cache.layout.host_slots
        if cache.prefix is not None:
            self.check_tiers()
        known = sorted(r.request_id for r in (*self.scheduler.waiting, *self.scheduler.running))
        unstarted = [r for r in self.requests if r.group is not None and r in r.group.unstarted]
        pending = [
            r.request_id
            for r in unstarted
            if r.group is not None and r.group.leader.state != "done"
        ]
        open_ = sorted(
            r.request_id
            for r in self.requests
            if r.state is not RequestState.DONE and r not in unstarted
        )
        assert known == open_, (known, open_, pending)

    def recorded(self) -> list[Any]:
        """The observer's bundles from now on, as JSON gives them back."""
        bundles: list[Any] = []
        self.observer.close()
        self.observer = StepObserver(
            self.scheduler, lambda bundle: bundles.append(json.loads(json.dumps(bundle)))
        )
        return bundles

    def check_view(self) -> None:
        """What was told of the steps makes up the scheduler's and the cache's own state."""
        self.observer.flush()
        cache, view = self.scheduler.cache, self.view
        waiting = self.scheduler.waiting
        # Beams wait in their first one's place once they are preempted.
        open_ = [
            r
            for r in self.requests
            if r in self.scheduler.running or r in waiting or r.state is RequestState.PREEMPTED
        ]
        actual = {
            r.request_id: (
                r.state.value,
                r.num_tokens,
                r.num_computed_tokens,
                r.cache.block_table.blocks,
            )
            for r in open_
        }
        rebuilt = {
            r.new.request_id: (r.state, r.num_tokens, r.num_computed, r.blocks)
            for r in view.requests.values()
        }
        assert rebuilt == actual
        counts = cache.pool.ref_counts
        assert view.owners() == {block: count for block, count in enumerate(counts) if count}
        assert view.cached.keys() == cache.prefix.by_block.keys()
        assert len(set(view.cached.values())) == len(view.cached)
        assert view.num_used_blocks == cache.pool.num_used
        assert view.num_waiting == len(waiting)

    def check_tiers(self) -> None:
        """What the prefix cache knows of is where it says, and nothing else takes room."""
        cache = self.scheduler.cache
        assert cache.prefix is not None
        held: list[PrefixNode] = []
        size, content = cache.layout.block_size, {}
        parents = [(cache.prefix.root, 0)]
        for parent, start in parents:
            for tokens, node in parent.children.items():
                assert node.parent is parent and node.tokens == tokens
                assert node.block or node.slot is not None or node.record is not None
                content[node] = list(enumerate(tokens, start))  # type: ignore[arg-type]
                if node.block:
                    assert cache.prefix.by_block[node.block] is node
                    assert self.blocks[node.block] == content[node]
                if node.slot is not None:
                    assert self.host[node.slot] == content[node]
                held.append(node)
                parents.append((node, start + size))
        assert sum(node.block > 0 for node in held) == len(cache.prefix.by_block)
        if (tiers := cache.tiers) is None:
            return
        assert tiers.host == {node.slot: node for node in held if node.slot is not None}
        read = [node for node in tiers.reading.values() if node.record is not None]
        assert {*tiers.disk.values(), *read} == {node for node in held if node.record is not None}
        first, most = cache.layout.host_slots, cache.layout.offload_slots
        slots = [*tiers.host, *tiers.reading, *tiers._free_slots]
        assert sorted(slots) == list(range(first, first + len(slots)))
        records = [*tiers.disk, *(node.record for node in read), *tiers._free_records]
        assert sorted(records) == list(range(len(records)))  # type: ignore[type-var]
        assert len(slots) <= most and len(records) <= cache.layout.disk_records
        busy = {record for record, _, _ in self.disk.jobs} | {
            done.record for done in self.disk.finished
        }
        for record, node in tiers.disk.items():
            assert record in busy or self.disk.records[record] == content[node]


def make(policy: BatchingPolicy, blocks: int = 8, block_size: int = 4, **layout: object) -> Machine:
    """A machine whose cache has so many blocks beside the reserved one."""
    return Machine(policy, CacheLayout(block_size, blocks + 1, **layout))  # type: ignore[arg-type]
