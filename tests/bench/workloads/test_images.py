"""workload=images: numbers, sizes and reuse as distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from minivllm.bench.workloads.images import Images
from minivllm.bench.workloads.pictures import draw
from minivllm.bench.workloads.workload import turned
from minivllm.errors import BadInput


class FourTokens:
    """A model that has four tokens for each image."""

    image_mark = (9,)

    def expand(self, token_ids: Sequence[int], pictures: Sequence[str]) -> tuple[int, ...]:
        assert list(token_ids).count(9) == len(pictures)
        return tuple(t for token in token_ids for t in ([9] * 4 if token == 9 else [token]))

    def parts(
        self, token_ids: Sequence[int], pictures: Sequence[str]
    ) -> list[tuple[int, ...] | str]:
        return [*pictures, tuple(token for token in token_ids if token != 9)]


def made(seed: int = 0, **knobs: Any) -> Any:
    generator = Images(**{"num_requests": 60, "input_len": 12, **knobs})
    return generator.generate(None, 20, 1000, seed, pictures=FourTokens())


def test_prompts_begin_with_their_pictures_and_go_on_with_text() -> None:
    workload = made(images={"distribution": "uniform", "min": 1, "max": 3})
    counts = [len(request.images) for request in workload.requests]
    assert set(counts) == {1, 2, 3}
    for request, count in zip(workload.requests, counts, strict=True):
        ids = request.prompt_token_ids
        assert ids[: 4 * count] == (9,) * (4 * count) and 9 not in ids[4 * count :]
        assert len(ids) == 4 * count + 12


def test_sizes_are_drawn_and_pictures_are_those_of_their_names() -> None:
    names = [
        r.images[0]
        for r in made(width=64, height={"distribution": "uniform", "min": 8, "max": 9}).requests
    ]
    sizes = {draw(name).size for name in names}
    assert sizes == {(64, 8), (64, 9)} and len(set(names)) == len(names)
    assert draw(names[0]).tobytes() == draw(names[0]).tobytes() != draw(names[1]).tobytes()


@pytest.mark.parametrize(("reuse", "low", "high"), [(0.0, 60, 60), (0.5, 15, 45), (1.0, 1, 1)])
def test_reuse_is_the_chance_of_a_picture_that_came_before(
    reuse: float, low: int, high: int
) -> None:
    names = {request.images[0] for request in made(reuse=reuse).requests}
    assert low <= len(names) <= high


def test_a_workload_is_the_same_for_a_seed_and_another_for_other_pictures() -> None:
    assert made().hash == made().hash != made(seed=1).hash
    assert made().hash != made(width=300).hash  # the tokens are the same


def test_a_model_without_images_is_told() -> None:
    with pytest.raises(BadInput, match="takes no images"):
        Images().generate(None, 20, 1000, 0)


def test_a_warm_up_of_other_prompts_has_other_pictures_of_the_same_sizes() -> None:
    request = made(images=2, width=64, height=8).requests[0]
    other = turned(request, FourTokens())
    assert len(other.images) == 2 and not {*other.images} & {*request.images}
    assert [draw(name).size for name in other.images] == [(64, 8)] * 2
    text = request.prompt_token_ids[8:]
    assert other.prompt_token_ids == (*text[::-1], *[9] * 8)
    plain = replace(request, images=(), prompt_token_ids=(1, 2, 3))
    assert turned(plain, None).prompt_token_ids == (3, 2, 1)
