"""The stored reference: shared, addressed by its content, whole or absent; and quality through the
whole harness."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.bench import quality_reference
from minivllm.bench.quality import LOG_PROBS, Reference, evaluate
from minivllm.bench.records.reading import read_records
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.models.load.source import EMBEDDED
from tests.forked import fork_known
from tests.pictures import unpainted

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("quality.max_tokens=300", "quality.window=128", "quality.stride=64"),
    *("quality.prompts=2", "quality.prompt_len=16", "quality.output_len=8"),
]
QUICK = [
    *(
        "measure.roofline=false",
        "workload.num_requests=2",
        "workload.input_len=8",
        "workload.output_len=4",
    ),
    *("measure.telemetry_interval_s=0.05",),
]
Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the supervisor does for its workers, whose children the reference's process is one of."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fork_known(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The reference of `make_config()`, computed apart as everywhere but in tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        fork_known(patch)
        return quality_reference.ensure(make_config(), tmp_path_factory.mktemp("made"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are computed here, where what they say is tested and not how they come about."""
    monkeypatch.setattr(quality_reference, "_compute_apart", quality_reference.compute)


@pytest.fixture
def without_pictures(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have tables and words, which are what is looked at here."""
    monkeypatch.setattr("minivllm.report.page.finish", unpainted)


def make_config(*overrides: str) -> dict[str, Any]:
    return compose([*SMALL, *overrides])


def stored(root: Path) -> list[Path]:
    return sorted(path for path in (root / quality_reference.FOLDER).glob("*") if path.is_dir())


# ---- against transformers


@pytest.mark.slow
@pytest.mark.parametrize(("window", "stride"), [(256, 128), (200, 70), (192, 192)])
@pytest.mark.usefixtures("in_this_process")
def test_perplexity_is_transformers_own(tmp_path: Path, window: int, stride: int) -> None:
    """The strided loop of transformers' "Perplexity of fixed-length models", over its own model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = make_config(
        "quality.max_tokens=1000", f"quality.window={window}", f"quality.stride={stride}"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(EMBEDDED / "tokenizer.json")
    )
    text = (EMBEDDED / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text)["input_ids"][:1000]])
    nll, count, seen = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : -(end - seen)] = -100
        predicted = int((labels[:, 1:] != -100).sum())  # the loss shifts labels by one
        if predicted:
            with torch.no_grad():
                nll += model(ids[:, begin:end], labels=labels).loss.item() * predicted
            count += predicted
        seen = end
        if end == ids.shape[1]:
            break
    found = quality_reference.ensure(config, tmp_path)
    assert found.token_ids == ids[0].tolist() and len(found.top1) == count
    assert found.perplexity == pytest.approx(math.exp(nll / count), rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_precisions_rank_as_they_should(tmp_path: Path) -> None:
    from minivllm.engines.minivllm.engine import MinivllmEngine

    kl, top1, perplexity = [], [], []
    for quant in ("fp32", "bf16", "int8", "nf4"):
        config = compose([f"quant={quant}", "quality.max_tokens=1500", "quality.window=512"])
        found = evaluate(MinivllmEngine(config), quality_reference.ensure(config, tmp_path))
        kl.append(found.kl_mean or 0.0)
        top1.append(found.top1_agreement or 0.0)
        perplexity.append((found.perplexity or 0.0) / (found.reference_perplexity or math.nan))
    assert kl == sorted(kl)
    # bf16 and int8 differ by a handful of near ties in 1,500 tokens, either way.
    assert top1[0] > max(top1[1:3]) and min(top1[1:3]) > top1[3]
    assert kl[0] < 1e-6 and kl[2] < 2e-3 and 1e-3 < kl[3] < 0.2
    assert top1[0] == 1.0 and top1[3] > 0.8
    assert perplexity == pytest.approx([1.0, 1.0, 1.0, 1.04], abs=0.04)
    assert len(stored(tmp_path)) == 1  # shared by all


# ---- the file


def test_what_is_stored(made: Reference) -> None:
    config, root = make_config("quant=nf4"), made.folder.parent.parent
    found = quality_reference.ensure(config, root)
    assert found.folder == root / "quality" / found.id and found.precision == "fp32"
    logs = np.load(found.folder / LOG_PROBS)
    assert logs.dtype == np.float16 and logs.shape == (299, 6144)
    assert np.exp(logs.astype(np.float64)).sum(1) == pytest.approx(np.ones(299), abs=5e-3)
    assert (logs.argmax(1) == found.top1).mean() > 0.99  # but for ties in 16 bits
    text = (EMBEDDED / "heldout.txt").read_bytes()
    assert len(found.token_ids) == 300 and 600 < (found.num_bytes or 0) < 1800
    assert text[: found.num_bytes].decode(errors="ignore")
    assert [len(prompt) for prompt in found.prompts] == [16, 16]
    assert found.prompts[0] == found.token_ids[:16] != found.prompts[1]
    assert [len(output) for output in found.continuations] == [8, 8]
    before = (found.folder / quality_reference.REFERENCE).stat().st_mtime_ns
    assert quality_reference.ensure(config, root) == found
    assert quality_reference.ensure(make_config("quant=int8", "attention=eager"), root) == found
    assert (found.folder / quality_reference.REFERENCE).stat().st_mtime_ns == before


def test_the_address_is_of_the_content(tmp_path: Path) -> None:
    base = quality_reference.reference_id(make_config())
    for same in (
        "quant=nf4",
        "batching=sequential",
        "workload=chat",
        "measure.seed=3",
        "runtime.threads=1",
    ):
        assert quality_reference.reference_id(make_config(same)) == base, same
    for other in (
        "quality.window=64",
        "quality.reference=bf16",
        "quality.prompts=3",
        "model.max_model_len=1024",
    ):
        assert quality_reference.reference_id(make_config(other)) != base, other
    ids = []
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
        ids.append(quality_reference.reference_id(make_config(f"quality.text={tmp_path / name}")))
    assert base != ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("group", "knob"),
    [("cache", "block_size"), ("attention", "_target_"), ("batching", "chunked_prefill")],
)
def test_other_defaults_are_another_reference(
    group: str, knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed with the default options, which lie in conf/ and not in the code."""
    config = make_config()
    base = quality_reference.reference_id(config)

    def edited(overrides: Sequence[str]) -> dict[str, Any]:
        usual = compose(overrides)
        return {**usual, group: {**usual[group], knob: "another"}}

    monkeypatch.setattr(quality_reference, "compose", edited)
    assert quality_reference.reference_id(config) != base


@pytest.mark.usefixtures("in_this_process")
def test_the_log_probabilities_are_capped(tmp_path: Path) -> None:
    cap = 100 * 2 * 6144 / 1e9
    found = quality_reference.ensure(make_config(f"quality.max_reference_gb={cap}"), tmp_path)
    assert found.kl_tokens == len(np.load(found.folder / LOG_PROBS)) == 100
    assert len(found.top1) == 299
    with pytest.raises(BadInput, match=r"quality\.max_reference_gb=1e-06 holds not one token"):
        quality_reference.ensure(make_config("quality.max_reference_gb=1e-6"), tmp_path)


@pytest.mark.usefixtures("in_this_process")
def test_killed_half_way_leaves_nothing_that_counts(tmp_path: Path) -> None:
    config = make_config("quality.max_tokens=20000")
    folder = tmp_path / "quality" / quality_reference.reference_id(config)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"config": config, "folder": str(folder)}))
    command = [sys.executable, "-m", "minivllm.bench.quality_reference", str(job), str(os.getpid())]
    child = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + 120
    while (
        not any(folder.glob(".logprobs*")) and child.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert [path.suffix for path in folder.iterdir()] == [".tmp"]
    found = quality_reference.ensure(
        make_config(), tmp_path
    )  # another one: it clears up what nobody is at work on
    assert stored(tmp_path) == [found.folder]
    assert sorted(path.name for path in found.folder.iterdir()) == [
        LOG_PROBS,
        quality_reference.REFERENCE,
    ]


def test_a_damaged_reference_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Reference
) -> None:
    kept = made.folder
    shutil.copytree(kept.parent, tmp_path / kept.parent.name)
    found = quality_reference.ensure(make_config(), tmp_path)
    anew: list[Path] = []

    def again(config: dict[str, Any], folder: Path) -> None:
        assert not folder.exists()
        anew.append(folder)
        shutil.copytree(kept, folder)

    monkeypatch.setattr(quality_reference, "_compute_apart", again)
    text, logs = (kept / quality_reference.REFERENCE).read_text(), (kept / LOG_PROBS).read_bytes()
    content = json.loads(text)
    damage: list[tuple[str, bytes]] = [
        *(
            (quality_reference.REFERENCE, half.encode())
            for half in ("", text[: len(text) // 2], "[]", "{}")
        ),
        (quality_reference.REFERENCE, json.dumps({**content, "top1": "words"}).encode()),
        (
            quality_reference.REFERENCE,
            json.dumps({**content, "top1": content["top1"][:-1]}).encode(),
        ),
        *((LOG_PROBS, half) for half in (b"", logs[: len(logs) // 2], logs[:100])),
    ]
    for times, (name, half) in enumerate(damage, 1):
        (found.folder / name).write_bytes(half)
        assert quality_reference.load(found.folder) is None
        assert quality_reference.ensure(make_config(), tmp_path) == found and len(anew) == times
    assert quality_reference.ensure(make_config(), tmp_path) == found and len(anew) == len(damage)


def test_an_interrupt_or_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):

        def fail(*args: Any, error: BaseException = error) -> Any:
            raise error

        monkeypatch.setattr(quality_reference, "negative_log_likelihood", fail)
        with pytest.raises(type(error)):
            quality_reference.compute(make_config(), tmp_path / "id")
        assert not any((tmp_path / "id").iterdir())


def test_what_goes_wrong_apart_is_told_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short.txt").write_text("x = 1")
    with pytest.raises(BadInput, match=r"the text of quality\.text has \d tokens"):
        quality_reference.ensure(make_config(f"quality.text={tmp_path / 'short.txt'}"), tmp_path)
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe" * 500)
    with pytest.raises(BadInput, match=r"odd\.txt:1: not UTF-8"):
        quality_reference.ensure(make_config(f"quality.text={tmp_path / 'odd.txt'}"), tmp_path)
    monkeypatch.setattr(quality_reference.sys, "executable", shutil.which("false"))
    with pytest.raises(
        RuntimeError, match=r"quality\.reference=fp32 could not be computed: .* exit code 1"
    ):
        quality_reference.ensure(make_config(), tmp_path)
    assert not stored(tmp_path) or not any(
        (path / quality_reference.REFERENCE).exists() for path in stored(tmp_path)
    )


# ---- the command line


@pytest.mark.usefixtures("without_pictures")
def test_a_bench_with_quality_is_one_row(cli: Cli) -> None:
    done = cli("quant=nf4", "name=one", "measure.quality=true", "measure.repeats=2", *SMALL, *QUICK)
    assert done.code == 0, done.err
    assert "computing the reference" in done.out and done.out.count("measuring quality") == 1
    first, second = read_records("runs/one")
    assert first["metrics"]["output_tokens_per_s"] > 0
    assert first["quality"]["tokens"] == 299 and 0 < first["quality"]["kl_mean"] < 1
    assert first["quality"] == second["quality"]  # of one engine, so measured once
    assert "KL, mean" in done.out and Path("reports/one/precision.md").is_file()


@pytest.mark.usefixtures("without_pictures")
def test_the_task_measures_quality_alone_and_sweeps(cli: Cli, made: Reference) -> None:
    shutil.copytree(made.folder.parent, Path("runs", quality_reference.FOLDER))
    sweep = ["-m", "quant=fp32,int8", "sweep.name=s", *SMALL, *QUICK]
    done = cli("task=quality", *sweep)
    assert done.code == 0, done.err
    records = {record["config"]["choices"]["quant"]: record for record in read_records("runs/s")}
    assert {record["status"] for record in records.values()} == {"ok"}
    assert records["fp32"]["quality"]["kl_mean"] < records["int8"]["quality"]["kl_mean"]
    assert records["fp32"]["metrics"]["num_requests"] == 0
    assert records["fp32"]["quality"]["reference_id"] == records["int8"]["quality"]["reference_id"]
    assert "KL to fp32" in Path("reports/s/index.html").read_text()
    again = cli("task=quality", *sweep)
    assert again.code == 0 and "2 of 2 recorded already, skipped" in again.out
    # Speed measured later into the same folder: records of their own, the same cells, so one row of
    # the report.
    both = cli(*sweep)
    assert both.code == 0 and "skipped" not in both.out
    found = read_records("runs/s")
    assert len(found) == 4 and len({record["cell_id"] for record in found}) == 2
    rows = Path("reports/s/precision.md").read_text().splitlines()[2:]
    assert len(rows) == 2 and all("–" not in row for row in rows)


@pytest.mark.parametrize("command", ["task=quality", "measure.quality=true"])
def test_random_weights_are_refused_with_one_line(cli: Cli, command: str) -> None:
    for weights in (["model.weights=random"], ["model=qwen3"]):
        done = cli(command, *weights, *SMALL, *QUICK)
        assert done.code == 2 and done.err.count("\n") == 1
        assert not Path("runs").exists()
    assert "model.path=FOLDER" in done.err
    explicit = cli(command, "model.weights=random", *SMALL, *QUICK)
    assert "quality needs trained weights, and these are random" in explicit.err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("quality.text=nowhere.txt", "quality.text=nowhere.txt is no file"),
        ("quality.window=4096", "quality.window=4096 is longer than the context of 2048"),
        ("quality.stride=200", "quality.stride=200 must be at most quality.window=128"),
        ("quality.output_len=2040", "are 2056 tokens together"),
        ("quality.reference=nf4", "quality.reference='nf4' must be fp32 or bf16 or fp16"),
        ("quality.strde=3", "did you mean stride?"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(
    cli: Cli, override: str, words: str
) -> None:
    done = cli("task=quality", *SMALL, override)
    assert done.code == 2 and words in done.err and not Path("runs").exists()


def test_a_window_that_the_cache_cannot_hold_is_refused_before_the_measurement(
    cli: Cli, made: Reference
) -> None:
    shutil.copytree(made.folder.parent, Path("runs", quality_reference.FOLDER))
    done = cli("measure.quality=true", "cache.num_blocks=5", *SMALL, *QUICK)
    assert (
        done.code == 2
        and "quality.window=128" in done.err
        and "measuring" not in done.out.split("loading")[1]
    )
