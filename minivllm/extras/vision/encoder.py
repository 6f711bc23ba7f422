"""The encoder: computes the embeddings of images when a step needs them, and keeps them."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.cache.spec import CachePolicy
from minivllm.engine.batching import BatchingPolicy
from minivllm.engine.request import Request
from minivllm.engine.scheduler import Scheduler, SchedulingRule
from minivllm.engine.step import ScheduledRequest
from minivllm.extras.vision.options import VisionOptions
from minivllm.models.vision.inputs import ProcessedImage
from minivllm.models.vision.processor import ImageProcessor
from minivllm.models.vision.registry import LoadedVision, image_processor
from minivllm.models.vision.tower import EmbeddedRows, VisionTower


class Encoder(SchedulingRule):
    """Runs a tower once for each distinct image, when the tokens of a step reach it, and keeps the
    embeddings by digest: those that running prompts still need, and beside them the most recently
    used ones. As a rule of the scheduler it holds a prompt back before an image that would exceed
    the budget of the step.

    Args:
        tower: makes embeddings.
        processor: of the same model.
        capacity: rows that are kept.
        budget: rows that are computed in a step, but for the first image.
        chunks: whether a prompt may be held back; if not, towers compute what a step needs.
        longest: rows of the largest image that a prompt has room for.

    Attributes:
        counters: images computed and reused (a span of a prompt that needed no tower), rows of
            embeddings that prompts took, milliseconds and operations of towers.
    """

    def __init__(
        self,
        tower: VisionTower,
        processor: ImageProcessor,
        capacity: int,
        budget: int,
        chunks: bool,
        longest: int,
    ) -> None:
        self.tower, self.processor = tower, processor
        self.capacity, self.budget, self.chunks = capacity, budget, chunks
        self.longest = longest
        self.counters = {
            "images_encoded": 0,
            "encoder_cache_hits": 0,
            "image_tokens": 0,
            "encoder_ms": 0.0,
            "encoder_flops": 0.0,
        }
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # the least recently used first
        self._levels = torch.from_numpy(processor.levels).to(tower.device)
        self._needed: dict[bytes, int] = {}  # images that prompts are inside of; their rows
        self._planned: dict[bytes, int] = {}  # of the step that is being planned
        self._alive: set[Request] = set()  # requests with images
        # Events of towers whose time is not read yet, the oldest first.
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.step_ms = self.step_flops = 0.0  # of the step that was launched last

    @property
    def rows(self) -> int:
        """Rows of embeddings that are kept now."""
        return sum(len(rows) for rows in self._kept.values())

    @property
    def most_bytes(self) -> int:
        """Memory that embeddings and the tower's work may take."""
        rows = max(self.capacity, self.budget, self.longest)
        embeddings = rows * self.tower.width * self.tower.dtype.itemsize
        return embeddings + self.tower.working_bytes(self.longest)

    def counts(self) -> dict[str, float]:
        """The counters; waits for the towers that a GPU has not finished."""
        for _, end in self._events:
            end.synchronize()
        self._read_events()
        return {name: float(count) for name, count in self.counters.items()}

    def _read_events(self) -> None:
        """Count the time of the towers that a GPU has finished, and free their events."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self.counters["encoder_ms"] += begin.elapsed_time(end)

    def clear(self) -> None:
        """Forget all embeddings."""
        self._kept.clear()

    def added(self, request: Request) -> None:
        if request.inputs is not None:
            self._alive.add(request)

    def ended(self, request: Request) -> None:
        self._alive.discard(request)

    def before_step(self, scheduler: Scheduler, now: float) -> None:
        """Note which images are still needed, and drop others."""
        self._planned, self._needed = {}, {}
        self.step_ms = self.step_flops = 0.0
        for request in scheduler.running if self._alive else ():
            if (inputs := request.inputs) is None:
                continue
            done = request.num_computed_tokens
            for image, (first, last) in _extents(request).items():
                if first < done < last:
                    self._needed[inputs.images[image].digest] = inputs.images[image].num_tokens
        self._drop()

    def limit(self, request: Request, count: int) -> int:
        """The tokens before the first image that is too much for this step."""
        if request.inputs is None:
            return count
        start = request.num_computed_tokens
        for part in request.inputs.within(start, start + count):
            image = request.inputs.images[part.image]
            if image.digest in self._planned or image.digest in self._kept:
                self._planned.setdefault(image.digest, 0)
            elif self.chunks and not self._has_room(image):
                return part.start - start
            else:
                self._planned[image.digest] = image.num_tokens
        return count

    def _has_room(self, image: ProcessedImage) -> bool:
        """Whether this step's budget, and the memory beside what is needed further, have room for
        one more image; always for the only one."""
        planned = sum(self._planned.values())
        held = sum(rows for digest, rows in self._needed.items() if digest not in self._planned)
        most = max(self.capacity, self.budget)
        fits = planned + image.num_tokens <= self.budget
        return (fits or not planned) and (
            held + planned + image.num_tokens <= most or not held + planned
        )

    def embedded(self, scheduled: Sequence[ScheduledRequest]) -> EmbeddedRows | None:
        """The embeddings that a step carries, and its rotary positions where images change them;
        None where it has neither."""
        wanted: dict[bytes, ProcessedImage] = {}
        places: list[int] = []
        parts: list[tuple[bytes, int, int]] = []
        seen: set[bytes] = set()
        turned, begin, hits = False, 0, 0
        for part in scheduled:
            inputs = part.request.inputs
            for span in () if inputs is None else inputs.within(part.start, part.end):
                assert inputs is not None
                image = inputs.images[span.image]
                wanted[image.digest] = image
                first = begin + span.start - part.start
                places.extend(range(first, first + span.length))
                parts.append((image.digest, span.offset, span.length))
                if span.offset == 0:
                    hits += image.digest in self._kept or image.digest in seen
                    seen.add(image.digest)
            prompt = part.start < part.request.num_prompt_tokens
            turned |= inputs is not None and inputs.positions is not None and prompt
            begin += part.num_tokens
        if not parts and not turned:
            return None
        self.counters["image_tokens"] += len(places)
        self.counters["encoder_cache_hits"] += hits
        self._compute([image for digest, image in wanted.items() if digest not in self._kept])
        device = self.tower.device
        values = [self._kept[digest][first : first + n] for digest, first, n in parts]
        rows = EmbeddedRows(
            torch.tensor(places, dtype=torch.int64, device=device),
            torch.cat(values) if values else torch.empty(0, self.tower.width, device=device),
            _positions(scheduled, begin).to(device) if turned else None,
        )
        for digest in wanted:
            self._kept.move_to_end(digest)
        return rows

    def _compute(self, images: Sequence[ProcessedImage]) -> None:
        """Run the tower for images that are not kept."""
        if not images:
            return
        start, marks = time.perf_counter(), []
        if self.tower.device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
        for image, rows in zip(images, self.tower.encode(images, self._levels), strict=True):
            self._kept[image.digest] = rows
            self.step_flops += self.tower.flops(image)
        self.step_ms += 1e3 * (time.perf_counter() - start)
        if marks:
            marks[1].record()
            self._read_events()  # a server has nobody who reads the counters
            self._events.append((marks[0], marks[1]))
        else:
            self.counters["encoder_ms"] += self.step_ms
        self.counters["images_encoded"] += len(images)
        self.counters["encoder_flops"] += self.step_flops

    def _drop(self) -> None:
        """Forget the least recently used embeddings beyond the capacity, but for those that
        prompts are inside of."""
        excess = self.rows - self.capacity
        for digest in list(self._kept):
            if excess <= 0:
                return
            if digest not in self._needed:
                excess -= len(self._kept.pop(digest))


def _extents(request: Request) -> dict[int, tuple[int, int]]:
    """Where the tokens of each image of a request begin and end."""
    extents: dict[int, tuple[int, int]] = {}
    assert request.inputs is not None
    for span in request.inputs.spans:
        first, _ = extents.get(span.image, (span.start, 0))
        extents[span.image] = first, span.end
    return extents


def _positions(scheduled: Sequence[ScheduledRequest], num_tokens: int) -> Tensor:
    """Rotary positions of a step's tokens in time, height and width, int64 [3, num_tokens]."""
    positions = np.empty((3, num_tokens), np.int64)
    begin = 0
    for part in scheduled:
        inputs, end = part.request.inputs, begin + part.num_tokens
        shift = 0 if inputs is None else inputs.shift
        positions[:, begin:end] = np.arange(part.start + shift, part.end + shift)
        if inputs is not None and inputs.positions is not None:
            own = inputs.positions[:, part.start : part.end]
            positions[:, begin : begin + own.shape[1]] = own
        begin = end
    return torch.from_numpy(positions)


def make_encoder(
    knobs: VisionOptions,
    vision: LoadedVision,
    max_model_len: int,
    policy: BatchingPolicy,
    cache: CachePolicy,
) -> Encoder:
    """What computes the images of a model.

    Raises:
        BadInput: a setting over the checkpoint's image processor is wrong.
    """
    if knobs.processor:
        vision.processor = image_processor(vision.config, vision.folder, knobs.processor)
    return Encoder(
        vision.tower,
        vision.processor,
        knobs.encoder_cache_tokens,
        knobs.max_encoder_tokens or policy.max_num_batched_tokens,
        policy.chunked_prefill and cache.name != "none",
        min(vision.processor.most_tokens, max_model_len),
    )
