"""The replicas behind one server: which of them are wanted, which serve, and their sums as of one
engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from minivllm.parallel.options import ParallelOptions
from minivllm.processes.link import EngineLink
from minivllm.processes.messages import EngineState, Ready, ResetPrefixCache, Watch


class Replicas:
    """The replicas by their numbers, which may be taken away and added.

    One that is taken away keeps its number, what it has counted, and the requests that it has; the
    next one that is added has that number.

    Args:
        options: the knobs of `parallel`.
        make: makes the link of a replica with a number.

    Attributes:
        links: of all replicas, with those that are taken away.
        tended: those that are being started, or drained.
    """

    def __init__(self, options: ParallelOptions, make: Callable[[int], EngineLink]) -> None:
        self.num_prefill = options.prefill_replicas if options.disaggregated else 0
        self.links = [make(number) for number in range(options.replicas)]
        self.tended: set[EngineLink] = set()
        self._make = make
        self._watched: EngineLink | None = None

    # ---- which there are

    @property
    def wanted(self) -> list[EngineLink]:
        """Those that are not taken away."""
        return [link for link in self.links if link.is_wanted]

    @property
    def serving(self) -> list[EngineLink]:
        """Those that get new requests."""
        return [link for link in self.links if link.is_wanted and link.is_alive]

    @property
    def can_serve(self) -> bool:
        """Whether a replica serves, where prompts and answers are computed apart one of each
        kind."""
        kinds = [link.number < self.num_prefill for link in self.serving]
        return False in kinds and (True in kinds or not self.num_prefill)

    def states(self) -> dict[str, int]:
        """How many are wanted; how many serve, are started, are drained, and are given up."""
        dead = [link for link in self.wanted if not link.is_alive]
        starting = sum(link in self.tended for link in dead)
        return {
            "replicas": len(self.wanted),
            "serving": len(self.serving),
            "starting": starting,
            "draining": sum(link.is_alive and not link.is_wanted for link in self.links),
            "stopped": len(dead) - starting,
        }

    def resize(self, count: int) -> None:
        """Want so many. First those are no longer wanted that do not serve, then those with the
        highest numbers; of those that computed prompts apart none. First those are wanted again
        that have not ended."""
        wanted = self.wanted
        spare = [link for link in wanted if link.number >= self.num_prefill]
        spare.sort(key=lambda link: (link.is_alive, -link.number))
        for link in spare[: max(0, len(wanted) - count)]:
            link.is_wanted = False
        gone = [link for link in self.links if not link.is_wanted]
        gone.sort(key=lambda link: not link.is_alive)
        for _ in range(count - len(wanted)):
            if gone:
                gone.pop(0).is_wanted = True
            else:
                self.links.append(self._make(len(self.links)))

    def replace(self, dead: EngineLink) -> EngineLink | None:
        """Keep a replica that is being drained in the place of a dead one of its kind; None: there
        is none."""
        for link in self.links:
            same = (link.number < self.num_prefill) == (dead.number < self.num_prefill)
            if same and link.is_alive and not link.is_wanted:
                link.is_wanted, dead.is_wanted = True, False
                return link
        return None

    # ---- as one engine

    @property
    def info(self) -> Ready:
        """What all that are wanted say of themselves, those that are started again with them."""
        ready = [link.ready for link in self.wanted if link.ready is not None]
        return ready[0]._replace(
            max_num_seqs=sum(one.max_num_seqs for one in ready),
            num_blocks=sum(one.num_blocks for one in ready),
            warnings=list(dict.fromkeys(text for one in ready for text in one.warnings)),
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines that live on this machine."""
        return [link.pid for link in self.links if link.pid is not None and link.is_alive]

    @property
    def state(self) -> EngineState:
        """Sums over the replicas that live."""
        states = [link.state for link in self.links if link.is_alive]
        return EngineState(
            sum(state.num_running for state in states),
            sum(state.num_waiting for state in states),
            sum(state.num_used_blocks for state in states),
            None,
        )

    @property
    def counters(self) -> dict[str, float]:
        """Sums over all replicas: counters grow, so those of the dead stay."""
        names = dict.fromkeys(name for link in self.links for name in link.counters)
        return {name: sum(link.counters.get(name, 0.0) for link in self.links) for name in names}

    # ---- watching one of them

    @property
    def watched(self) -> int:
        """The number of the replica that is watched, or would be."""
        link = self._watched
        if link is None or not link.is_alive:
            link = next((one for one in self.links if one.is_alive), self.links[0])
        return link.number

    def watch(self, on: bool, number: int | None = None) -> None:
        """Have a replica send its whole state and what changes, or no more of it: the one that is
        watched already, else the first that lives.

        Args:
            number: watch this one from now on, if it lives.
        """
        before = self._watched
        if number is not None and self.links[number].is_alive:
            self._watched = self.links[number]
        self._watched = link = self.links[self.watched]
        if before is not None and before is not link and before.is_alive:
            before.send(Watch(False))
        if link.is_alive:
            link.send(Watch(on))
        if not on:
            self._watched = None

    def note_gone(self, link: EngineLink) -> None:
        """Note that a replica no longer lives: those who watched it see another one."""
        if link is self._watched and self.serving:
            self.watch(True)


class CacheReset:
    """Asks replicas to empty their prefix caches, and waits for all of them. Those who ask while
    answers are awaited share the result."""

    def __init__(self) -> None:
        self._result: asyncio.Future[bool] | None = None
        self._awaited: set[EngineLink] = set()  # who has not answered yet
        self._all_done = True

    async def run(self, links: Collection[EngineLink]) -> bool:
        """Whether all of these have emptied theirs; one with running requests has not.

        Args:
            links: the replicas that live, at least one.
        """
        if self._result is None or self._result.done():
            self._result = asyncio.get_running_loop().create_future()
            self._all_done, self._awaited = True, set(links)
            for link in links:
                link.send(ResetPrefixCache())
        return await asyncio.shield(self._result)

    def note(self, link: EngineLink, done: bool) -> None:
        """Note what a replica has answered; of one that is gone nobody knows."""
        if link not in self._awaited:
            return
        self._awaited.discard(link)
        self._all_done &= done
        if not self._awaited and self._result is not None and not self._result.done():
            self._result.set_result(self._all_done)
