"""The knobs of every option, with types, defaults and ranges; free of torch.

Each dataclass describes what one `_target_` of conf/ takes. `minivllm.config.compose` checks a resolved
configuration against them. A class of the user's own has no entry here: it is checked against its
constructor when it is built.
"""

from minivllm.options import arrival, engine, model, serving, tasks, tracker, workload
from minivllm.options.ablation import AblationOptions
from minivllm.options.base import GROUPS, OPTIONS, Options, knob, option
from minivllm.options.measure import MeasureOptions, QualityOptions, RuntimeOptions
from minivllm.options.root import RootOptions

__all__ = [
    "GROUPS",
    "OPTIONS",
    "AblationOptions",
    "MeasureOptions",
    "Options",
    "QualityOptions",
    "RootOptions",
    "RuntimeOptions",
    "arrival",
    "engine",
    "knob",
    "model",
    "option",
    "serving",
    "tasks",
    "tracker",
    "workload",
]
