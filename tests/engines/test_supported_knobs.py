"""Every knob is supported by an engine or refused by name; docs/guides/peers.md says what each peer
supports, in the words of the tables that refuse the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from minivllm.config.compose import OPTIONS, compose
from minivllm.config.groups import GROUPS, HARNESS, Config
from minivllm.config.support import support_of
from minivllm.engines.simulated.engine import SimulatedEngine
from minivllm.engines.simulated.options import SimulatedOptions
from minivllm.engines.supported_knobs import (
    defaults,
    degrees,
    require_supported,
)
from minivllm.errors import BadInput
from minivllm.platform.options import default_of, type_hints
from minivllm.platform.support import ALL, ENGINE_GROUPS, EngineOptions, Knobs, Support

CONF = Path(__file__).parents[2] / "conf"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "peers.md"
OURS = ("minivllm", "simulated")
# Supported knobs by engine, then group.
ENGINES = {
    cls.support.engine.removeprefix("engine="): cls.support.knobs
    for cls in OPTIONS.values()
    if issubclass(cls, EngineOptions)
}
ROOFLINE = ("engine.bandwidth_gb_s=20", "engine.tflops=1")
PEERS = {name: knobs for name, knobs in ENGINES.items() if name not in OURS}


def table() -> str:
    groups = dict.fromkeys(group for knobs in PEERS.values() for group in knobs)
    lines = [
        f"| | every peer | {' | '.join(f'`{name}`' for name in PEERS)} |",
        "| --- " * (len(PEERS) + 2) + "|",
    ]
    for group in groups:
        of_peers = [peer[group].names if group in peer else () for peer in PEERS.values()]
        assert ALL not in of_peers
        common = [name for name in of_peers[0] if all(name in names for names in of_peers)]
        rest = [[name for name in names if name not in common] for names in of_peers]
        cells = (", ".join(f"`{name}`" for name in names) for names in (common, *rest))
        lines.append(f"| `{group}` | {' | '.join(cell or '–' for cell in cells)} |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    shown = re.search(
        r"<!-- supported -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.S
    )
    assert shown is not None and shown[1].strip() == table(), f"put this there:\n{table()}"


def test_every_table_names_knobs_that_exist() -> None:
    standard = defaults()
    for engine, groups in ENGINES.items():
        for group, knobs in groups.items():
            targets = options_of(group) if knobs.targets == ALL else knobs.targets
            known = {*standard[group], *(n for t in targets for n in type_hints(OPTIONS[t]))}
            assert knobs.names == ALL or set(knobs.names) <= known, (engine, group)


def options_of(group: str) -> list[str]:
    """The `_target_`s of a group; none where its option names no class."""
    files = sorted((CONF / group).glob("*.yaml"))
    found = (re.search(r"^_target_: (\S+)", file.read_text(), re.M) for file in files)
    return list(dict.fromkeys(match[1] for match in found if match))


def test_every_group_is_of_the_engine_or_of_the_harness() -> None:
    assert {*ENGINE_GROUPS, *HARNESS} == {*GROUPS} and not {*ENGINE_GROUPS} & {*HARNESS}


def every_knob() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each knob of each option of an engine's groups, away from its default: group, knob (""
    for the option itself) and node."""
    for group in ENGINE_GROUPS:
        standard = knobs_of(defaults()[group])
        for target in options_of(group) or [""]:
            node = {"_target_": target} if target else {}
            node |= usual_knobs(target) if target in OPTIONS else standard
            if target and target != defaults()[group]["_target_"]:
                yield group, "", node
            else:
                node |= standard
            for name, value in knobs_of(node).items():
                number = type(value) in (bool, int)
                yield group, name, {**node, name: int(value) + 1 if number else "another"}


def usual_knobs(target: str) -> dict[str, Any]:
    """The defaults of an option's knobs, of those that have one."""
    items = ((item.name, default_of(item)) for item in fields(OPTIONS[target]))
    return {name: value for name, value in items if value is not MISSING}


def knobs_of(node: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "_target_"}


@pytest.mark.parametrize("engine", [*ENGINES, "mine"])
def test_every_knob_is_supported_or_refused_by_name(engine: str) -> None:
    """Of an engine that declares nothing: refused, all of them."""
    config = compose([f"engine={engine}"] if engine in ENGINES else [])
    if engine not in ENGINES:
        config["engine"] = {"_target_": f"{__name__}.Undeclared"}
        config["choices"]["engine"] = engine
    support = support_of(config)
    refused = 0
    for group, name, node in every_knob():
        known = support.knobs.get(group, Knobs())
        usual = node.get("_target_") == defaults()[group].get("_target_")
        chosen = usual or known.targets == ALL or node["_target_"] in known.targets
        if chosen and (not name or known.names == ALL or name in known.names):
            require_supported({**config, group: node}, support)
            continue
        refused += 1
        with pytest.raises(BadInput) as error:
            require_supported({**config, group: node}, support)
        said = str(error.value)
        assert said.startswith(f"{group}.{name}=" if name and chosen else f"{group}="), said
        assert f"is not supported by {support.engine}" in said and "\n" not in said
    assert (refused == 0) == (engine == "minivllm") and (refused >= 100 or engine == "minivllm")


class Undeclared:
    """An engine of a user's own without `support`."""


# A value of every knob that a simulation by the roofline supports: it changes what is predicted.
# What is left out are groups of which every knob goes to the real scheduler or router, what goes
# with each request, and which model it is.
PREDICTED = {
    "model.max_model_len": 64,
    "model.rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
    },
    "quant.dtype": "float32",
    "quant.lm_head": True,
    "pruning.layers": [1, 2],
    "pruning.num_layers": 2,
    "pruning.mlp": 0.5,
    "pruning.heads": 0.5,
    "cache.block_size": 8,
    "cache.num_blocks": 99,
    "cache.num_sequences": 3,
    "cache.memory_fraction": 0.1,
    "cache.prefix_caching": True,
    "cache.swap_space_gb": 0.001,
    "cache.offload_gb": 0.001,
    "cache.offload_disk_gb": 0.001,
    "cache.kv_dtype": "int8",
    "cache.eviction": "streaming",
    "cache.eviction_budget": 512,
    "cache.eviction_sinks": 32,
    "cache.eviction_window": 64,
    "speculative.num_speculative_tokens": 5,
    "speculative.adaptive": False,
    "speculative.acceptance": 0.9,
    "speculative.quant": {"_target_": "minivllm.quant.int8.Int8", "dtype": "bfloat16"},
    "speculative.model": {
        "_target_": "minivllm.models.load.loading.load_model",
        "path": "embedded",
    },
    "speculative.lm_head": False,
    "speculative.exit_layer": 2,
    "speculative.head_tokens": 64,
    "runtime.trim_last_layer": False,
}
ELSEWHERE = {"model.path", "model.weights", "model.seed", "model.architecture"}


def test_every_knob_that_a_simulation_supports_changes_what_it_predicts() -> None:
    by_roofline = ENGINES["simulated"]
    named = {
        f"{group}.{name}"
        for group, knobs in by_roofline.items()
        if knobs.names != ALL and group not in ("decoding", "parallel")
        for name in knobs.names
    }
    assert named == {*PREDICTED} | ELSEWHERE
    assert {*by_roofline} - {key.partition(".")[0] for key in named} == {
        *("batching", "parallel", "decoding")
    }
    for key, value in PREDICTED.items():
        assert predicted(key, value) != predicted(key, None), key


PLACES = {
    "pruning.layers": "minivllm.passes.pruning.methods.LayerPruning",
    "pruning.num_layers": "minivllm.passes.pruning.methods.LayerPruning",
    "pruning.mlp": "minivllm.passes.pruning.methods.WidthPruning",
    "pruning.heads": "minivllm.passes.pruning.methods.WidthPruning",
    "cache.num_sequences": "minivllm.cache.contiguous.ContiguousCache",
    "quant.lm_head": "minivllm.quant.int8.Int8",
    "speculative.exit_layer": "minivllm.extras.speculative.proposers.early_exit.EarlyExitProposer",
    "speculative.head_tokens": "minivllm.extras.speculative.proposers.early_exit.EarlyExitProposer",
}
DRAFTS = "minivllm.extras.speculative.proposers.draft.DraftProposer"
NEEDED: dict[str, dict[str, Any]] = {
    "cache.swap_space_gb": {"batching.preemption": "swap"},
    "cache.offload_gb": {"cache.prefix_caching": True},
    "cache.offload_disk_gb": {"cache.prefix_caching": True, "cache.offload_gb": 0.001},
    "cache.eviction_budget": {"cache.eviction": "streaming"},
    "cache.eviction_sinks": {"cache.eviction": "streaming"},
    "cache.eviction_window": {"cache.eviction": "streaming"},
}


def predicted(key: str, value: Any) -> str:
    """All that a simulation predicts with, a knob having this value; None: its default."""
    machine = ["engine.bandwidth_gb_s=20", "engine.tflops=1", "engine.memory_gb=0.05"]
    config = compose(["engine=simulated", *machine])
    group, _, name = key.partition(".")
    if target := PLACES.get(key, DRAFTS if group == "speculative" else None):
        config[group] = {"_target_": target, **usual_knobs(target)}
    if group == "speculative":
        config[group]["acceptance"] = 0.5
    if target == DRAFTS:
        config[group]["quant"] = {"_target_": "minivllm.quant.int4.Int4", "dtype": "bfloat16"}
    for needed, setting in NEEDED.get(key, {}).items():
        of, _, knob = needed.partition(".")
        config[of][knob] = setting
    if value is not None:
        config[group][name] = value
    require_supported(config)
    engine = SimulatedEngine(config, SimulatedOptions(**knobs_of(config["engine"])))
    drafts, layout = engine._speculation, engine._layout
    speculation = drafts and (vars(drafts), drafts.drafts.options, drafts.drafts.times)
    known = engine.step_times, layout, vars(engine._preemption), engine.info.max_model_len
    return re.sub(r" at 0x\w+", "", repr((known, speculation)))


def test_steps_of_records_are_those_of_their_knobs() -> None:
    """Groups that records must share for a fit are supported with `engine.steps` alone."""
    for knob in ("attention=eager", "runtime.threads=1", "quant.dtype=float16", "pruning=wanda"):
        require_supported(compose(["engine=simulated", "engine.steps=runs/x", knob]))
    for knob in ("attention=eager", "runtime.threads=1", "pruning=wanda"):
        with pytest.raises(BadInput, match="is not supported by engine=simulated"):
            require_supported(compose(["engine=simulated", knob]))
    warm = ["engine=simulated", "engine.steps=runs/x", "decoding.temperature=0.5"]
    with pytest.raises(BadInput, match=r"decoding\.temperature=0\.5 is not supported"):
        require_supported(compose(warm))
    require_supported(compose([*warm, "speculative=ngram"]))
    with pytest.raises(BadInput, match=r"decoding\.temperature=0\.5 is not supported"):
        require_supported(compose([*warm, "speculative=ngram", "speculative.acceptance=0.5"]))


def test_a_tracker_is_no_matter_of_the_engine() -> None:
    config = compose(["engine=transformers", "tracker=mlflow"])
    assert config["tracker"] != compose([])["tracker"]
    require_supported(config)
    with pytest.raises(BadInput, match=r"^cache\.block_size=32 is not supported"):
        require_supported({**config, "cache": {**config["cache"], "block_size": 32}})


# ---- a class of the user's own

SILENT = "class Mine:\n    def __init__(self, config): raise RuntimeError('it was built')\n"
DECLARED = (
    "from minivllm.platform.support import Knobs, Support\n"
    "class Mine:\n"
    "    support = Support(knobs={'quant': Knobs(('dtype',)), 'cache': Knobs(('block_size',))})\n"
    "    def __init__(self, config): raise RuntimeError('it was built')\n"
)
DERIVED = (
    "from minivllm.engines.minivllm.engine import MinivllmEngine\n"
    "class Mine(MinivllmEngine): pass\n"
)
OF_A_SERVER = (
    "from minivllm.engines.openai.engine import OpenAIEngine\nclass Mine(OpenAIEngine): pass\n"
)
EVERYTHING = (
    "from minivllm.platform.support import EVERY_KNOB, Support\n"
    "class Mine:\n"
    "    support = Support(knobs=EVERY_KNOB)\n"
    "    def __init__(self, config): raise RuntimeError('it was built')\n"
)
BORROWED = EVERYTHING.replace("Support(knobs=EVERY_KNOB)", "SimulatedOptions.support").replace(
    "minivllm.platform.support import EVERY_KNOB, Support",
    "minivllm.engines.simulated.options import SimulatedOptions",
)
SIMULATED = (
    "from minivllm.engines.simulated.engine import SimulatedEngine\n"
    "class Mine(SimulatedEngine): pass\n"
)
NAMED = DECLARED.replace("'cache': Knobs(('block_size',))", "'parallel': Knobs(('replicas',))")
OF_REPLICAS = "from minivllm.engines.vllm.server import VllmServer\nclass Mine(VllmServer): pass\n"
WRONG = "class Mine:\n    support = {'quant': ['dtype']}\n    def __init__(self, config): pass\n"


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (
            SILENT,
            ["quant=nf4", "speculative=ngram", "cache.block_size=32"],
            "quant=nf4 is not supported by engine=mine: leave it out, engine=mine has its own "
            "quant; it supports engine.* alone, as its class declares no `support`",
        ),
        (SILENT, ["cache.block_size=32"], "cache.block_size=32 is not supported by engine=mine"),
        (SILENT, ["parallel.replicas=2"], "parallel.replicas=2 is not supported by engine=mine"),
        (SILENT, ["runtime.device=cuda:0-1"], "engine=mine computes on one device"),
        (DECLARED, ["quant=nf4"], "it supports quant.dtype, cache.block_size, engine.*"),
        (DECLARED, ["cache.num_blocks=9"], "cache.num_blocks=9 is not supported by engine=mine"),
        (DERIVED, ["parallel.replicas=2"], "parallel.replicas=2 is not supported by engine=mine"),
        (
            EVERYTHING,
            ["parallel.replicas=2"],
            "parallel.replicas=2 is not supported by engine=mine",
        ),
        (
            EVERYTHING,
            ["parallel.backend=ray"],
            "parallel.backend='ray' is not supported by engine=mine: use "
            "parallel.backend='processes'",
        ),
        (
            DECLARED.replace("'cache': Knobs(('block_size',))", "'parallel': Knobs((), ('*',))"),
            ["parallel.replicas=2"],
            "parallel.replicas=2 is not supported by engine=mine",
        ),
        (BORROWED, ["parallel.replicas=2"], "parallel.replicas=2 is not supported by"),
        (SIMULATED, ["parallel.replicas=2"], "parallel.replicas=2 is not supported by engine=mine"),
        (OF_A_SERVER, ["attention=eager"], "attention=eager is not supported by engine=mine"),
        (WRONG, [], "engine: my_engine.Mine.support must be a minivllm.platform.support.Support"),
    ],
)
def test_a_class_supports_what_it_declares(
    cli: Any,
    user_dir: Path,
    plug_in: Callable[[str, str, str], None],
    source: str,
    overrides: list[str],
    message: str,
) -> None:
    (user_dir / "my_engine.py").write_text(source)
    plug_in("engine", "mine", "_target_: my_engine.Mine\n")
    done = cli(f"--config-dir={user_dir / 'conf'}", "engine=mine", *overrides)
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1, done.err
    assert not any(Path().iterdir())


@pytest.mark.parametrize("source", [DECLARED, DERIVED], ids=["declared", "derived"])
def test_what_a_class_declares_or_inherits_may_be_set(
    user_dir: Path, plug_in: Callable[[str, str, str], None], source: str
) -> None:
    (user_dir / "my_engine.py").write_text(source)
    plug_in("engine", "mine", "_target_: my_engine.Mine\n")
    settings = ["engine=mine", "quant=fp16", "cache.block_size=32"]
    require_supported(compose(settings, config_dir=user_dir / "conf"))
    if source == DERIVED:
        config = compose([*settings, "attention=eager"], config_dir=user_dir / "conf")
        require_supported(config)
        assert support_of(config).own_torch
        assert not support_of(config).supports("parallel", "replicas")


@pytest.mark.parametrize("source", [NAMED, OF_REPLICAS], ids=["named", "derived"])
def test_a_class_that_starts_replicas_itself_takes_their_number(
    user_dir: Path, plug_in: Callable[[str, str, str], None], source: str
) -> None:
    (user_dir / "my_engine.py").write_text(source)
    plug_in("engine", "mine", "_target_: my_engine.Mine\n")
    overrides = ["engine=mine", "parallel.replicas=2"]
    require_supported(compose(overrides, config_dir=user_dir / "conf"))
    with pytest.raises(BadInput, match=r"parallel\.router='session' is not supported by"):
        settings = [*overrides, "parallel.router=session"]
        require_supported(compose(settings, config_dir=user_dir / "conf"))


def test_a_class_that_takes_every_knob_may_split_its_model(
    user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    (user_dir / "my_engine.py").write_text(EVERYTHING)
    plug_in("engine", "mine", "_target_: my_engine.Mine\n")
    settings = ["engine=mine", "parallel.tensor=2", "attention=eager"]
    config = compose(settings, config_dir=user_dir / "conf")
    require_supported(config)
    assert support_of(config).knobs["parallel"] == Knobs(("tensor",))


def test_a_declaration_is_the_same_from_another_process(
    user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    (user_dir / "my_engine.py").write_text(DECLARED)
    plug_in("engine", "mine", "_target_: my_engine.Mine\n")
    config = compose(["engine=mine"], config_dir=user_dir / "conf")
    there = support_of(config)
    import my_engine

    assert support_of(config) == there and there.knobs == my_engine.Mine.support.knobs
    assert isinstance(there, Support) and there.engine == "engine=mine"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine=transformers", "quant=int8"],
            "quant=int8 is not supported by engine=transformers: use quant=bf16",
        ),
        (
            ["engine=transformers", "batching=static"],
            "batching=static is not supported by engine=transformers: leave it out, "
            "engine=transformers has its own batching",
        ),
        (
            ["engine=transformers", "runtime.profile=true"],
            "runtime.profile=true is not supported by engine=transformers",
        ),
        (
            ["engine=simulated", "runtime.profile=true"],
            "runtime.profile=true is not supported by engine=simulated",
        ),
        (
            ["engine=simulated", *ROOFLINE, "attention=sdpa"],
            "attention=sdpa is not supported by engine=simulated: leave it out, engine=simulated "
            "has its own attention",
        ),
        (
            ["engine=simulated", *ROOFLINE, "runtime.cuda_graphs=true"],
            "runtime.cuda_graphs=true is not supported by engine=simulated",
        ),
        (
            ["engine=simulated", *ROOFLINE, "runtime.threads=1"],
            "runtime.threads=1 is not supported by engine=simulated",
        ),
        (
            ["engine=simulated", *ROOFLINE, "decoding.presence_penalty=1"],
            "decoding.presence_penalty=1.0 is not supported by engine=simulated",
        ),
        (
            ["engine=simulated", *ROOFLINE, "vision.max_images=3"],
            "vision.max_images=3 is not supported by engine=simulated",
        ),
        (
            ["engine=openai", "runtime.threads=1"],
            "runtime.threads=1 is not supported by engine=openai",
        ),
    ],
)
def test_a_knob_is_refused_before_anything_is_started(
    cli: Any, overrides: list[str], message: str
) -> None:
    done = cli(*overrides)
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1, done.err
    assert "loading" not in done.out and not Path("runs").exists()


def test_a_server_that_is_started_here_is_given_threads() -> None:
    config = compose(["engine=openai", "engine.command=serve", "runtime.threads=1"])
    support = support_of(config)
    assert "threads" in support.knobs["runtime"].names
    require_supported(config, support)


# ---- degrees of parallelism that a peer is started with


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (1, 1)),
        (["runtime.device=cuda"], (1, 1)),
        (["runtime.device=cuda:0-3"], (4, 1)),
        (["parallel.tensor=2"], (2, 1)),
        (["parallel.tensor=2", "parallel.replicas=2", "runtime.device=cuda:0-3"], (2, 2)),
    ],
)
def test_gpus_are_shared_as_parallel_says_or_by_tensor(
    overrides: list[str], expected: tuple[int, int]
) -> None:
    assert degrees(Config(compose(["engine=vllm_server", *overrides]))) == expected


def test_a_wrong_number_of_gpus_is_named() -> None:
    config = compose(["engine=sglang", "parallel.tensor=4", "runtime.device=cuda:0-2"])
    with pytest.raises(BadInput, match=r"takes 4 GPUs, and runtime\.device=cuda:0-2 names 3"):
        degrees(Config(config))


@pytest.mark.parametrize("engine", ["vllm", "vllm_server", "sglang"])
def test_a_peer_that_splits_models_takes_the_knob(engine: str) -> None:
    config = compose([f"engine={engine}", "parallel.tensor=2"])
    require_supported(config)
    assert degrees(Config(config)) == (2, 1)


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
def test_an_engine_that_splits_no_model_rejects_it(engine: str) -> None:
    with pytest.raises(BadInput, match=rf"parallel\.tensor=2.* not supported by engine={engine}"):
        require_supported(compose([f"engine={engine}", "parallel.tensor=2"]))
