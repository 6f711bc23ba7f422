"""The loader that remembers: the same configurations as Hydra's own, also of files that change."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from minivllm.config import option_files
from minivllm.config.compose import conf_dir
from minivllm.config.loader import OptionLoader, remembering

PlugIn = Callable[[str, str, str], None]


def load(loader: ConfigLoaderImpl, *overrides: str) -> DictConfig:
    return loader.load_configuration("config", list(overrides), RunMode.RUN)


@pytest.fixture
def hydras_own() -> ConfigLoaderImpl:
    option_files.register()
    return ConfigLoaderImpl(create_config_search_path(str(conf_dir())))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("quant=nf4", "cache=none", "batching.max_num_seqs=3"),
        ("preset=chat", "model=qwen3"),
        ("+ablation=leave_one_out", "optimisations=gpu", "hydra/launcher=joblib"),
        ("~tracker", "+workload.more={a: [1, 2]}", "runs_dir='${oc.env:HOME}'"),
    ],
)
def test_it_composes_what_hydra_composes(
    hydras_own: ConfigLoaderImpl, overrides: tuple[str, ...]
) -> None:
    expected = load(hydras_own, *overrides)
    for _ in range(2):  # read, and remembered
        found = load(remembering(hydras_own), *overrides)
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
        assert OmegaConf.is_struct(found) and found.hydra.mode == expected.hydra.mode
        assert OmegaConf.get_type(found.hydra) is OmegaConf.get_type(expected.hydra)


def test_lists_of_options_that_begin_alike_are_merged_once(
    hydras_own: ConfigLoaderImpl, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[Any, bytes] = {}
    for name, empty in (("_merged", {}), ("_begun", begun), ("_last", [])):
        monkeypatch.setattr(f"minivllm.config.loader.{name}", empty)
    uncached = ["quant=int8", "cache=none"]
    lists = (["quant=nf4"], ["quant=int8"], uncached, [*uncached, "workload=chat"])
    for overrides in lists:
        found, expected = (load(one, *overrides) for one in (remembering(hydras_own), hydras_own))
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
    # up to quant, to cache and to workload
    assert len({len(parts) for parts in begun}) == len(begun) == 3


def test_what_is_done_to_one_configuration_is_not_seen_in_the_next(
    hydras_own: ConfigLoaderImpl,
) -> None:
    loader = remembering(hydras_own)
    load(loader, "cache.block_size=8").model.path = "changed"
    after = load(loader)
    assert after == load(hydras_own) and after.model.path != "changed"


def test_a_file_that_changes_is_read_anew(
    hydras_own: ConfigLoaderImpl, plug_in: PlugIn, user_dir: Path
) -> None:
    loader = OptionLoader(create_config_search_path(str(conf_dir())))
    where = f"hydra.searchpath=['file://{user_dir / 'conf'}']"
    for rank in (1, 2, 1):
        plug_in("quant", "mine", f"_target_: my_package.Mine\nrank: {rank}\n")
        assert load(loader, where, "quant=mine").quant.rank == rank
    plug_in("quant", "mine", "defaults: [fp16, _self_]\nrank: 3\n")
    assert load(loader, where, "quant=mine").quant == {
        "rank": 3,
        **load(loader, "quant=fp16").quant,
    }
    plug_in("quant", "mine", "rank: [")
    with pytest.raises(Exception, match="expected the node content"):
        load(loader, where, "quant=mine")
    (user_dir / "conf" / "quant" / "mine.yaml").unlink()
    with pytest.raises(ConfigCompositionException, match="Could not find 'quant/mine'"):
        load(loader, where, "quant=mine")


def test_what_cannot_be_remembered_is_composed_as_by_hydra(
    hydras_own: ConfigLoaderImpl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes of launchers' settings, which Hydra may have imported under a name twice."""

    def refuse(value: object) -> bytes:
        raise pickle.PicklingError("it's not the same object")

    expected = load(hydras_own, "quant=int8")
    loader = remembering(hydras_own)
    load(loader, "quant=int8")  # its option files can be remembered
    monkeypatch.setattr("pickle.dumps", refuse)
    assert load(loader, "quant=int8") == expected
