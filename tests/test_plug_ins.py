"""Classes out of tree: fourteen kinds, each one class and one option file, found by --help, with
typed knobs, in a run, in `LLM` and in a sweep."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minivllm import LLM, SamplingParams, load_records
from minivllm.config.compose import compose
from minivllm.errors import BadInput

NOTES = """
import json
import os

def told(kind, share):
    with open(os.environ["PLUG_INS_TOLD"], "a") as file:
        file.write(json.dumps([kind, share]) + "\\n")
"""


class PlugIn(NamedTuple):
    """One kind."""

    choose: str  # the override that takes the option
    knob: str
    source: str  # of its module, which is named after the kind
    option: str  # its file


PLUG_INS = {
    "quantisation": PlugIn(
        "quant=mine",
        "quant.share",
        """
from minivllm.quant.plain import Plain
class Mine(Plain):
    name = "mine"
    def __init__(self, share: float = 0.5):
        super().__init__("float32")
        told("quantisation", share)
""",
        "_target_: my_quantisation.Mine\nshare: 0.5 # of what",
    ),
    "attention": PlugIn(
        "attention=mine",
        "attention.share",
        """
from minivllm.attention.eager import EagerBackend
class Mine(EagerBackend):
    name = "mine"
    def __init__(self, specs, kv, share: float = 0.5):
        super().__init__(specs, kv)
        told("attention", share)
""",
        "_target_: my_attention.Mine\nshare: 0.5 # of what",
    ),
    "batching": PlugIn(
        "batching=mine",
        "batching.share",
        """
from minivllm.engine.batching import Continuous
class Mine(Continuous):
    name = "mine"
    def __init__(self, share: float = 0.5):
        super().__init__(max_num_seqs=4)
        told("batching", share)
""",
        "_target_: my_batching.Mine\nshare: 0.5 # of what",
    ),
    "preemption": PlugIn(
        "batching=preempting",
        "batching.preemption.share",
        """
from minivllm.engine.preemption import Recompute
class Mine(Recompute):
    name = "mine"
    def __init__(self, share: float = 0.5):
        self.share = share
    def preempt(self, request, cache):
        told("preemption", self.share)
        super().preempt(request, cache)
""",
        "defaults: [continuous]\npreemption:\n  _target_: my_preemption.Mine\n"
        "  share: 0.5 # of what",
    ),
    "eviction": PlugIn(
        "cache=evicting",
        "cache.eviction.share",
        """
from dataclasses import dataclass
from typing import ClassVar
from minivllm.cache.eviction.policies import Eviction
@dataclass(frozen=True)
class Mine(Eviction):
    name: ClassVar[str] = "mine"
    share: float = 0.5
    def drop(self, scores):
        told("eviction", self.share)
        return super().drop(scores)
""",
        "defaults: [paged]\nblock_size: 4\nnum_blocks: 8\neviction_budget: 20\neviction:\n"
        "  _target_: my_eviction.Mine\n  share: 0.5 # of what",
    ),
    "cache": PlugIn(
        "cache=mine",
        "cache.share",
        """
from minivllm.cache.paged import PagedCache
class Mine(PagedCache):
    name = "mine"
    def __init__(self, share: float = 0.5):
        super().__init__(num_blocks=64)
        told("cache", share)
""",
        "_target_: my_cache.Mine\nshare: 0.5 # of what",
    ),
    "proposer": PlugIn(
        "speculative=mine",
        "speculative.share",
        """
from minivllm.extras.speculative.options import SpeculativeOptions
from minivllm.extras.speculative.proposer import Proposer
class Mine(Proposer):
    name = "mine"
    def __init__(self, share: float = 0.5):
        self.share = share
        self.options = SpeculativeOptions(num_speculative_tokens=2, adaptive=False)
    def propose(self, request, most):
        told("proposer", self.share)
        return request.token_ids[-1:] * most
""",
        "_target_: my_proposer.Mine\nshare: 0.5 # of what",
    ),
    "workload": PlugIn(
        "workload=mine",
        "workload.share",
        """
from minivllm.bench.workloads.synthetic import Smoke
class Mine(Smoke):
    name = "mine"
    def __init__(self, share: float = 0.5):
        super().__init__(num_requests=4, input_len=8, output_len=4)
        told("workload", share)
""",
        "_target_: my_workload.Mine\nshare: 0.5 # of what",
    ),
    "arrival": PlugIn(
        "arrival=mine",
        "arrival.share",
        """
from minivllm.bench.workloads.arrivals import Arrival
class Mine(Arrival):
    def __init__(self, share: float = 0.5):
        told("arrival", share)
""",
        "_target_: my_arrival.Mine\nshare: 0.5 # of what",
    ),
    "target": PlugIn(
        "engine=mine",
        "engine.share",
        """
from minivllm.engines.minivllm.engine import MinivllmEngine
class Mine(MinivllmEngine):
    def __init__(self, config, share: float = 0.5):
        super().__init__(config)
        told("target", share)
""",
        "_target_: my_target.Mine\nshare: 0.5 # of what",
    ),
    "metric": PlugIn(
        "measure=mine",
        "measure.metrics.tokens.share",
        """
from minivllm.bench.metrics.latency import Distribution
class Mine(Distribution):
    unit = "tokens"
    def __init__(self, share: float = 0.5):
        self.share = share
        told("metric", share)
    def samples(self, trace):
        return [-self.share * len(trace.token_times)]
""",
        "defaults: [default]\nmetrics:\n  tokens:\n    _target_: my_metric.Mine\n"
        "    share: 0.5 # of what",
    ),
    "check": PlugIn(
        "measure=checked",
        "measure.checks.mine.share",
        """
from minivllm.bench.metrics.validity import Check
class Mine(Check):
    def __init__(self, share: float = 0.5):
        self.share = share
    def reasons(self, evidence):
        told("check", self.share)
        if self.share > 1:
            yield f"{len(evidence.traces)} requests, and a share of {self.share:g}"
    def notes(self, evidence):
        return [f"share {self.share:g}"]
""",
        "defaults: [default]\nchecks:\n  mine:\n    _target_: my_check.Mine\n"
        "    share: 0.5 # of what",
    ),
    "pass": PlugIn(
        "runtime=mine",
        "runtime.passes",
        """
from minivllm.passes.base import PassReport
class Mine:
    name = "mine"
    def __init__(self, share: float = 0.5):
        self.share = share
    def apply(self, loaded, context):
        told("pass", self.share)
        return PassReport(self.name, 1)
""",
        "defaults: [default]\npasses: # one after another\n  - _target_: my_pass.Mine\n"
        "    share: 0.5 # of what",
    ),
    "study": PlugIn(
        "+report=mine",
        "report.studies.mine.share",
        """
from minivllm.report.studies.base import Study
class Mine(Study):
    name, title, figure_names = "mine", "What is mine?", ("mine",)
    def __init__(self, share: float = 0.5):
        self.share = share
    def find(self, inputs):
        told("study", self.share)
""",
        "studies:\n  mine:\n    _target_: my_study.Mine\n    share: 0.5 # of what",
    ),
}
# Of both a policy of batching and a cache of one's own, or strategies of the built-in ones: these
# go together, and so does one option of `measure`.
STRATEGIES = ["preemption", "eviction", "check"]
TOGETHER = {
    "classes": [kind for kind in PLUG_INS if kind not in STRATEGIES],
    "strategies": STRATEGIES,
}
SMALL = ("runtime.device=cpu", "measure.warmup_requests=0", "measure.roofline=false")
LOAD = ("workload.num_requests=4", "workload.input_len=8", "workload.output_len=24")


def override(kind: str, value: object) -> str:
    """The override that gives a class's own knob a value."""
    if kind == "pass":  # one of a list, which is set as a whole
        return f"runtime.passes=[{{_target_: my_pass.Mine, share: {value}}}]"
    return f"{PLUG_INS[kind].knob}={value}"


@pytest.fixture
def own(
    user_dir: Path, plug_in: Callable[[str, str, str], None], monkeypatch: pytest.MonkeyPatch
) -> str:
    """The argument that brings the user's option files."""
    monkeypatch.setenv("PLUG_INS_TOLD", str(user_dir / "told"))
    (user_dir / "my_notes.py").write_text(NOTES)
    for kind, (choose, _, source, option) in PLUG_INS.items():
        (user_dir / f"my_{kind}.py").write_text(f"from my_notes import told\n{source}")
        group, _, name = choose.lstrip("+").partition("=")
        plug_in(group, name, f"# A {kind} of mine.\n{option}\n")
    return f"--config-dir={user_dir / 'conf'}"


def told(user_dir: Path) -> dict[str, set[float]]:
    """The knobs that each kind of class was made, or worked, with since this was asked last."""
    found: dict[str, set[float]] = {}
    for line in (user_dir / "told").read_text().splitlines():
        kind, share = json.loads(line)
        found.setdefault(kind, set()).add(share)
    (user_dir / "told").unlink()
    return found


@pytest.mark.parametrize("kind", PLUG_INS)
def test_help_finds_it(cli: Callable[..., Any], own: str, kind: str) -> None:
    choose = PLUG_INS[kind].choose
    group, _, name = choose.lstrip("+").partition("=")
    listed = re.split(rf"\n  {group}\b", cli(own, "--help").out)[1]
    assert name in re.findall(r"\w+", re.split(r"\n  \w", listed)[0])
    shown = " ".join(cli(own, choose, "--help").out.split())
    assert f"{group}={name}: A {kind} of mine." in shown
    assert (f"{PLUG_INS[kind].knob}=0.5" in shown and "of what" in shown) or (
        kind == "pass" and '"share": 0.5' in shown and "one after another" in shown
    )


@pytest.mark.parametrize("kind", PLUG_INS)
def test_its_knobs_have_types(cli: Callable[..., Any], own: str, kind: str) -> None:
    choose, knob = PLUG_INS[kind][:2]
    done = cli(own, choose, override(kind, "abc"))
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    key = "runtime.passes[0].share" if kind == "pass" else knob
    assert f"{key}='abc' must be a number, says my_{kind}.Mine" in done.err
    assert not any(Path().iterdir())


@pytest.mark.parametrize("kinds", TOGETHER.values(), ids=TOGETHER)
def test_llm_takes_it(user_dir: Path, own: str, kinds: list[str]) -> None:
    chosen = [PLUG_INS[kind].choose for kind in kinds]
    with LLM("tiny", device="cpu", overrides=chosen, config_dir=user_dir / "conf") as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        outputs = llm.generate([[5, 6, 7]] * 4, params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [24] * 4
    served = {
        "quantisation",
        "attention",
        "batching",
        "cache",
        "pass",
        "preemption",
        "eviction",
        "proposer",
    }
    assert told(user_dir) == {kind: {0.5} for kind in kinds if kind in served}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", TOGETHER.values(), ids=TOGETHER)
def test_a_run_and_a_sweep_take_it(
    cli: Callable[..., Any],
    user_dir: Path,
    plug_in: Callable[[str, str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    kinds: list[str],
) -> None:
    monkeypatch.setattr("minivllm.report.page.figures", lambda inputs: [])
    load = LOAD if "workload" not in kinds else ()
    command = [own, *(PLUG_INS[kind].choose for kind in kinds), *SMALL, *load]
    done = cli(*command, "name=one")
    assert done.code == 0, done.err
    assert told(user_dir) == {kind: {0.5} for kind in kinds}
    arms = [
        {
            key: value
            for kind in kinds
            if kind != "study"
            for key, _, value in [override(kind, share).partition("=")]
        }
        for share in (1.0, 2.0)
    ]
    plug_in("preset", "mine", "# @package _global_\n" + json.dumps({"sweep": {"params": arms}}))
    done = cli("-m", *command, "preset=mine", "sweep.name=many")
    assert done.code == ("check" in kinds), done.err
    assert told(user_dir) == {kind: {0.5} if kind == "study" else {1.0, 2.0} for kind in kinds}
    rows = load_records("runs/many")
    assert sorted(rows["status"]) == ["invalid" if "check" in kinds else "ok", "ok"]
    if "proposer" in kinds:
        one = load_records("runs/one")
        assert one["speculation.proposer"].item() == "mine"
        assert one["speculation.num_speculative_tokens"].item() == 2
        assert one["speculation.num_drafts"].item() > 0
    if "metric" in kinds:
        assert sorted(rows["metrics.own.tokens.p50"]) == [-8.0, -4.0]
        assert load_records("runs/one")["metrics.own.tokens.n"].item() == 4
    if "check" in kinds:
        assert list(rows.set_index("status")["validity.reasons"]["invalid"]) == [
            "mine: 4 requests, and a share of 2"
        ]
        notes = {note for notes in rows["validity.notes"] for note in notes}
        assert {"mine: share 1", "mine: share 2"} <= notes


@pytest.mark.parametrize("kind", ["metric", "check"])
def test_what_judges_changes_no_cell_and_is_measured_anew(
    user_dir: Path, own: str, kind: str
) -> None:
    from minivllm.bench.records.identity import cell_id, expand

    plain, asked = compose([]), compose([PLUG_INS[kind].choose], user_dir / "conf")
    assert cell_id(plain, "f") == cell_id(asked, "f")
    assert (
        expand(plain, "s", "a", "runs", "f")[0].run_id
        != expand(asked, "s", "a", "runs", "f")[0].run_id
    )


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ("batching.preemption", "must name a class, as {_target_: my_package.MyClass}"),
        ("cache.eviction", "must name a class, as {_target_: my_package.MyClass}"),
        ("+measure.metrics.mine", "must name a class each"),
        ("+measure.checks.mine", "must name a class each, such as .*MyCheck"),
    ],
)
def test_what_names_no_class_is_bad_input(knob: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        compose([f"{knob}={{share: 1}}"])


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ("batching.preemption", "batching.preemption: pathlib.Path is no preemption strategy: der"),
        ("cache.eviction", "cache.eviction: pathlib.Path is no eviction policy: derive it"),
        ("runtime.passes", "runtime.passes: pathlib.Path is no pass: give it a `name`"),
    ],
)
def test_what_is_of_another_kind_is_bad_input(knob: str, message: str) -> None:
    node = "{_target_: pathlib.Path}"
    value = f"[{node}]" if knob == "runtime.passes" else node
    with pytest.raises(BadInput, match=message):
        LLM("tiny", device="cpu", overrides=[f"{knob}={value}"])
