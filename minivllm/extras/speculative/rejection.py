"""speculative.verify=rejection: drafts judged by rejection sampling, for comparison.

Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318): a draft x is accepted
with probability min(1, p(x) / q(x)), where the target has the distribution p and the proposer q;
else the token comes from max(0, p - q), normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from minivllm.engine.batch_inputs import SamplingColumns, pack_columns
from minivllm.engine.extension import Extensions
from minivllm.engine.request import Request
from minivllm.engine.sampler import filter_probs
from minivllm.extras.speculative.verification import DraftedRun, uniform
from minivllm.kernels.ranking import largest

VERDICT, DRAW = 1, 2  # salts of random numbers


class Rejection:
    """Rejection sampling; see Verifier.

    Args:
        extensions: for requests whose logits are adjusted.
        draft_logits: the proposer's own logits of each draft token of a request, [vocab] each; none
            where it proposes tokens without probabilities, which then have probability 1.
    """

    needs_logits = True

    def __init__(
        self, extensions: Extensions, draft_logits: Callable[[Request], Sequence[Tensor]]
    ) -> None:
        self._extensions, self._draft_logits = extensions, draft_logits

    def verify(self, run: DraftedRun) -> list[int]:
        request, start, drafts, chosen, logits = run
        assert logits is not None
        own = self._draft_logits(request)
        added: list[int] = []
        for row in range(len(drafts) + 1):
            if chosen[row] < 0:
                return [*added, chosen[row]]
            target = self._probabilities(request, start + row, logits[row])
            draft = drafts[row] if row < len(drafts) else None
            proposed = None
            # Where its logits are not finite, nothing was drawn, see ModelDrafts.
            if draft is not None and row < len(own) and own[row].amax().isfinite():
                proposed = self._probabilities(request, start + row, own[row])
            token, accepted = judge(request.seed, start + row, draft, target, proposed)
            added.append(token)
            if not accepted:
                break
        return added

    def _probabilities(self, request: Request, position: int, logits: Tensor) -> Tensor:
        """What a token is drawn from: float64 [vocab], after penalties, temperature and filters."""
        scores = logits[None].to(torch.float32, copy=True)
        if request.adjusts_logits(position):
            error = request.error
            self._extensions.adjust_logits([request], [position]).apply(scores)
            request.error = error
        if request.params.greedy:
            return functional.one_hot(scores[0].argmax(), scores.shape[1]).double()
        probs = torch.softmax(scores[0].double() / request.params.temperature, -1)
        if request.params.filters:
            columns = SamplingColumns.upload(pack_columns([request], [0], [0]), probs.device)
            ids = largest(scores, scores.shape[1])[1][0]
            kept = filter_probs(probs[ids][None].float(), columns)[0].double()
            probs = torch.zeros_like(probs).index_copy_(0, ids, kept)
        return probs / probs.sum()


def judge(
    seed: int, position: int, draft: int | None, target: Tensor, proposed: Tensor | None
) -> tuple[int, bool]:
    """The token at a position, and whether it is the draft.

    Args:
        seed, position: decide the random numbers.
        draft: the draft token; None: there is none.
        target: float64 [vocab], sums to 1.
        proposed: what the draft was drawn from, float64 [vocab]; None: the draft for certain.
    """
    if draft is not None:
        offered = 1.0 if proposed is None else float(proposed[draft])
        if uniform(seed, position, VERDICT) * offered < float(target[draft]):
            return draft, True
        if proposed is None:
            left = target.clone()
            left[draft] = 0.0
        else:
            left = (target - proposed).clamp_(min=0.0)
        if float(left.sum()) > 0:  # else rounding alone has rejected the draft
            target = left
    total = target.cumsum(0)
    at = uniform(seed, position, DRAW) * float(total[-1])
    return int(torch.searchsorted(total, at, right=True).clamp_(max=len(target) - 1)), False
