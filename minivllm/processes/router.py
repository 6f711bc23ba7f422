"""Routing policies: which replica of an engine gets a request. Pure Python: no process, no clock.

A router goes by what it knows itself: the requests that it has given to each replica and that have
not ended, and the prompts that each replica has seen. So the same policy serves processes, actors
and simulated engines.
"""

from __future__ import annotations

import reprlib
import zlib
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minivllm.cache.prefix import TokenSequence, block_keys
from minivllm.errors import BadInput, first_line
from minivllm.parallel.options import NO_PREFIXES, ParallelOptions
from minivllm.platform.plug_ins import make_own


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router may know of a request.

    Args:
        request_id: unique among unfinished requests.
        prompt_token_ids: a list; or any object with a length and slices, as in a simulation, or
            where slices carry the digests of images (`RequestInputs.keyed`).
        max_tokens: of its output; 0 where it has no limit of its own.
        session: the conversation, job or user that it belongs to; None: unknown.
    """

    request_id: str
    prompt_token_ids: TokenSequence
    max_tokens: int = 0
    session: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that a replica may have to compute for it."""
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True)
class CacheShape:
    """The prefix cache of each replica.

    Args:
        block_size: tokens a block.
        num_blocks: that one replica can hold.
    """

    block_size: int
    num_blocks: int


class RoutingFailed(RuntimeError):
    """A router of the user's own does not choose a live replica; the message is one line that
    names its class."""


class Router:
    """Base of the policies: keeps the load of each replica, and who is alive.

    Args:
        num_replicas: how many there are, numbered from 0, all of them alive.

    Attributes:
        alive: the replicas that may be given requests.
        queued: tokens of the unfinished requests of each replica, prompts and outputs at most.
        counters: what the policy did; a policy adds its own.
        given: how many requests each replica got.
        assignment: a checksum of which request went where, whatever the order.
    """

    name: ClassVar[str]

    def __init__(self, num_replicas: int) -> None:
        self.alive = set(range(num_replicas))
        self._in_order = list(range(num_replicas))  # those that are alive
        self.queued = [0] * num_replicas
        self.counters = Counter(requests_rerouted=0)
        self.given = [0] * num_replicas
        self.assignment = 0
        self._at: dict[str, tuple[int, int]] = {}  # replica and tokens of unfinished requests

    def route(self, request: RoutedRequest) -> int:
        """Choose the replica of a request, and note that it has the request from now on.

        Raises:
            RuntimeError: no replica is alive.
            RoutingFailed: a router of the user's own raises an error, or returns no live replica.
        """
        if not self.alive:
            raise RuntimeError("no replica is alive")
        try:
            replica = self.choose(request, self._in_order)
        except Exception as error:
            if type(self).__module__.startswith("minivllm."):
                raise
            raise self._failed(f"raised {type(error).__name__}: {first_line(error)}") from error
        if replica.__class__ is not int or replica not in self.alive:
            raise self._failed(f"returned {reprlib.repr(replica)}")
        self.given[replica] += 1
        place = hash((zlib.crc32(request.request_id.encode()), replica))
        self.assignment = (self.assignment + place) % (1 << 32)
        self.queued[replica] += request.num_tokens
        self._at[request.request_id] = replica, request.num_tokens
        return replica

    def _failed(self, what: str) -> RoutingFailed:
        own = f"{type(self).__module__}.{type(self).__qualname__}"
        live = ", ".join(map(str, self._in_order))
        return RoutingFailed(
            f"parallel.router: choose() of {own} {what}; it must return one of the live replicas, "
            f"an int of {live}"
        )

    def choose(self, request: RoutedRequest, alive: Sequence[int]) -> int:
        """The policy: one of the replicas that are alive, in ascending order and at least one."""
        raise NotImplementedError

    def end(self, request_id: str) -> None:
        """Note that a request has ended; one that is unknown is ignored."""
        if (place := self._at.pop(request_id, None)) is not None:
            replica, tokens = place
            self.queued[replica] -= tokens

    def lose(self, replica: int) -> list[str]:
        """Note that a replica is dead, with what it had cached. Returns its unfinished requests,
        in the order in which it got them, for which the router no longer counts."""
        self.leave(replica)
        orphans = [name for name, (where, _) in self._at.items() if where == replica]
        for name in orphans:
            self.end(name)
        self.counters["requests_rerouted"] += len(orphans) if self.alive else 0
        return orphans

    def leave(self, replica: int) -> None:
        """Give a replica no further requests; those that it has stay with it."""
        self.alive.discard(replica)
        self._in_order = sorted(self.alive)

    def join(self, replica: int) -> None:
        """Give a replica requests from now on that was dead and has nothing cached, or that left
        and lives, or that is the next after the last."""
        while replica >= len(self.given):
            self.add_number()
        self.alive.add(replica)
        self._in_order = sorted(self.alive)

    def add_number(self) -> None:
        """Make room for a further replica; a policy that keeps something for each adds its own."""
        self.queued.append(0)
        self.given.append(0)

    def recount(self) -> None:
        """Count from 0."""
        self.counters = Counter(dict.fromkeys(self.counters, 0))
        self.given = [0] * len(self.given)
        self.assignment = 0

    def report(self) -> dict[str, float | str]:
        """What was counted, for the liveness of a record."""
        return {
            "replicas": float(len(self.given)),
            "requests": " | ".join(map(str, self.given)),
            "assignment": f"{self.assignment:08x}",
            **{name: float(count) for name, count in self.counters.items()},
        }

    def forget_prefixes(self) -> None:
        """Note that the replicas have emptied their prefix caches."""

    def least_loaded(self, among: Collection[int]) -> int:
        """The replica with the fewest queued tokens; of equals the one with the fewest requests so
        far, then the first."""
        queued, given = self.queued, self.given
        least = min([queued[replica] for replica in among])
        equal = [(given[replica], replica) for replica in among if queued[replica] == least]
        return min(equal)[1]


class RoundRobin(Router):
    """One replica after the other, whatever they have to do."""

    name = "round_robin"

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._next = 0

    def choose(self, request: RoutedRequest, alive: Sequence[int]) -> int:
        chosen = alive[bisect_left(alive, self._next) % len(alive)]
        self._next = chosen + 1
        return chosen


class LeastTokens(Router):
    """The replica whose unfinished requests have the fewest tokens."""

    name = "least_tokens"

    def choose(self, request: RoutedRequest, alive: Sequence[int]) -> int:
        return self.least_loaded(alive)


class StickySession(Router):
    """All requests of a session go to one replica, the least loaded at its first request, for as
    long as that replica lives. A request without a session goes to the least loaded replica.

    Args:
        num_replicas: see Router.
        most_sessions: that are remembered; of more the one that was silent longest is forgotten.
    """

    name = "session"

    def __init__(self, num_replicas: int, most_sessions: int = 1 << 20) -> None:
        super().__init__(num_replicas)
        self.counters["session_matches"] = 0
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._most = most_sessions

    def choose(self, request: RoutedRequest, alive: Sequence[int]) -> int:
        if request.session is None:
            return self.least_loaded(alive)
        home = self._homes.get(request.session, -1)
        if home in self.alive:
            self.counters["session_matches"] += 1
        else:
            home = self.least_loaded(alive)
        self._homes[request.session] = home
        self._homes.move_to_end(request.session)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)
        return home


class PrefixAware(Router):
    """The replica whose queue is short and holds much of the prompt: cached tokens against queued
    ones, as NVIDIA Dynamo's router adds up overlap and load. So a long cached prefix outweighs a
    short queue, and a prefix that all prompts share does not send all of them to one replica.

    What a replica holds is remembered here: the hashes of the blocks of the prompts that it was
    sent, as many as it has blocks. The least recently used block is forgotten first, and of
    one prompt the last block, in the order in which the replica's pool evicts.

    Args:
        num_replicas: see Router.
        cache: of each replica.
        load_weight: how many cached tokens a token of an unfinished request outweighs.
    """

    name = "prefix_aware"

    def __init__(self, num_replicas: int, cache: CacheShape, load_weight: float) -> None:
        super().__init__(num_replicas)
        self.counters.update(prefix_matches=0, prefix_tokens_matched=0, overloads_avoided=0)
        self._cache, self._weight = cache, load_weight
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        # The replicas that hold a block, as the bits of a number, by the block's hash; and the bit
        # of each replica.
        self._holders: dict[int, int] = {}
        self._bits = [1 << replica for replica in range(num_replicas)]

    def choose(self, request: RoutedRequest, alive: Sequence[int]) -> int:
        size, weight, queued = self._cache.block_size, self._weight, self.queued
        hashes = block_hashes(request.prompt_token_ids, size)
        held = self._num_held(hashes)
        costs = [weight * queued[replica] - size * held[replica] for replica in alive]
        least = min(costs)
        equal = [replica for replica, cost in zip(alive, costs, strict=True) if cost == least]
        chosen = self.least_loaded(equal)
        self.counters["prefix_matches"] += held[chosen] > 0
        self.counters["prefix_tokens_matched"] += size * held[chosen]
        self.counters["overloads_avoided"] += held[chosen] < max(held)
        self._hold(chosen, hashes)
        return chosen

    def _num_held(self, hashes: Sequence[int]) -> list[int]:
        """How many of a prompt's first blocks each replica holds, a dead one none. All replicas are
        looked up at once: a thousand take hardly longer than ten."""
        groups: list[tuple[int, int]] = []  # replicas, as bits, that hold so many blocks
        left = (1 << len(self._held)) - 1  # that hold all blocks so far
        for depth, name in enumerate(hashes):
            still = left & self._holders.get(name, 0)
            if still != left:
                groups.append((left ^ still, depth))
                left = still
                if not left:
                    break
        groups = sorted([*groups, (left, len(hashes))], key=lambda group: group[0].bit_count())
        counts = [groups.pop()[1]] * len(self._held)  # most replicas hold equally many
        for replicas, depth in groups:
            while replicas:
                lowest = replicas & -replicas
                counts[lowest.bit_length() - 1] = depth
                replicas ^= lowest
        return counts

    def _hold(self, replica: int, hashes: Sequence[int]) -> None:
        held, holders, bit = self._held[replica], self._holders, self._bits[replica]
        for name in reversed(hashes):  # the first block is the most recently used one
            if name in held:
                held.move_to_end(name)
            else:
                held[name] = None
                holders[name] = holders[name] | bit if name in holders else bit
        while len(held) > self._cache.num_blocks:
            self._drop(replica, held.popitem(last=False)[0])

    def _drop(self, replica: int, name: int) -> None:
        """Note that a replica no longer holds a block."""
        self._holders[name] ^= self._bits[replica]
        if not self._holders[name]:
            del self._holders[name]

    def lose(self, replica: int) -> list[str]:
        for name in self._held[replica]:
            self._drop(replica, name)
        self._held[replica].clear()
        return super().lose(replica)

    def add_number(self) -> None:
        super().add_number()
        self._bits.append(1 << len(self._held))
        self._held.append(OrderedDict())

    def forget_prefixes(self) -> None:
        self._holders.clear()
        for held in self._held:
            held.clear()


def block_hashes(token_ids: TokenSequence, block_size: int) -> list[int]:
    """A hash for each full block of a prompt, of its tokens and all before them. The last token is
    left out: a request computes it in any case."""
    hashes: list[int] = []
    parent = 0
    for tokens in block_keys(token_ids, block_size, range((len(token_ids) - 1) // block_size)):
        parent = hash((parent, tokens))
        hashes.append(parent)
    return hashes


SIMPLE = (RoundRobin, LeastTokens, StickySession)
OWN = "no router: derive it from minivllm.processes.router.Router"


def make_router(options: ParallelOptions, cache: CacheShape | None) -> Router:
    """The policy that `parallel.router` names, or of a class of the user's own: over all replicas,
    or with `parallel.disaggregated` over those that compute prompts.

    Args:
        options: of the group `parallel`.
        cache: the prefix cache of each replica; None: replicas cache no prefixes.

    Raises:
        BadInput: the policy goes by cached prefixes and there are none; or a class of the user's
            own is no router.
    """
    replicas = options.prefill_replicas if options.disaggregated else options.replicas
    if isinstance(options.router, dict):
        router: Router = make_own(
            "parallel.router", options.router, Router, OWN, num_replicas=replicas
        )
        if not hasattr(router, "alive"):
            name = options.router["_target_"]
            raise BadInput(f"parallel.router: {name} must call Router.__init__(num_replicas)")
        return router
    for policy in SIMPLE:
        if policy.name == options.router:
            return policy(replicas)
    if cache is None:
        raise BadInput(NO_PREFIXES)
    return PrefixAware(replicas, cache, options.load_weight)
