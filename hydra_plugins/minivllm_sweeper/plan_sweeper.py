"""Hydra's sweeper for `-m`: passes the overrides on to minivllm.experiments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from minivllm.config.overrides import without_secrets
from minivllm.errors import BadInput, install

# Package of a launcher -> the extra of minivllm that installs it.
EXTRAS = {
    "hydra_joblib_launcher": "joblib",
    "hydra_ray_launcher": "ray",
    "hydra_submitit_launcher": "slurm",
}
# A plain dictionary, because Hydra runs this file outside sys.modules, where a dataclass cannot
# resolve its types. The settings of the sweep are the configuration's `sweep` node.
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="plan",
    node={"_target_": "hydra_plugins.minivllm_sweeper.plan_sweeper.PlanSweeper"},
    provider="minivllm",
)


def make_launcher(
    hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
) -> Launcher:
    """The configured launcher, on a configuration without secrets, since it may store that.

    Raises:
        BadInput: the launcher's plugin is not installed.
    """
    target = str(config.hydra.launcher["_target_"])
    if target not in Plugins.instance().class_name_to_class:
        extra = EXTRAS.get(target.split(".")[1], "...")
        raise BadInput(
            f"hydra/launcher={config.hydra.runtime.choices['hydra/launcher']}: its plugin is not "
            f"installed; {install(extra)}"
        )
    return Plugins.instance().instantiate_launcher(
        hydra_context=hydra_context, task_function=task_function, config=without_secrets(config)
    )


class PlanSweeper(Sweeper):
    """Turns the overrides of `-m` into a plan, and passes its jobs to the configured launcher."""

    def __init__(self) -> None:
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See Hydra's Sweeper."""
        from minivllm.config.loader import remembering  # every program with Hydra imports this file

        hydra_context.config_loader = remembering(hydra_context.config_loader)
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = make_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep of these overrides; its exit code goes to the command line."""
        from minivllm.cli import note_exit_code, sweep_overrides
        from minivllm.experiments.arms import ablation
        from minivllm.experiments.launching import launch
        from minivllm.experiments.plan import product
        from minivllm.experiments.studies import expand
        from minivllm.experiments.sweep import run_sweep

        assert (
            self.hydra_context is not None and self.config is not None and self.launcher is not None
        )
        loader, master, launcher = self.hydra_context.config_loader, self.config, self.launcher
        parse = OverridesParser.create(config_loader=loader).parse_overrides

        def load(overrides: Sequence[str]) -> DictConfig:
            return loader.load_sweep_config(master, list(overrides))

        overrides = parse([*arguments, *sweep_overrides()])
        sweep = ablation(overrides, load) or expand(product(overrides), load, parse)
        note_exit_code(run_sweep(sweep, load, partial(launch, launcher)))
