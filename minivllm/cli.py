"""The command line: composes and checks a configuration, and runs its task; bad input is one line
and exit code 2."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from minivllm import __version__, redaction
from minivllm.config import compose, option_files
from minivllm.config.explain import elsewhere, explain, is_config_error
from minivllm.config.groups import Config
from minivllm.config.overrides import as_overrides, hidden
from minivllm.errors import BadInput, Crashed, NotInstalled

# The files in conf/hydra/launcher have the launchers' own names, so that Hydra checks them against
# the launchers' schemas.
warnings.filterwarnings(
    "ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema"
)

INTERRUPTED = 130
FREE_TEXT = ("task.prompt=", "task.system=", "runtime.cores=")
OUR_SWEEPERS = "hydra_plugins.minivllm_sweeper."
SWEEPER = f"{OUR_SWEEPERS}plan_sweeper.PlanSweeper"
# Mappings that Hydra's own override refuses a new key of.
OPEN = re.compile(r"hydra\.launcher\.additional_parameters(\.[\w-]+)?=")
SHOWING = r"-c(?![ndp])|--cf|-i|--in"  # Hydra's flags that print a configuration
_exit_code = 0
_withheld: list[str] = []


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        0 all well; 1 a cell failed, or a bug; 2 bad input; 130 interrupted; or what the task
        returns.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    with redaction.console(whole=any(re.match(SHOWING, argument) for argument in given)):
        return _main(given, sys.argv[0] if argv is None else "minivllm")


def _main(given: list[str], program: str) -> int:
    saved_argv, saved_mode = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    debug = saved_mode == "1"
    if "--version" in given:  # Hydra's parser would print its own version
        print(f"minivllm {__version__}")
        return 0
    # Hydra's parser takes overrides in one piece, so -m, which may stand among them, goes first.
    given.sort(key=lambda argument: argument not in ("-m", "--multirun"))
    with contextlib.suppress(ValueError):  # outside the main thread the caller handles signals
        signal.signal(signal.SIGTERM, _interrupt)
    # NVML numbers GPUs by bus id; CUDA's default begins with the fastest GPU.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    # Hydra raises exceptions instead of printing them and exiting.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        sys.argv = [program, *_withhold([*map(_verbatim, as_overrides(given))])]
        return _run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_is_gone()
    except BadInput as error:
        return _complain(error, debug)
    except Exception as error:
        if is_config_error(error):
            return _complain(_explained(error, [*sys.argv[1:], *_withheld]), debug)
        if missing := _not_installed(error):
            return _complain(missing, debug)
        traceback.print_exc()
        return 1
    finally:
        sys.argv = saved_argv
        if saved_mode is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = saved_mode


def _reader_is_gone() -> int:
    """Print nothing more once the reader has closed the pipe, as in `... --help | head`; returns
    the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _interrupt(signum: int, frame: object) -> None:
    """Handle SIGTERM like Ctrl-C: the worker ends and the report is built."""
    raise KeyboardInterrupt


def job(cfg: DictConfig) -> int:
    """Run the task of a command, or of one job of a sweep, possibly in another process; for
    Hydra."""
    with redaction.console():
        return _job(cfg)


def _job(cfg: DictConfig) -> int:
    try:
        settings = compose.finish(cfg)
        if Config.of(settings).sweep.plan:
            from minivllm.experiments.plain import settings_of_job

            settings = settings_of_job(settings)
        code = int(compose.build({"_target_": Config.of(settings).target("task")}, config=settings))
    except (BadInput, Crashed) as error:  # of a process that has crashed a traceback says nothing
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, BadInput) else 1
    except BrokenPipeError:
        code = _reader_is_gone()
    except (Exception, SystemExit) as error:
        if _is_of_submitit(error):
            raise
        if isinstance(error, SystemExit):  # a plug-in may exit, which must not end a sweep
            print(f"error: the task called exit({error.code})", file=sys.stderr)
        elif missing := _not_installed(error):
            print(f"error: {missing}", file=sys.stderr)
        else:  # Hydra keeps only the first failure of a sweep
            traceback.print_exc()
        code = 2 if _not_installed(error) else 1
    if code == INTERRUPTED:
        raise KeyboardInterrupt  # ends a whole sweep, not just this job
    note_exit_code(code)
    return code


def _not_installed(error: BaseException) -> NotInstalled | None:
    return NotInstalled.of(error) if isinstance(error, ModuleNotFoundError) else None


def _is_of_submitit(error: BaseException) -> bool:
    """Whether submitit has raised an error: it does so in a job whose time is nearly over, or that
    its scheduler wants to start again, and looks for it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("submitit.")


def sweep_overrides() -> list[str]:
    """The overrides of a sweep that were withheld from Hydra; see `_withhold`."""
    return list(_withheld)


def note_exit_code(code: int) -> None:
    """Set the exit code of the command; the last call wins, which is the sweeper's."""
    global _exit_code
    _exit_code = code


def _run() -> int:
    try:
        os.getcwd()
    except OSError as error:
        raise BadInput(
            f"the working directory is gone ({error.strerror}): change to one that is there"
        ) from None
    note_exit_code(0)
    option_files.register()
    OmegaConf.register_new_resolver("minivllm_help", _help, replace=True)
    OmegaConf.register_new_resolver("minivllm_program", _program, replace=True)
    try:
        hydra.main(config_path=str(compose.conf_dir()), config_name="config", version_base="1.3")(
            job
        )()
    except SystemExit as error:
        # Hydra exits with 0 after --help, and with 1 after an error that it has printed.
        return 2 if error.code == 1 else int(error.code or 0)
    return _exit_code


def _withhold(arguments: list[str]) -> list[str]:
    """The arguments for Hydra; for a sweep of our sweeper only flags and Hydra's own settings.

    Before a sweeper runs, Hydra composes the fixed overrides on the defaults of the varied groups,
    and would reject `-m quant=int8,nf4 quant.skip=[...]` because the default quant has no skip. Our
    sweeper composes every arm by itself, and takes the withheld overrides from `sweep_overrides`.
    Presets, ablations and `runs_dir` go to both: the first two may set Hydra's settings, and
    launchers write their logs below the third.

    Raises:
        BadInput: a flag that Hydra does not have, or a secret that Hydra would store.
    """
    _withheld.clear()
    parser = get_args_parser()
    parser.error = _wrong_flag  # type: ignore[method-assign]
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0].lstrip("-")
        hint = elsewhere(name) or "settings are given as KNOB=VALUE, and --help lists both"
        raise BadInput(f"{unknown[0]}: no such flag; {hint}")
    kept = [
        text
        for text in given.overrides
        if re.match(r"[+~]*hydra|(preset|\+ablation)=[\w-]+$|runs_dir=", text)
    ]
    option_files.also_read(given.config_dir)
    _require_no_stored_secret(given.overrides, kept, bool(given.multirun), given.config_dir)
    if not given.cfg and _ours_to_sweep(kept, bool(given.multirun), given.config_dir):
        _withheld.extend(text for text in given.overrides if text not in kept)
    return [argument for argument in arguments if argument not in _withheld]


def _wrong_flag(message: str) -> NoReturn:
    """In place of the usage that argparse prints."""
    raise BadInput(f"{message.removeprefix('argument ')}; --hydra-help lists the flags")


def _require_no_stored_secret(
    overrides: Sequence[str], kept: Sequence[str], multirun: bool, config_dir: str | None
) -> None:
    """Raise BadInput for a secret in a command whose overrides or configuration Hydra would
    store."""
    secret = next((text for text in overrides if hidden(text) != text), None)
    if secret is None:
        return
    try:
        node = compose.load(kept, config_dir).hydra
    except Exception:  # Hydra reports the error itself
        return
    sweeps = multirun or str(node.mode) == "RunMode.MULTIRUN"
    if sweeps and not node.sweeper["_target_"].startswith(OUR_SWEEPERS):
        why = (
            f"hydra/sweeper={node.runtime.choices['hydra/sweeper']} stores the command in "
            "multirun.yaml"
        )
    elif node.output_subdir is not None:
        why = f"hydra.output_subdir={node.output_subdir} stores the command and the configuration"
    else:
        return
    raise BadInput(
        f"{hidden(secret)}: {why}, secrets too: leave that out, or name an environment variable: "
        "'${oc.env:NAME}'"
    )


def _ours_to_sweep(overrides: Sequence[str], multirun: bool, config_dir: str | None) -> bool:
    """Whether our sweeper runs the command, by its overrides for Hydra, its preset and its
    ablation."""
    if not overrides:
        return multirun
    with contextlib.suppress(Exception):  # Hydra reports the error itself
        node = compose.load(overrides, config_dir).hydra
        return (
            multirun or str(node.mode) == "RunMode.MULTIRUN"
        ) and node.sweeper._target_ == SWEEPER
    return False


def _verbatim(argument: str) -> str:
    """An argument as Hydra's grammar takes it: free text is quoted, so that commas, colons and
    brackets are text, and a setting of an open mapping is added to it."""
    if OPEN.match(argument):
        return f"++{argument}"
    key, equals, text = argument.partition("=")
    quoted = len(text) > 1 and text[0] in "\"'" and text[0] == text[-1]
    if key + equals not in FREE_TEXT or text in ("", "null") or quoted:
        return argument
    escaped = re.sub(
        r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text.replace("${", "\\${")
    )
    return f"{key}='{escaped}'"


def _complain(error: BadInput, debug: bool) -> int:
    if {"-sc", "--shell-completion"} & {*sys.argv} and any(
        argument.startswith("query=") for argument in sys.argv
    ):
        return 2  # a shell completes the command, and would print this amid it
    if debug:  # of Hydra, for full errors
        traceback.print_exc()
    print(f"error: {error}", file=sys.stderr)
    return 2


def _explained(error: Exception, argv: Sequence[str]) -> BadInput:
    """The one-line error for an exception of Hydra."""
    arguments, _ = get_args_parser().parse_known_args(argv)
    return explain(
        error, arguments.overrides, lambda chosen: compose.load(chosen, arguments.config_dir)
    )


def _help(header: str, footer: str) -> str:
    """The text of --help; empty without that flag, since composing any configuration resolves
    it."""
    if not {"--help", "-h"} & {*sys.argv}:
        return ""
    from minivllm.config.option_help import text

    return text(header, footer, [*sys.argv[1:], *_withheld])


def _program() -> str:
    """The command that started this program, for --help."""
    name = os.path.basename(sys.argv[0])
    return {"run.py": "python run.py", "__main__.py": "python -m minivllm"}.get(name, name)
