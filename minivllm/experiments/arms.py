"""The arms of a sweep that an `+ablation` option describes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from minivllm.analysis.ablation.design import AGAIN, Chosen, Design
from minivllm.analysis.metric import find_metric
from minivllm.config.compose import finish
from minivllm.config.explain import explain, is_config_error
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.experiments.options import AblationOptions
from minivllm.experiments.plan import Arm, Blocks, Sweep, part, require_own

Load = Callable[[Sequence[str]], DictConfig]
GROUP = "ablation"
LIST = "optimisations"
MOST_NAMES = 12  # optimisations in a factorial; with more, even counting its arms takes long


def shuffled(names: Iterable[str], seed: int, block: int) -> list[str]:
    """The arms of one block in measuring order, which depends on the seed and the block alone."""
    order = sorted(names)
    random.Random(f"{seed}/{block}").shuffle(order)
    return order


def compose(overrides: Sequence[str], load: Load) -> dict[str, Any]:
    """Compose and check a configuration. Raises BadInput for a wrong override."""
    try:
        return finish(load(overrides))
    except Exception as error:
        if not is_config_error(error):
            raise
        raise explain(error, overrides, load) from error


def ablation(overrides: Sequence[Override], load: Load) -> Sweep | None:
    """The sweep of an ablation; None if the overrides choose no ablation.

    An arm's overrides are those of the command, the list's baseline, and those of the optimisations
    that are on, in the list's order; a key given twice counts as given last, but what the command
    says of a key wins over the baseline.

    Args:
        overrides: the command's.
        load: composes a configuration from overrides.

    Raises:
        BadInput: the list or the command is wrong, or there would be too many arms.
    """
    if not any(override.get_key_element().lstrip("+") == GROUP for override in overrides):
        return None
    measured, settings = part(overrides)
    given = _last_of_each_key(measured)
    about = [
        text
        for key, text in given.items()
        if key.lstrip("+").partition(".")[0] in (GROUP, LIST, "measure")
    ]
    config = compose([*about, *settings], load)
    view = Config.of(config)
    options, measure = view.ablation, view.measure
    if options.metric is not None:
        find_metric(options.metric, "ablation.metric")
    if measure.isolation != "run":
        raise BadInput(
            f"measure.isolation={measure.isolation}: the blocks of an ablation are shuffled, "
            "which needs run"
        )
    _require_own(options)
    names = options.only or list(options.optimisations)
    entries = {name: entry for name, entry in options.optimisations.items() if name in names}
    design = Design(
        options.design,
        {name: tuple(entry.get("requires", ())) for name, entry in entries.items()},
    )
    _validate_arm_count(design, options.max_arms, measure.repeats)

    def arm(name: str, chosen: Chosen) -> Arm:
        texts = dict([_split(text) for text in options.baseline])
        for key, text in given.items():
            texts.pop(key, None)
            texts[key] = text
        for optimisation, entry in entries.items():
            for key, text in map(_split, entry["overrides"] if optimisation in chosen else ()):
                texts.pop(key, None)
                texts[key] = text
        return Arm(name, tuple(texts.values()), tuple(n for n in design.names if n in chosen))

    arms = [arm(design.label(chosen), chosen) for chosen in design.arms]
    arms.insert(1, arm(AGAIN, design.baseline))
    lossless = tuple(name for name, entry in entries.items() if entry.get("lossless"))
    return Sweep(
        tuple(arms), tuple(settings), Blocks(design, options.metric, measure.seed, lossless)
    )


def _require_own(options: AblationOptions) -> None:
    """Raise BadInput for an override in the list that is a setting of the sweep."""
    require_own(options.baseline, "ablation.baseline")
    for name, entry in options.optimisations.items():
        require_own(entry["overrides"], f"ablation.optimisations.{name}.overrides")


def _last_of_each_key(measured: Iterable[tuple[Override, str, str]]) -> dict[str, str]:
    """The text of the last override of each key, in that order. Raises BadInput for a sweep."""
    given: dict[str, str] = {}
    for override, key, text in measured:
        if override.is_sweep_override():
            raise BadInput(
                f"{text}: an ablation varies its own optimisations only; run one for each value"
            )
        given.pop(key, None)
        given[key] = text
    return given


def _split(text: str) -> tuple[str, str]:
    return text.partition("=")[0], text


def _validate_arm_count(design: Design, limit: int, repeats: int) -> None:
    """Raise BadInput for more arms than `ablation.max_arms`."""
    k = len(design.names)
    known = design.kind != "factorial" or k <= MOST_NAMES
    arms = len(design.arms) + 1 if known else 2**k
    if arms > limit:
        raise BadInput(
            f"ablation.design={design.kind} over {k} optimisations has "
            f"{'' if known else 'up to '}{arms:,} arms, {arms * repeats:,} measurements in "
            f"{repeats} blocks, and ablation.max_arms={limit}: name fewer in "
            "ablation.only=[...], use +ablation=pairs or leave_one_out, or raise "
            "ablation.max_arms"
        )
