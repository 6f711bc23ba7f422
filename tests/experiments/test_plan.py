"""From overrides to arms."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from minivllm.bench.records.measurement import DEFAULT_ARM
from minivllm.errors import BadInput
from minivllm.experiments.plan import Sweep, product, require_own


def parse(*overrides: str) -> Sweep:
    return product(OverridesParser.create().parse_overrides(list(overrides)))


def test_product_names_arms_by_what_varies() -> None:
    sweep = parse("model=qwen3", "quant=fp16,nf4", "batching=static,continuous")
    assert [arm.name for arm in sweep.arms] == [
        "batching=static quant=fp16",
        "batching=continuous quant=fp16",
        "batching=static quant=nf4",
        "batching=continuous quant=nf4",
    ]
    assert sweep.arms[2].overrides == ("model=qwen3", "quant=nf4", "batching=static")


def test_hydras_grammar_is_understood() -> None:
    sweep = parse(
        "cache.block_size=range(8,17,8)", "+x='a,b'", "~y", "w=choice(p,q)", "z=[1,2],[3]"
    )
    assert sweep.arms[0].overrides == (
        "cache.block_size=8",
        "+x='a,b'",
        "~y",
        "w=p",
        "z=[1,2]",
    )
    assert len(sweep.arms) == 8


def test_nothing_varies() -> None:
    assert [arm.name for arm in parse("quant=nf4", "model=qwen3").arms] == ["model=qwen3 quant=nf4"]
    assert [arm.name for arm in parse().arms] == [DEFAULT_ARM]
    assert DEFAULT_ARM == "default"  # part of the identity of records that there are


def test_a_key_given_twice_counts_as_given_last_and_equal_arms_are_one() -> None:
    assert [arm.overrides for arm in parse("quant=fp16,nf4", "quant=int8").arms] == [
        ("quant=int8",)
    ]
    assert len(parse("quant=fp16,fp16,nf4").arms) == 2


def test_intervals_are_refused() -> None:
    with pytest.raises(BadInput, match="not an interval"):
        parse("cache.memory_fraction=interval(0,1)")


def test_settings_of_the_sweep_are_not_part_of_its_arms() -> None:
    sweep = parse("quant=fp16,nf4", "sweep.dry_run=true", "sweep.name=mine")
    assert sweep.settings == ("sweep.dry_run=true", "sweep.name=mine")
    assert all("sweep." not in text for arm in sweep.arms for text in arm.overrides)


def test_the_name_does_not_depend_on_how_a_sweep_is_written() -> None:
    usual = parse("model=qwen3", "quant=fp16,nf4", "batching=static,continuous")
    assert (
        usual.hash() == parse("batching=continuous,static", "quant=nf4,fp16", "model=qwen3").hash()
    )
    assert (
        usual.hash()
        == parse(
            "model=qwen3",
            "quant=fp16,nf4",
            "batching=static,continuous",
            "sweep.fresh=true",
            "reports_dir=elsewhere",
        ).hash()
    )
    assert usual.hash() != parse("model=qwen3", "quant=fp16,nf4", "batching=static").hash()
    assert usual.hash() != parse("quant=fp16,nf4", "batching=static,continuous").hash()


def test_the_order_of_overrides_and_neutral_ones_change_no_identity() -> None:
    one = parse("quant=fp16,nf4", "cache.block_size=8,16", "measure.repeats=1")
    other = parse("cache.block_size=8,16", "measure.repeats=2", "quant=fp16,nf4")
    assert one.hash() == other.hash()
    assert {arm.name for arm in one.arms} == {arm.name for arm in other.arms}
    alone = parse("quant=fp16", "measure.repeats=2", "measure.timeout_s=9")
    assert alone.arms[0].name == parse("quant=fp16").arms[0].name


def test_quality_is_more_to_measure_and_so_another_sweep() -> None:
    plain, judged = parse("quant=fp16,nf4"), parse("quant=fp16,nf4", "measure.quality=true")
    assert plain.hash() != judged.hash()
    assert [arm.name for arm in plain.arms] == [arm.name for arm in judged.arms]


@pytest.mark.parametrize(
    "text",
    [
        *("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "sweep.fresh=true", "+sweep.job=1"),
        *("measure.repeats=3", "measure.isolation=run", "runs_dir=elsewhere", "tracker=mlflow"),
        *("~report.open", "optimisations@ablation=gpu"),
    ],
)
def test_what_a_command_has_once_no_arm_has_of_its_own(text: str) -> None:
    with pytest.raises(BadInput, match=r"^here holds .* is a setting of the whole sweep"):
        require_own(["quant=nf4", text], "here")


@pytest.mark.parametrize(
    "text",
    [
        "name=a,b",
        "runs_dir=x,y",
        "measure.repeats=1,2",
        "hydra.verbose=true,false",
        "sweep.fresh=0,1",
    ],
)
def test_what_a_command_has_once_no_plain_sweep_varies(text: str) -> None:
    with pytest.raises(BadInput, match=r"^the sweep holds .* cannot differ .*; give it one value$"):
        parse("quant=bf16,nf4", text)
    one = text.partition(",")[0]
    assert len(parse("quant=bf16,nf4", one).arms) == 2


def test_what_a_cell_is_an_arm_may_have() -> None:
    texts = ["quant=nf4", "measure.prefix_cache=warm", "+engine.env.name=x", "workload=chat"]
    with pytest.raises(BadInput, match=r"^here holds runs_dir=x: "):
        require_own([*texts, "runs_dir=x"], "here")
