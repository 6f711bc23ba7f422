"""The two parts of a request whose prompt and answer are computed by different replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.config.compose import compose
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.experiments.preflight import check
from minivllm.parallel.options import ParallelOptions
from minivllm.platform.folders import TemporaryFolder
from minivllm.processes.handover import Handovers, Routing
from minivllm.processes.router import RoutedRequest


def test_both_parts_make_the_whole() -> None:
    handovers = Handovers(2, 5)
    whole = SamplingParams(max_tokens=9, min_tokens=4, temperature=0.5, seed=7)
    first = handovers.split("a", [1, 2, 3], whole, 9)
    assert (first.max_tokens, first.min_tokens, first.seed) == (1, 1, 7)
    rest = handovers.rest("a", "length")
    assert rest is not None and rest.prompt == [1, 2, 3]
    assert (rest.params.max_tokens, rest.params.min_tokens, rest.params.seed) == (8, 3, 7)
    where = [handovers.continues_at(name, [1, 2, 3, 4], rest.params) for name in "abc"]
    assert sorted(where) == [2, 3, 4] and handovers.num_tokens == 12
    handovers.end("a")
    assert handovers.continues_at("d", [1], rest.params) == where[0]
    assert list(handovers.given) == [1 + (number == where[0] - 2) for number in range(3)]


@pytest.mark.parametrize("reason", ["stop", "abort", "shed", None])
def test_what_ends_early_is_not_continued(reason: str | None) -> None:
    handovers = Handovers(1, 2)
    handovers.split("a", [1], SamplingParams(max_tokens=5), 5)
    assert handovers.rest("a", reason) is None and handovers.rest("a", "length") is None
    one = SamplingParams(max_tokens=1)
    assert handovers.split("b", [1], one, 1) is one and handovers.rest("b", "length") is None


@pytest.mark.parametrize(
    "params",
    [{"presence_penalty": 0.5}, {"beam_width": 2}, {"stop": "ab"}, {"bad_words": ("ab",)}],
    ids=lambda params: next(iter(params)),
)
def test_what_is_of_the_whole_answer_is_refused(params: dict[str, Any]) -> None:
    words = rf"decoding\.{next(iter(params))} .*parallel\.disaggregated"
    with pytest.raises(BadInput, match=words):
        Handovers(1, 2).split("a", [1], SamplingParams(**params), 5)
    apart = ["parallel.replicas=2", "parallel.disaggregated=true", "cache.prefix_caching=true"]
    name, value = next(iter(params.items()))
    asked = f"decoding.{name}={list(value) if isinstance(value, tuple) else value}"
    with pytest.raises(BadInput, match=words):  # before anything is loaded
        check(compose([*apart, "decoding=beam" if name == "beam_width" else asked]))


def test_it_is_made_where_it_is_asked_for() -> None:
    assert Routing(ParallelOptions(replicas=4)).handovers is None
    options = ParallelOptions(replicas=4, disaggregated=True, prefill_replicas=3)
    made = Routing(options).handovers
    assert made is not None and made.num_prefill == 3 and len(made.given) == 1
    with pytest.raises(
        BadInput, match=r"prefill_replicas=4 .*parallel\.replicas=4 must be 5 or more"
    ):
        ParallelOptions(replicas=4, disaggregated=True, prefill_replicas=4)


def test_files_end_with_their_requests(tmp_path: Path) -> None:
    folder = TemporaryFolder("files-", str(tmp_path))
    handovers = Handovers(1, 2, folder)

    def files() -> int:
        return len(list(Path(folder.path).iterdir()))

    for name in "abc":
        handovers.received(name, handovers.by(0).give(b"keys"))
    handovers.received("d", b"keys")
    assert handovers.num_files == 3 == files()
    handovers.by(0).give(b"keys")  # of which nobody is told
    handovers.end("a")
    handovers.end("d")
    assert files() == 3
    handovers.lose(0)
    assert files() == 2
    handovers.recount()
    assert handovers.num_files == 0
    handovers.close()
    assert not list(tmp_path.iterdir())
    assert Handovers(1, 2).by(0).folder is None


def test_a_folder_that_is_missing_is_told_before_anything_is_loaded() -> None:
    apart = ["parallel.replicas=2", "parallel.disaggregated=true", "cache.prefix_caching=true"]
    with pytest.raises(BadInput, match=r"parallel\.handover=file.*cache\.offload_dir=/not/there"):
        check(compose([*apart, "parallel.handover=file", "cache.offload_dir=/not/there"]))


def test_replicas_of_each_kind_are_routed_to_by_their_numbers() -> None:
    routing = Routing(ParallelOptions(replicas=4, disaggregated=True, prefill_replicas=2))
    routing.begin(None)
    handovers = routing.handovers
    assert handovers is not None
    for name in "ab":
        assert routing.router.route(RoutedRequest(name, [1, 2], 1)) in (0, 1)
    params = SamplingParams(max_tokens=5)
    place = routing.continues_at("a", [1, 2, 3], params)
    assert place in (2, 3) and sorted(routing.router.queued) == [0, 3]
    assert routing.lose(place) == ["a"] and routing.num_rerouted == 1
    assert handovers.decoders.alive == {3 - place} and routing.router.alive == {0, 1}
    assert handovers.decodes("a", [1, 2, 3], params) == 5 - place
    routing.join(place)
    routing.leave(0)
    assert handovers.decoders.alive == {0, 1} and routing.router.alive == {1}
    counted = routing.report()
    assert counted["replicas"] == 4.0 and counted["tokens_handed_over"] == 3.0
    for name in "ab":
        routing.end(name)
    assert not any([*routing.router.queued, *handovers.decoders.queued])
    routing.recount()
    assert routing.report()["requests"] == "0 | 0 | 0 | 0"


def test_replicas_that_serve_whole_requests_have_one_router() -> None:
    routing = Routing(ParallelOptions(replicas=2))
    routing.begin(None)
    routing.lose(1)
    assert routing.router.alive == {0} and routing.report()["replicas"] == 2.0
    routing.join(1)
    routing.close()
    assert routing.router.alive == {0, 1}
