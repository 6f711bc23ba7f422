"""Which rows of a step's logits choose tokens, where requests differ in this."""

from __future__ import annotations

from minivllm.engine.request import Request
from minivllm.engine.step import SampledRows, StepPlan


def sampled_rows(plan: StepPlan) -> SampledRows:
    """The rows of the requests that sample: of each the last one, and with drafts one for each
    draft before it.

    Members of joint groups are apart from those that sample by themselves, and each member of a
    group that starts now samples from its leader's logits. A request that asks for the
    log-probabilities of its prompt has logits of all its tokens.
    """
    requests: list[Request] = []
    positions: list[int] = []
    rows: list[int] = []
    joint: dict[Request, int] = {}
    forks: list[tuple[Request, Request, int]] = []
    end = 0
    for part in plan.scheduled:
        request, drafts = part.request, part.num_drafts
        asks = request.params.prompt_logprobs is not None
        end += part.num_tokens if asks else part.samples + drafts
        if part.samples and request.is_joint:
            joint[request] = end - 1
        elif part.samples:
            requests += [request] * (1 + drafts)
            positions += range(part.end - drafts, part.end + 1)
            rows += range(end - 1 - drafts, end)
            forks += [(request, member, end - 1) for member in request.unstarted]
    all_in_order = not forks and rows == list(range(end))
    for _, member, row in forks:
        requests.append(member)
        positions.append(member.num_tokens)
        rows.append(row)
    pairs = tuple((parent, member) for parent, member, _ in forks)
    return SampledRows(requests, positions, None if all_in_order else tuple(rows), pairs, joint)
