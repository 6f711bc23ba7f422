"""Whether Triton's kernels are used. Decided before any import of Triton, which may be missing."""

from __future__ import annotations

import torch

from minivllm.errors import BadInput


def takes_triton(option: str, chosen: str, other: str, device: torch.device) -> bool:
    """Whether a knob with the values auto, triton and `other` selects Triton on a device; auto is
    triton on GPUs that Triton supports.

    Raises:
        BadInput: `chosen` is none of these, or triton where it cannot run; `option` is the knob's
            name.
    """
    if chosen not in ("auto", "triton", other):
        raise BadInput(f"{option}={chosen} must be auto, triton or {other}")
    if chosen == other or (chosen == "auto" and device.type != "cuda"):
        return False
    try:
        from minivllm.kernels.common import check_device

        check_device(f"{option}=triton", device, f"{option}={other}")
    except (ImportError, BadInput) as error:
        if chosen == "auto":
            return False
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            f"{option}=triton needs triton, which does not load ({error}): use {option}={other}"
        ) from None
    return True
