"""Option files hold what an option selects; all else is declared beside the knobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_search_path import SearchPathElement
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError

from minivllm.config import compose
from minivllm.config.option_files import OptionSearchPath, OptionSource, option_class
from minivllm.platform.options import filled

Cli = Callable[..., Any]
PlugIn = Callable[[str, str, str], None]
PAGED = "_target_: minivllm.cache.paged.PagedCache\n"


@pytest.fixture
def source() -> OptionSource:
    return OptionSource("main", f"options://{compose.conf_dir()}")


@pytest.mark.parametrize("group", sorted(compose.GROUPS))
def test_an_option_file_repeats_no_default(group: str) -> None:
    for path in (compose.conf_dir() / group).glob("*.yaml"):
        values = yaml.safe_load(path.read_text()) or {}
        cls = option_class(group, values)
        declared = {} if cls is None else filled(cls, {})
        repeated = {name for name, value in values.items() if value == declared.get(name, ...)}
        # what the option is named after
        assert repeated <= ({"dtype"} if path.stem == "bf16" else set()), path


def test_a_source_reads_files_as_hydra_s_own_does(source: OptionSource) -> None:
    assert source.available() and source.is_group("cache") and not source.is_group("cache/paged")
    assert source.is_config("cache/paged") and not source.is_config("cache")
    assert source.list("cache", None) == ["contiguous", "none", "paged"]
    assert source.list("cache", ObjectType.GROUP) == []
    assert {"cache", "quant"} <= {*source.list("", ObjectType.GROUP)}
    assert source.list("", ObjectType.CONFIG) == ["config", "llm"]
    with pytest.raises(ConfigLoadError, match="not found"):
        source.load_config("cache/nothing")


def test_an_option_has_the_knobs_of_its_class(source: OptionSource) -> None:
    assert source.load_config("cache/paged").config.block_size == 16
    hf = source.load_config("model/hf").config
    assert hf._get_node("path")._is_missing()  # it has no default
    root = source.load_config("config").config
    assert root.runs_dir == "runs" and root.sweep.dry_run is False and root.defaults
    assert "overrides" not in source.load_config("preset/chat").config  # no class
    assert "token_mask" not in source.load_config("decoding/greedy").config  # given from Python


def test_what_a_file_sets_wins_and_its_dictionaries_stay_whole(
    plug_in: PlugIn, user_dir: Path
) -> None:
    length = "input_len: {distribution: normal, mean: 9}"
    plug_in("workload", "mine", f"_target_: minivllm.bench.workloads.synthetic.Chat\n{length}\n")
    plug_in("measure", "mine", "slo: {ttft_ms: 5}\n")
    source = OptionSource("command-line", f"options://{user_dir / 'conf'}")
    workload = source.load_config("workload/mine").config
    assert workload.input_len == {"distribution": "normal", "mean": 9}
    assert workload.output_len.max == 128
    measure = source.load_config("measure/mine").config
    assert measure.slo == {"ttft_ms": 5, "tpot_ms": None, "e2e_ms": None}
    assert measure.repeats == 1


def test_an_option_that_starts_from_another_one_has_its_values(
    plug_in: PlugIn, user_dir: Path
) -> None:
    plug_in("cache", "mine", f"defaults: [contiguous, _self_]\n{PAGED}block_size: 32\n")
    found = compose.load(["cache=mine"], user_dir / "conf").cache
    assert {*found} == {"_target_", "num_sequences", "memory_fraction", "block_size"}


DRAFT = "_target_: minivllm.extras.speculative.proposers.draft.DraftProposer\n"


@pytest.mark.parametrize(
    ("defaults", "quant", "pruning"),
    [
        ("[/quant@quant: int8]", "Int8", None),
        ("[/quant@quant: int8, _self_]", "Int8", None),
        ("[/pruning@pruning: layers, _self_, /quant@quant: int8]", "Int8", "LayerPruning"),
        ("[_self_, /quant@quant: int8, /pruning@pruning: layers]", "Int8", "LayerPruning"),
    ],
)
def test_options_that_a_file_selects_stay_whatever_their_order(
    plug_in: PlugIn, user_dir: Path, defaults: str, quant: str, pruning: str | None
) -> None:
    plug_in("speculative", "mine", f"defaults: {defaults}\n{DRAFT}")
    found = compose.load(["speculative=mine"], user_dir / "conf").speculative
    chosen = [found.get(name) for name in ("quant", "pruning")]
    names = [None if one is None else one["_target_"].split(".")[-1] for one in chosen]
    assert names == [quant, pruning]
    assert found.num_speculative_tokens > 0


def test_an_option_that_names_its_own_package_has_the_knobs(
    plug_in: PlugIn, user_dir: Path
) -> None:
    plug_in("cache", "mine", f"# @package cache\n{PAGED}block_size: 32\n")
    found = compose.load(["cache=mine", "cache.num_blocks=4"], user_dir / "conf").cache
    assert (found.block_size, found.num_blocks) == (32, 4)


def test_a_user_s_option_of_a_class_of_ours_takes_overrides(
    cli: Cli, plug_in: PlugIn, user_dir: Path
) -> None:
    plug_in("cache", "mine", f"# Large blocks.\n{PAGED}block_size: 32\n")
    flag = f"--config-dir={user_dir / 'conf'}"
    shown = cli(flag, "cache=mine", "cache.num_blocks=7", "--cfg=job", "--package=cache").out
    assert "block_size: 32" in shown and "num_blocks: 7" in shown
    assert "Tokens a block." in cli(flag, "cache=mine", "--help").out
    composed = compose.compose(["cache=mine", "cache.num_blocks=7"], user_dir / "conf")
    assert (composed["cache"]["block_size"], composed["cache"]["num_blocks"]) == (32, 7)
    missing = cli("cache=mine")  # another command's folder
    assert missing.code == 2 and "cache=mine: no such option" in missing.err


def test_a_user_s_own_class_has_what_its_file_has(plug_in: PlugIn, user_dir: Path) -> None:
    plug_in("cache", "mine", "_target_: my_package.Mine\nsize: 3\n")
    found = compose.load(["cache=mine"], user_dir / "conf").cache
    assert found == {"_target_": "my_package.Mine", "size": 3}


def test_the_search_path_of_another_program_stays_as_it_is() -> None:
    class Path(list[SearchPathElement]):
        get_path = list[SearchPathElement].copy

    theirs = Path([SearchPathElement("main", "/their/conf")])
    OptionSearchPath().manipulate_search_path(theirs)  # type: ignore[arg-type]
    assert [element.path for element in theirs] == ["/their/conf"]
    ours = Path([SearchPathElement("main", str(compose.conf_dir()))])
    OptionSearchPath().manipulate_search_path(ours)  # type: ignore[arg-type]
    assert [element.path for element in ours] == [f"options://{compose.conf_dir()}"]
