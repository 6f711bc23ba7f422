"""Composition, validation and building of configurations."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from minivllm.config import compose
from minivllm.errors import BadInput
from minivllm.platform.options import Options

CONF = compose.conf_dir()
OPTION_FILES = sorted(
    (path.parent.name, path.stem)
    for group in compose.GROUPS
    for path in (CONF / group).glob("*.yaml")
)


def listed(group: str) -> str:
    """The options of a group as a message lists them."""
    return ", ".join(name for own, name in OPTION_FILES if own == group)


def with_knob(group: str, knob: str) -> str:
    """The options of a group whose classes have a knob, as a message lists them."""
    found = []
    for name in listed(group).split(", "):
        target = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())["_target_"]
        if knob in {item.name for item in fields(compose.OPTIONS[target])}:
            found.append(f"{group}={name}")
    return ", ".join(found)


# What SamplingParams takes from Python alone.
FROM_PYTHON = {"token_mask"}
# What minivllm passes when it builds an option, beside its knobs.
RUNTIME_ARGUMENTS = {"specs", "kv", "quant", "context", "config", "progress", "transform"}


def needed(group: str, name: str) -> list[str]:
    """Overrides that choose an option, and give it what it cannot do without."""
    further = {
        ("model", "hf"): "model.path=somewhere",
        ("task", "convert"): "task.output=somewhere",
    }
    return [f"{group}={name}", *([further[group, name]] if (group, name) in further else [])]


def test_defaults_compose_into_plain_complete_data() -> None:
    got = compose.compose()
    assert list(got["choices"]) == [*compose.GROUPS, "preset"]
    assert got["choices"]["model"] == "tiny" and got["choices"]["quant"] == "bf16"
    assert got["cache"] == {
        "_target_": "minivllm.cache.paged.PagedCache",
        "block_size": 16,
        "num_blocks": None,
        "memory_fraction": 0.5,
        "prefix_caching": False,
        "swap_space_gb": 4.0,
        "offload_gb": 0.0,
        "offload_disk_gb": 0.0,
        "offload_dir": None,
        "kv_dtype": "auto",
        "eviction": "none",
        "eviction_budget": 1024,
        "eviction_sinks": 4,
        "eviction_window": None,
    }
    assert got["measure"]["slo"] == {"ttft_ms": None, "tpot_ms": None, "e2e_ms": None}
    assert got["sweep"]["fresh"] is False and got["runs_dir"] == "runs"
    assert "hydra" not in got
    assert yaml.safe_load(yaml.safe_dump(got)) == got  # nothing but plain data


@pytest.mark.parametrize(("group", "name"), OPTION_FILES)
def test_option_file_shows_every_knob(group: str, name: str) -> None:
    composed = compose.load(needed(group, name))
    shown = set(composed[group]) - {"_target_"}
    cls = compose.OPTIONS.get(composed[group].get("_target_")) or compose.TARGETLESS.get(group)
    assert cls is not None, "the option's class has no dataclass in an options.py"
    assert shown == {item.name for item in fields(cls)} - FROM_PYTHON
    compose.finish(composed)


@pytest.mark.parametrize("target", sorted(compose.OPTIONS))
def test_options_match_the_constructor(target: str) -> None:
    """A class is its options, or takes them as one object; a function has them as arguments."""
    module, _, attribute = target.rpartition(".")
    factory, cls = getattr(importlib.import_module(module), attribute), compose.OPTIONS[target]
    parameters = inspect.signature(factory).parameters
    knobs = {item.name: item for item in fields(cls)}
    taken = set(parameters) - RUNTIME_ARGUMENTS
    if "options" in taken:
        annotation = str(parameters["options"].annotation)
        # that class, or what it shares with its like
        bases = [base.__name__ for base in cls.__mro__ if base not in (Options, object)]
        assert taken == {"options"} and annotation.removesuffix(" | None") in bases
    elif not target.startswith("minivllm.tasks."):
        assert taken == set(knobs)
        assert not knobs or not isinstance(factory, type) or issubclass(factory, cls), "a copy"
    for name, item in knobs.items():
        if name not in parameters or item.default is MISSING:
            continue
        default = parameters[name].default
        assert default in (inspect.Parameter.empty, item.default), f"{target}: default of {name}"


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONF / "preset").glob("*.yaml")))
def test_presets_compose(preset: str) -> None:
    assert compose.compose([f"preset={preset}"])["choices"]["preset"] == preset


def test_preset_sets_groups_and_the_command_line_wins() -> None:
    preset = compose.compose(["preset=chat"])
    assert preset["choices"]["task"] == "chat" and preset["choices"]["decoding"] == "sample"
    assert preset["decoding"]["max_tokens"] == 1024
    for order in (1, -1):
        explicit = compose.compose(
            ["preset=chat", "decoding=greedy", "decoding.max_tokens=7"][::order]
        )
        assert explicit["choices"]["task"] == "chat"
        assert explicit["decoding"]["temperature"] == 0 and explicit["decoding"]["max_tokens"] == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cache.blok_size=3",
            "cache.blok_size: no such option of cache=paged; did you mean block_size?",
        ),
        (
            "+cache.blok_size=3",
            "cache.blok_size: no such option of cache=paged; did you mean block_size?",
        ),
        (
            "arrival.rate=3",
            "arrival.rate: no such option of arrival=offline; "
            f"{with_knob('arrival', 'rate')} have it",
        ),
        (  # dynamic starts from static
            "batching.group_by_length=true",
            "batching.group_by_length: no such option of batching=continuous; "
            f"{with_knob('batching', 'group_by_length')} have it",
        ),
        (
            "+measure.slo.ttf=3",
            "measure.slo.ttf: no such option of measure.slo; did you mean ttft_ms?",
        ),
        (
            "measure.slo.ttf=3",
            "measure.slo.ttf: no such option of measure.slo; did you mean ttft_ms?",
        ),
        ("quan=nf4", "quan: no such group or setting; did you mean quant?"),
        ("kache.block_size=3", "kache.block_size: no such group or setting; did you mean cache?"),
        ("+nmae=x", "nmae: no such setting; did you mean name?"),
        ("sweep.frsh=true", "sweep.frsh: no such option of sweep; did you mean fresh?"),
        ("quant=nf5", "quant=nf5: no such option; did you mean nf4? (quant: " + listed("quant")),
        (
            "attention=quick",
            f"attention=quick: no such option; choose from {listed('attention')}",
        ),
        ("cache.block_size=0", "cache.block_size=0 must be at least 1"),
        (
            "cache.offload_gb=1",
            "cache.offload_gb=1.0 keeps prefixes, so it needs cache.prefix_caching=true",
        ),
        ("cache.memory_fraction=1.5", "cache.memory_fraction=1.5 must be at most 1"),
        ("cache.memory_fraction=nan", "cache.memory_fraction=nan must be a number"),
        ("cache.block_size=many", "cache.block_size='many' must be a whole number"),
        ("cache.block_size=1.5", "cache.block_size=1.5 must be a whole number"),
        ("cache.num_blocks=true", "cache.num_blocks=true must be a whole number or null"),
        ("batching.chunked_prefill=1", "batching.chunked_prefill=1 must be true or false"),
        ("batching.preemption=swapp", "batching.preemption='swapp' must be recompute"),
        (
            "decoding.temperature=-1",
            "decoding.temperature=-1.0 must be 0 (greedy), or 0.001 or more",
        ),
        ("decoding.stop=[[a]]", "must be a list (each text)"),
        ("measure.slo=3", "measure.slo=3 must be a group of settings"),
        (
            "measure.warmup_requests=some",
            "measure.warmup_requests='some' must be auto or a whole number",
        ),
        ("runtime.device=gpu", "runtime.device='gpu' must be auto, cpu, cuda or cuda:<number>"),
        ("name=../elsewhere", "name='../elsewhere' must be a plain folder name"),
        ("workload.num_requests=0", "workload.num_requests=0 must be at least 1"),
        ("arrival=poisson arrival.rate=0", "arrival.rate=0.0 must be above 0"),
        (
            "arrival=poisson arrival.rate=inf",
            "arrival.rate=inf must be a number; for all requests at the start use arrival=offline",
        ),
        ("cache=5", f"cache=5: no such option; choose from {listed('cache')}"),
        ("cache=null", f"cache=null: no such option; choose from {listed('cache')}"),
        ("quant=4", f"quant=4: no such option; choose from {listed('quant')}"),
        ("quant=[int8,nf4]", "quant: a group takes the name of one option; -m quant=A,B sweeps"),
        ("cache=prefix_caching", "no such option; write cache.prefix_caching=VALUE"),
        ("parallel=tensor", "parallel=tensor: no such option; write parallel.tensor=VALUE"),
        (
            "parallel=2",
            "parallel=2: no such option; settings of parallel are written parallel.NAME=VALUE, and "
            "parallel=none --help lists them",
        ),
        ("runtime=cuda", "settings of runtime are written runtime.NAME=VALUE"),
        ("~cache", "cache=None: choose an option"),
        ("cache._target_=Paged", "cache._target_='Paged': cache=paged must name its class"),
        ("model.path=${nowhere}", "model.path: Interpolation key 'nowhere' not found"),
        ("model.path=???", "model.path is missing: give it a value"),
        (
            "cache.block_size=[1",
            "'cache.block_size=[1' is no override: write KEY=VALUE; what has special",
        ),
        ("foo", "'foo' is no override: write KEY=VALUE; what has special"),
        ("runs=[~/a]", "'runs=[~/a]' is no override: write KEY=VALUE; what has special"),
        (
            "cache.block_size=8,16",
            "cache.block_size=8,16: several values; add -m to sweep over them",
        ),
        ("cache.block_size=range(8,16)", "several values; add -m to sweep over them"),
        (
            "+cache.block_size=8",
            "cache.block_size exists already: write cache.block_size=... without the +",
        ),
        ("hydra.foo=3", "hydra.foo: Hydra has no such setting"),
        ("measure.slo=[1]", "measure.slo=[1]: must be settings, {NAME: VALUE}"),
        ("runs={a:1}", "runs={a:1}: must be a list, [A, B]"),
        (f"quant={'x' * 5000}", "File name too long"),
        ("quant='\0'", "quant=\0: no such option; choose from " + listed("quant")),
        ("quant='\ud800'", r"quant=\ud800: no such option; choose from " + listed("quant")),
        (
            "measure.price.device=1",
            "measure.price.device: no such option of measure.price; did you mean device_hour?",
        ),
    ],
)
def test_bad_input_names_the_key_and_what_to_write(override: str, message: str) -> None:
    with pytest.raises(BadInput) as error:
        compose.compose(override.split(" "))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_two_mistakes_name_one() -> None:
    with pytest.raises(BadInput, match=r"cache\.blok_size.*did you mean block_size"):
        compose.compose(["quant=fp16", "cache.blok_size=3", "quan=nf4"])


def test_misspelt_knob_is_looked_up_in_the_chosen_option() -> None:
    with pytest.raises(
        BadInput, match=r"no such option of cache=contiguous; did you mean num_sequences"
    ):
        compose.compose(["cache=contiguous", "cache.num_sequence=3"])


def test_values_are_converted_only_where_nothing_is_guessed() -> None:
    got = compose.compose(
        ["cache.memory_fraction=1", "name=2024", "decoding.stop=END", "runs=[a,b]"]
    )
    assert got["cache"]["memory_fraction"] == 1.0 and isinstance(
        got["cache"]["memory_fraction"], float
    )
    assert got["name"] == "2024"
    assert got["decoding"]["stop"] == ["END"] and got["runs"] == ["a", "b"]


def test_a_tilde_is_the_home_folder_where_the_shell_left_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    got = compose.compose(["runs_dir='~/a'", "reports_dir='~/b'"])
    assert (got["runs_dir"], got["reports_dir"]) == ("/home/someone/a", "/home/someone/b")


def test_missing_knobs_get_their_defaults() -> None:
    assert compose.compose(["~cache.block_size"])["cache"]["block_size"] == 16


def test_required_knob_is_asked_for() -> None:
    with pytest.raises(BadInput, match=r"model\.path is missing"):
        compose.compose(["model=hf"])


def test_unknown_key_that_a_preset_adds(
    user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    plug_in("preset", "mine", "# @package _global_\ncache:\n  blok_size: 3\n")
    with pytest.raises(
        BadInput, match=r"cache\.blok_size: no such option of cache=paged; did you mean"
    ):
        compose.compose(["preset=mine"], user_dir / "conf")
    plug_in("preset", "mine", "# @package _global_\ncahce:\n  block_size: 3\n")
    with pytest.raises(BadInput, match=r"cahce: no such setting; did you mean cache"):
        compose.compose(["preset=mine"], user_dir / "conf")


def test_broken_option_file_is_one_line(
    user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    plug_in("quant", "mine", "_target_: [unclosed\n")
    with pytest.raises(BadInput):
        compose.compose(["quant=mine"], user_dir / "conf")


def test_missing_config_dir() -> None:
    with pytest.raises(BadInput, match="'/no/such/folder' not found"):
        compose.compose([], "/no/such/folder")


@pytest.mark.parametrize(
    ("group", "option", "source"),
    [
        ("quant", "bits: 3\n", "class Mine:\n    def __init__(self, bits=4): self.bits = bits\n"),
        (
            "workload",
            "topic: sums\n",
            "class Mine:\n    def __init__(self, topic): self.topic = topic\n",
        ),
    ],
)
def test_a_users_class_plugs_in_with_one_file(
    user_dir: Path, plug_in: Callable[[str, str, str], None], group: str, option: str, source: str
) -> None:
    (user_dir / f"my_{group}.py").write_text(source)
    plug_in(group, "mine", f"_target_: my_{group}.Mine\n{option}")
    got = compose.compose([f"{group}=mine"], user_dir / "conf")
    assert got["choices"][group] == "mine"
    built = compose.build(got[group])
    knob, value = next(iter(yaml.safe_load(option).items()))
    assert getattr(built, knob) == value
    with pytest.raises(
        BadInput,
        match=f"{knob}x is set, but my_{group}.Mine takes no such argument; did you mean {knob}",
    ):
        compose.build({"_target_": f"my_{group}.Mine", f"{knob}x": 1})


def test_build_refuses_what_does_not_fit(user_dir: Path) -> None:
    (user_dir / "my_things.py").write_text(
        "import nothing_of_the_kind_is_installed\n",
    )
    (user_dir / "my_class.py").write_text(
        "class Thing:\n    def __init__(self, size): self.size = size\n"
    )
    for node, message in (
        ({"_target_": "no_such_package.Thing"}, "cannot import no_such_package.Thing"),
        ({"_target_": "my_things.Thing"}, "nothing_of_the_kind_is_installed"),
        (
            {"_target_": "my_class.Thin", "size": 1},
            "my_class has no class Thin; did you mean Thing?",
        ),
        ({"_target_": "my_class.Thing"}, "my_class.Thing needs size"),
        ({"_target_": "Thing"}, "must name a class with its package"),
    ):
        with pytest.raises(BadInput, match=message):
            compose.build(node)
    with pytest.raises(
        BadInput, match=r"device is passed by minivllm, but my_class.Thing takes no such"
    ):
        compose.build({"_target_": "my_class.Thing", "size": 1}, device="cpu")
    # What is only offered is left out where it is not taken.
    assert compose.build({"_target_": "my_class.Thing"}, {"size": 3, "progress": print}).size == 3


def test_compose_leaves_a_surrounding_hydra_application_alone() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        before = hydra_compose("config", ["cache=contiguous"])
        assert compose.compose(["cache.block_size=8"])["cache"]["block_size"] == 8
        with pytest.raises(BadInput):
            compose.compose(["cache.block_sise=8"])
        assert hydra_compose("config", ["cache=contiguous"]) == before


def test_finish_takes_what_hydra_composed() -> None:
    cfg = compose.load(["quant=fp16", "name=${oc.env:HOME_OF_NOBODY,fallback}"])
    got = compose.finish(cfg)
    assert got["choices"]["quant"] == "fp16" and got["name"] == "fallback"
    OmegaConf.set_struct(cfg, False)
    assert compose.finish(cfg, {"quant": "other"})["choices"] == {"quant": "other"}


def test_search_path_takes_any_folder_name(tmp_path: Path) -> None:
    odd = tmp_path / "it's, a [folder]"
    (odd / "cache").mkdir(parents=True)
    (odd / "cache" / "mine.yaml").write_text("_target_: mine.Cache\nsize: 1\n")
    got: dict[str, Any] = compose.compose(["cache=mine"], odd)
    assert got["cache"] == {"_target_": "mine.Cache", "size": 1}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("speculative.quant=nf4", "quant@speculative.quant=nf4"),
        ("+speculative.quant.bits=3", "speculative.quant.bits: no such option"),
        ("speculative.quant=null", "model@speculative.model=NAME"),
        ("decoding=beam", "beams choose their tokens together"),
        ("cache=none", "use cache=paged"),
        ("cache.eviction=streaming", "use cache.eviction=none"),
        ("runtime.overlap=true", "use runtime.overlap=false"),
    ],
)
def test_a_draft_that_cannot_be_is_rejected_when_composed(override: str, named: str) -> None:
    with pytest.raises(BadInput, match=re.escape(named)):
        compose.compose(["speculative=draft", override])


@pytest.mark.parametrize("preset", ["chat", "generate", "serve"])
def test_a_checkpoint_may_decide_what_an_answering_task_leaves_open(preset: str) -> None:
    assert compose.finish(compose.load([f"preset={preset}"]))["decoding_given"] == []
    given = compose.finish(compose.load([f"preset={preset}", "decoding.temperature=1"]))
    assert given["decoding_given"] == ["temperature"]


@pytest.mark.parametrize("preset", ["chat", "generate", "serve"])
def test_an_engine_for_benchmarks_answers_nobody(preset: str) -> None:
    with pytest.raises(BadInput, match=f"engine=simulated .* task={preset} answers with"):
        compose.finish(compose.load([f"preset={preset}", "engine=simulated"]))
