"""workload=images: questions about generated pictures."""

from __future__ import annotations

import numpy as np

from minivllm.bench.workloads.generator import Drawn, Reader
from minivllm.bench.workloads.lengths import check_fits
from minivllm.bench.workloads.options import ImagesOptions
from minivllm.bench.workloads.pictures import generated
from minivllm.bench.workloads.prompts import draw_prompts
from minivllm.bench.workloads.synthetic import WORKLOAD_STREAM, Synthetic
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.errors import BadInput
from minivllm.models.load.reserved_ids import runs_of_ids

NO_IMAGES = (
    "workload.{name}: this engine or its model takes no images: use a model that does, such as "
    "model=smolvlm_256m, with engine=minivllm, engine=transformers or a server that is sent "
    "messages (engine=openai engine.api=chat)"
)
IMAGE_ADVICE = (
    "lower workload.images, workload.input_len or the pictures' tokens (vision.processor), or "
    "raise model.max_model_len if it is below the model's own"
)


class Images(Synthetic, ImagesOptions):
    """Prompts that begin with pictures, of drawn sizes and numbers, and go on with text.

    A picture is one that came before, each of those as likely as the others, with the chance
    `reuse`; else it is new.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "images"
    LENGTHS = (*Drawn.LENGTHS, "images", "width", "height")

    def make(self, reader: Reader, seed: int) -> Workload:
        if (pictures := reader.pictures) is None:
            raise BadInput(NO_IMAGES.format(name=self.name))
        self.check_lengths(reader.max_model_len)
        rng = np.random.default_rng([WORKLOAD_STREAM, seed])
        count, lengths = self.count, self.lengths
        inputs, outputs, numbers = (
            lengths[name].sample(rng, count) for name in ("input_len", "output_len", "images")
        )
        mark = pictures.image_mark
        reserved = (*reader.reserved, *runs_of_ids(mark))  # a drawn id may be none of its own
        texts = draw_prompts(inputs, reader.encode, reader.vocab_size, rng, reserved)
        known: list[str] = []
        requests = []
        for i, (text, output_len, number) in enumerate(zip(texts, outputs, numbers, strict=True)):
            names = tuple(self._picture(known, rng) for _ in range(number))
            ids = pictures.expand((*mark * number, *text), names)
            what = f"workload={self.name}: request {i}"
            check_fits(what, len(ids), output_len, reader.max_model_len, IMAGE_ADVICE)
            requests.append(
                WorkloadRequest(
                    *(f"r{i}", ids, output_len, self.ignore_eos, reader.text(ids)), images=names
                )
            )
        return Workload(tuple(requests))

    def _picture(self, known: list[str], rng: np.random.Generator) -> str:
        """A new picture, which is added to the known ones, or one of these."""
        if known and rng.random() < self.reuse:
            return known[int(rng.integers(len(known)))]
        width, height = (self.lengths[name].sample(rng, 1)[0] for name in ("width", "height"))
        known.append(generated(width, height, int(rng.integers(2**31))))
        return known[-1]
