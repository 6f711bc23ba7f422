"""How many tokens each request may draft in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minivllm.engine.request import Request


class DraftLengths:
    """Decides how many tokens requests draft; its arguments may stay unused."""

    def allot(self, requests: Sequence[Request], num_tokens: int) -> Sequence[int]:
        """Most draft tokens of each decoding request of a step that computes `num_tokens` without
        drafts."""
        raise NotImplementedError

    def drafted(self, lengths: Sequence[int], milliseconds: float) -> None:
        """A model took so long to draft so many tokens for each of some requests."""

    def stepped(self, num_tokens: int, has_drafts: bool, milliseconds: float) -> None:
        """A decoding step of so many tokens took so long in all, but for drafting."""

    def note(self, request: Request, length: int, accepted: int) -> None:
        """A draft of `length` tokens was verified, and its first `accepted` are right."""

    def finished(self, request: Request) -> None:
        """Forget a request."""


class FixedLengths(DraftLengths):
    """Every request drafts the same number of tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def allot(self, requests: Sequence[Request], num_tokens: int) -> Sequence[int]:
        return [self.length] * len(requests)


DECAY = 0.9  # of what a request's earlier drafts count, with each draft
PRIOR_DRAFTS = 2.0  # how many draft tokens of its own the rate of all requests counts for
MOST_THRESHOLDS = 4096  # that are remembered
PLAIN_EVERY = 64  # steps with drafts before one without, to compare them with
EXPLORE_EVERY = 32  # steps without drafts before one request drafts all the same
EXPLORING = 0.01  # most of the time of such steps that this draft may take
REMEMBERED = 5  # times of drafting whose median is what it takes


class AdaptiveLengths(DraftLengths):
    """Drafts are as long as they pay: positions of drafts are granted, the likeliest to survive
    first, while they raise the expected tokens per second.

    The draft token at position j of a request survives with probability `rate ** (j + 1)`, where
    `rate` is its measured acceptance, shrunk towards that of all requests. A step that gives B
    tokens and computes N takes `step_ms(N)`; with m draft tokens, of which s survive in
    expectation, it gives B + s in `step_ms(N + m)` and the time to draft. The m that maximises the
    quotient is taken (goodput, as Liu et al. 2024, arXiv:2406.14066, define it). At large batches,
    and on text that proposers do not foresee, it is 0; then one request drafts now and then, so
    that a change is noticed: after `EXPLORE_EVERY` steps, or later where the draft takes more than
    the share `EXPLORING` of their time. Where a model drafts, the first draft is such a one: what
    it takes beside the model's step is not known before.

    Args:
        longest: most tokens of a draft.
        step_ms: milliseconds of a step of so many tokens; those with drafts are scaled by what they
            are found to take beside those without, such as the draws of their rows.
        draft_ms: milliseconds to draft one token for each of so many requests, by the model alone;
            they are scaled to what drafting is found to take.
    """

    def __init__(
        self,
        longest: int,
        step_ms: Callable[[int], float],
        draft_ms: Callable[[int], float],
    ) -> None:
        self.longest, self.step_ms, self.draft_ms = longest, step_ms, draft_ms
        self._of_request: dict[Request, tuple[float, float]] = {}  # draft tokens tried, accepted
        self._of_all = (1.0, 1.0)  # optimistic: the first drafts are made
        self._draft_scales: list[float] = []  # of `draft_ms`, as found last
        # of `step_ms`, without drafts and with them; None: no such step was timed
        self._step_scale: dict[bool, float | None] = {False: None, True: None}
        self._num_verifying = 0  # steps with drafts since the last one without
        self._thresholds: dict[tuple[int, int], float] = {}
        self._idle = 0  # steps without drafts
        self._idle_ms = 0.0  # that they take
        self._turn = 0  # of the requests that explore

    def rate(self, request: Request) -> float:
        """The estimated probability that a draft token of a request is right if those before it
        are."""
        tried, right = self._of_all
        own_tried, own_right = self._of_request.get(request, (0.0, 0.0))
        return (PRIOR_DRAFTS * right / tried + own_right) / (PRIOR_DRAFTS + own_tried)

    def allot(self, requests: Sequence[Request], num_tokens: int) -> Sequence[int]:
        rates = [self.rate(request) for request in requests]
        lengths = [0] * len(rates)
        if self._num_verifying >= (1 if self._step_scale[False] is None else PLAIN_EVERY):
            return lengths
        is_known = bool(self._draft_scales) or self.draft_ms(1) == 0.0
        if is_known and max(rates) >= self._threshold(len(rates), num_tokens):
            lengths = self._best(rates, num_tokens)
        if any(lengths):
            self._idle, self._idle_ms = 0, 0.0
        elif not is_known or self._may_explore(num_tokens):
            self._idle, self._idle_ms = 0, 0.0
            self._turn += 1
            lengths[self._turn % len(lengths)] = self.longest
        return lengths

    def _may_explore(self, num_tokens: int) -> bool:
        """Whether it is time for a draft that is not expected to pay."""
        alone = self.step_ms(num_tokens)
        self._idle += 1
        self._idle_ms += alone
        verification = self._verification() * self.step_ms(num_tokens + self.longest) - alone
        cost = self._draft_scale() * self.longest * self.draft_ms(1) + verification
        return self._idle >= EXPLORE_EVERY and cost <= EXPLORING * self._idle_ms

    def _draft_scale(self) -> float:
        """How much longer drafting takes than the drafting model alone. A median: a model that
        first reads a prompt takes long once."""
        found = sorted(self._draft_scales) or [1.0]
        return found[(len(found) - 1) // 2]

    def _threshold(self, count: int, num_tokens: int) -> float:
        """A rate below which no draft of `count` requests pays: the lowest mean survival at which
        any number of draft tokens would."""
        key = count, num_tokens
        if len(self._thresholds) > MOST_THRESHOLDS:
            self._thresholds.clear()
        if key not in self._thresholds:
            alone = self.step_ms(num_tokens)
            self._thresholds[key] = min(
                count / m * (self.step_ms(num_tokens + m) / alone - 1)
                for m in range(1, count * self.longest + 1)
            )
        return self._thresholds[key]

    def _best(self, rates: Sequence[float], num_tokens: int) -> list[int]:
        """The lengths with the most expected tokens per second."""
        places = sorted(
            (
                (rate ** (position + 1), -position, index)
                for index, rate in enumerate(rates)
                for position in range(self.longest)
            ),
            reverse=True,
        )
        tokens, drafting = float(len(rates)), 0.0
        more, scale = self._verification(), self._draft_scale()
        best = tokens / self.step_ms(num_tokens)
        drafts_at = [0] * self.longest  # requests that draft at each position
        taken = 0
        for count, (survival, minus_position, _) in enumerate(places, 1):
            tokens += survival
            at = drafts_at[-minus_position]
            added = self.draft_ms(at + 1) - (self.draft_ms(at) if at else 0.0)
            drafting += scale * added
            drafts_at[-minus_position] += 1
            goodput = tokens / (more * self.step_ms(num_tokens + count) + drafting)
            if goodput > best:
                best, taken = goodput, count
        lengths = [0] * len(rates)
        for _, _, index in places[:taken]:
            lengths[index] += 1
        return lengths

    def _verification(self) -> float:
        """How much longer a step with drafts takes than one without of as many tokens; at least
        1."""
        plain, verifying = self._step_scale[False], self._step_scale[True]
        return 1.0 if plain is None or verifying is None else max(1.0, verifying / plain)

    def stepped(self, num_tokens: int, has_drafts: bool, milliseconds: float) -> None:
        self._num_verifying = self._num_verifying + 1 if has_drafts else 0
        found, known = milliseconds / self.step_ms(num_tokens), self._step_scale[has_drafts]
        self._step_scale[has_drafts] = found if known is None else _towards(known, found)

    def drafted(self, lengths: Sequence[int], milliseconds: float) -> None:
        depths = range(max(lengths))
        expected = sum(self.draft_ms(sum(n > depth for n in lengths)) for depth in depths)
        if expected > 0:
            found = milliseconds / expected
            self._draft_scales = [*self._draft_scales, found][-REMEMBERED:]

    def note(self, request: Request, length: int, accepted: int) -> None:
        tried = min(accepted + 1, length)  # What follows a wrong token says nothing.
        own_tried, own_right = self._of_request.get(request, (0.0, 0.0))
        self._of_request[request] = DECAY * own_tried + tried, DECAY * own_right + accepted
        all_tried, all_right = self._of_all
        self._of_all = 0.99 * all_tried + tried, 0.99 * all_right + accepted

    def finished(self, request: Request) -> None:
        self._of_request.pop(request, None)


def _towards(known: float, found: float) -> float:
    """A running mean with what was found. One step that first computed a prompt, or recorded a
    graph, says little of others, and counts as twice the mean at most."""
    return known + (1 - DECAY) * (min(found, 2 * known) - known)
