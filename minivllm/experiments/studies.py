"""Studies: presets with their own sweep in `sweep.params`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from minivllm.config.explain import is_config_error
from minivllm.errors import BadInput
from minivllm.experiments.arms import Load
from minivllm.experiments.plan import Arm, Sweep, product, require_own

Parse = Callable[[list[str]], list[Override]]
Params = Callable[[str], list[dict[str, Any]]]
PRESET = "preset="


def expand(sweep: Sweep, load: Load, parse: Parse) -> Sweep:
    """Replace every arm that chooses a study by the arms of that study.

    A study is a list of products: `sweep.params: [{cache: "paged,none", quant: "bf16,int8"}, ...]`,
    in Hydra's grammar. The command line's values of a key win over the study's. A study that varies
    `preset` is the union of the studies that it names.

    The name of an arm has the study's keys and all other varying ones.

    Args:
        sweep: the sweep of the command line.
        load: composes a configuration from overrides.
        parse: reads overrides in Hydra's grammar.

    Raises:
        BadInput: a study contains itself, or `sweep.params` is no list of products.
    """
    common = set.intersection(*(set(arm.overrides) for arm in sweep.arms))

    @cache  # most arms have the same preset, and composing takes 0.2 s
    def params(preset: str) -> list[dict[str, Any]]:
        # The preset alone, because other overrides may set knobs that only its arms have.
        return _params([preset, *sweep.settings], load)

    arms = (expanded for arm in sweep.arms for expanded in _arms(arm, common, params, parse, ()))
    return Sweep(tuple(dict.fromkeys(arms)), sweep.settings)


def _arms(
    arm: Arm, common: set[str], params: Params, parse: Parse, seen: tuple[str, ...]
) -> Iterator[Arm]:
    """The arms that replace one arm.

    Args:
        arm: of the command line or of an outer study.
        common: overrides of all arms, which names leave out.
        params: reads the products of a preset.
        parse: reads overrides in Hydra's grammar.
        seen: the presets of the outer studies.
    """
    preset = next((text for text in arm.overrides if text.startswith(PRESET)), f"{PRESET}none")
    if preset in seen:
        raise BadInput(f"{preset}: this study contains itself")
    parts = params(preset)
    if not parts:
        yield arm
        return
    varying = {text.partition("=")[0] for text in arm.overrides if text not in common}
    for part in parts:
        union = "preset" in part
        given = [text for text in arm.overrides if not (union and text == preset)]
        study = [f"{key}={value}" for key, value in part.items()]
        require_own(study, "sweep.params")
        for inner in product(parse([*study, *given]), varying | part.keys()).arms:
            if union:
                yield from _arms(inner, common, params, parse, (*seen, preset))
            else:
                yield inner


def _params(overrides: Sequence[str], load: Load) -> list[dict[str, Any]]:
    """The products in `sweep.params` of a preset."""
    try:
        params: Any = OmegaConf.to_container(load(overrides).sweep.params)
    except Exception as error:
        if not is_config_error(error):
            raise
        return []  # composing the arm reports the error
    if not all(isinstance(part, dict) for part in params):
        raise BadInput(
            f"sweep.params={params!r} must be a list of products, e.g. [{{quant: 'bf16,int8'}}]"
        )
    return list(params)
