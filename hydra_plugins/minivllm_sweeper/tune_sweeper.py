"""Hydra's Optuna sweeper in front of minivllm.experiments: each trial is an arm of one sweep."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from hydra_plugins.minivllm_sweeper.plan_sweeper import make_launcher

UNSUPPORTED = ("fresh", "retry")


class TuneSweeper(Sweeper):
    """Measures Optuna's trials as arms of a sweep, and returns their objectives to Optuna.

    Recorded cells are not measured again. The sampler is seeded, so the same search proposes the
    same trials and an interrupted one continues.

    Args:
        sampler: Optuna's sampler with its options.
        params: the search space, knob -> choice(...), range(...) or interval(...).
        options: n_trials and n_jobs, see Hydra's Optuna sweeper.
    """

    def __init__(self, sampler: DictConfig, params: DictConfig, **options: Any) -> None:
        self.sampler = sampler
        self.params = params
        self.options = options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See Hydra's Sweeper.

        Raises:
            BadInput: the plugin of Optuna or of the launcher is not installed, the goal is no
                number of a record, no report can be written, or the sweeper has no such option.
        """
        from minivllm.config.compose import finish
        from minivllm.config.groups import Config
        from minivllm.config.loader import remembering
        from minivllm.errors import BadInput, install
        from minivllm.experiments.ending import require_writable_reports
        from minivllm.experiments.launching import launch
        from minivllm.experiments.search import Search, goal_of

        try:
            from optuna import logging

            from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper
        except ImportError:
            raise BadInput(f"preset=tune needs Optuna: {install('optuna')}") from None
        logging.set_verbosity(30)  # warnings
        self.settings = finish(config)
        self.view = Config.of(self.settings)
        knobs = self.settings["sweep"]
        if unsupported := next((key for key in UNSUPPORTED if knobs[key]), None):
            raise BadInput(
                f"sweep.{unsupported} is not for a search: its trials depend on earlier results"
            )
        for knob in ("n_trials", "n_jobs"):
            if type(count := self.options[knob]) is not int or count < 1:
                raise BadInput(
                    f"hydra.sweeper.{knob}={count!r} must be a whole number of at least 1"
                )
        require_writable_reports(self.settings)
        goal = goal_of(knobs)
        launcher = make_launcher(hydra_context, task_function, config)
        loader = remembering(hydra_context.config_loader)
        self.search = Search(
            goal,
            self.settings,
            load=lambda overrides: loader.load_sweep_config(config, list(overrides)),
            launch=partial(launch, launcher),
        )
        sweeper = OptunaSweeper(
            sampler=_sampler(self.sampler),
            direction=knobs["direction"],
            params=self.params,
            storage=None,
            study_name=None,
            max_failure_rate=0.0,
            search_space=None,
            custom_search_space=None,
            **self.options,
        )
        sweeper.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.optuna: Any = sweeper.sweeper

    def sweep(self, arguments: list[str]) -> None:
        """Run the search, or with sweep.dry_run=true print its plan; the exit code goes to the
        command line."""
        from minivllm.cli import note_exit_code
        from minivllm.experiments.preview import show_search
        from minivllm.platform.folders import TemporaryFolder

        space = _varied(
            [*(f"{knob!s}={choices}" for knob, choices in self.params.items()), *arguments]
        )
        fixed = [text for text in arguments if text.partition("=")[0] not in space]
        texts = [f"{knob}={choices}" for knob, choices in space.items()]
        for text in texts:
            _check_values(text)
        self.search.define(fixed, texts, self.view.sweep.name, self.optuna.n_trials)
        self.optuna.launcher = self
        if self.view.sweep.dry_run:
            with TemporaryFolder("minivllm-search-") as folder:
                pending = self.search.follow(lambda: self._propose(arguments, folder))
            measurements = [m for cell in self.search.cells.values() for m in cell.measurements]
            show_search(self.search.aim, measurements, space, self._trials(), pending)
        else:
            folder = str(Path(self.settings["runs_dir"]) / self.search.name)
            note_exit_code(self.search.run(lambda: self._propose(arguments, folder)))

    def _propose(self, arguments: list[str], folder: str) -> None:
        """Run Optuna's sweeper, which launches its trials and writes its result into the folder."""
        self.optuna.config = config = copy.deepcopy(self.optuna.config)
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = folder
        self.optuna.sweep(arguments)

    def _trials(self) -> str:
        """The number of trials and their sampler in words."""
        knobs = ", ".join(
            f"{key!s}={value}" for key, value in self.sampler.items() if str(key)[0] != "_"
        )
        chosen = f"{self.sampler['_target_'].rpartition('.')[2]}({knobs})"
        repeats = self.view.measure.repeats
        return (
            f"at most {self.optuna.n_trials} trials, {self.optuna.n_jobs} at once, chosen by "
            f"{chosen}; a trial is {repeats} measurement{'' if repeats == 1 else 's'}"
        )

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Stand in for a launcher of Optuna's sweeper: each job returns its objective."""
        values = self.search.measure(job_overrides)
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=value) for value in values]


def _sampler(config: DictConfig) -> Any:
    """Build Optuna's sampler. Raises BadInput for a wrong option."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    from minivllm.errors import BadInput, first_line

    try:
        return instantiate(config)
    except InstantiationException as error:
        raise BadInput(f"hydra.sweeper.sampler: {first_line(error.__cause__ or error)}") from error


def _check_values(text: str) -> None:
    """Raise BadInput unless Optuna can choose from `text`: knob=values."""
    from hydra_plugins.hydra_optuna_sweeper._impl import create_params_from_overrides
    from minivllm.errors import BadInput, first_line

    try:
        create_params_from_overrides([text])
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"{text}: Optuna cannot choose from this: {first_line(error)}") from error


def _varied(overrides: list[str]) -> dict[str, str]:
    """The search space: knob -> its values as written; a fixed knob is not searched."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    space = {one.get_key_element(): str(one.input_line).partition("=")[2] for one in parsed}
    fixed = {one.get_key_element() for one in parsed if not one.is_sweep_override()}
    return {knob: values for knob, values in space.items() if knob not in fixed}
