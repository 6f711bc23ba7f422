"""The documentation keeps its word: links lead somewhere, commands compose, nothing that exists is
left out."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from minivllm.analysis.rows import shared
from minivllm.bench.hardware.gpu import NullGpu
from minivllm.bench.hardware.telemetry import Telemetry
from minivllm.bench.metrics import metrics
from minivllm.bench.metrics.glossary import glossary
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.records import archive, record
from minivllm.bench.records.provenance import provenance
from minivllm.cli import _verbatim
from minivllm.config import compose, explain
from minivllm.engine.events import StepTimed
from minivllm.experiments.plan import product
from minivllm.models.registry import supported_architectures
from minivllm.models.rope_config import KINDS as ROPE_KINDS
from tests.scripts.load import load_script
from tests.test_layers import ROOMS

docs_tables = load_script("docs_tables")
marked, named = docs_tables.MARK.findall, docs_tables.named
records_of, value = docs_tables.records_of, docs_tables.value

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GUIDES, REFERENCE = DOCS / "guides", DOCS / "reference"
EXAMPLES = ROOT / "reports" / "examples" / "cpu"
PAGE = EXAMPLES / "ablation" / "index.html"  # the one that is committed
PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if page.exists()]
LAUNCHER = ("hydra/launcher=", "hydra.launcher.")  # an extra that need not be installed here
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| ", re.MULTILINE)

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


def lines(page: Path) -> Iterator[tuple[bool, str]]:
    """Every line of a page, and whether it is code (fenced or indented)."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        else:
            yield fenced or line.startswith(("    ", "\t")), line


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks in a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def section(page: Path, heading: str) -> str:
    """What follows a heading, up to the next one."""
    found = re.search(
        rf"^#+ {heading}\n(.*?)(?=^#|\Z)",
        page.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert found, f"{page.name} has no section {heading}"
    return found[1]


# ---- links


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    titles = [
        line.lstrip("#").strip() for code, line in lines(page) if not code and line.startswith("#")
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for code, line in lines(page):
        for target in [] if code else re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            place = (page.parent / name).resolve() if name else page
            if not place.exists() or (anchor and anchor not in anchors(place)):
                broken.append(target)
    assert not broken


def test_links_of_the_committed_page_lead_somewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    links = set(re.findall(r'(?:href|src)="(?!data:)([^"]*)"', text))
    names = {*re.findall(r'\bid="([^"]+)"', text)}
    assert {"table.csv", "forest.png", "../runs/ablation.tar.xz"} <= links
    for link in links:
        place, _, anchor = link.partition("#")
        assert (PAGE.parent / unquote(place)).exists() if place else anchor in names, link


def test_pages_that_docs_name_can_be_built() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"reports/examples/cpu/([\w-]+)/index\.html", text))
    assert len(named) > 10
    assert [n for n in named if not (EXAMPLES / "runs" / f"{n}{archive.SUFFIX}").exists()] == []


def test_the_code_names_pages_that_exist() -> None:
    files = [
        file for folder in ("minivllm", "conf", "scripts") for file in (ROOT / folder).rglob("*.*")
    ]
    text = "".join(
        file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".yaml", ".sh")
    )
    named = set(re.findall(r"\bdocs/[\w/-]+\.md", text))
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_files_that_pages_name_exist() -> None:
    """Those of the project; a path may begin at any of its folders."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False
    ).stdout.split()
    if "pyproject.toml" not in listed:
        pytest.skip("not this project's git checkout")
    known = {
        "/".join(parts[start:])
        for parts in (Path(name).parts for name in listed)
        for start in range(len(parts))
    }
    missing = []
    for page in PAGES:
        named = re.findall(
            r"`([\w.-]+/[\w./-]+\.(?:py|h|cpp|yaml|sh))`", page.read_text(encoding="utf-8")
        )
        missing += [
            f"{page.name}: {name}"
            for name in named
            if name not in known and not name.startswith(("mine/", "my/")) and "NAME" not in name
        ]
    assert missing == []


def test_the_packages_are_listed_in_the_order_of_their_imports() -> None:
    table = section(DOCS / "internals" / "architecture.md", "The packages")
    named = re.findall(
        r"`([a-z_/]+?)(?:/|\.py)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M))
    )
    assert named == [room.replace(".", "/") for room in ROOMS if room != "__main__"]


def test_the_index_lists_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = [
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*")
        if path.suffix in (".md", ".ipynb")
    ]
    assert [page for page in pages if f"({page})" not in index] == ["README.md"]


# ---- commands


def words(line: str) -> list[str]:
    """A command's words, up to a pipe or a redirection; assignments before it left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        if found or not re.fullmatch(r"[A-Z_]+=.*", word):
            found.append(word)
    return found


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `python run.py ...` in a page's code that has no --flag."""
    code = "\n".join(line.strip() for is_code, line in lines(page) if is_code).replace("\\\n", " ")
    found = [
        words(line) for line in code.splitlines() if re.search(r"(^|\s)python run\.py\b", line)
    ]
    arguments = [command[2:] for command in found if command[:2] == ["python", "run.py"]]
    return [given for given in arguments if not any(re.match(r"--|-[^m]", word) for word in given)]


@cache
def composed(*overrides: str) -> dict[str, Any]:
    """The configuration of a command, which several pages name or which is an arm of several."""
    return compose.compose(overrides)


@each_page
def test_commands_compose(page: Path) -> None:
    for command in commands(page):
        overrides = [
            _verbatim(word) for word in command if word != "-m" and not word.startswith(LAUNCHER)
        ]
        if "-m" not in command:
            assert composed(*overrides)["choices"]
            continue
        with initialize_config_dir(str(compose.conf_dir()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            sweep = product(OverridesParser.create(config_loader=loader).parse_overrides(overrides))
        for arm in sweep.arms:
            assert composed(*arm.overrides, *sweep.settings)["choices"]


def test_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "python run.py not=code\n"
        "\n"
        "    python run.py -m quant=nf4,int8 \\\n        name=x  # why\n"
        "\n"
        "```\n"
        "HF_HOME=x python run.py task.prompt='a | b' > out\n"
        "python run.py --help\n"
        "$ python run.py a=b\n"
        "```\n"
    )
    assert commands(page) == [["-m", "quant=nf4,int8", "name=x"], ["task.prompt=a | b"]]


def test_what_the_docs_install_is_what_the_project_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = set(project["project"]["optional-dependencies"])
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"--extra (\w+)", text))
    options = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("conf/**/*.yaml"))
    for command, several in re.findall(r"(pip install [^`\n]*\[([\w,]+)\][^`\n]*)", text + options):
        assert re.match(r"pip install -e '\.\[[\w,]+\]' -c constraints\.txt\b", command), command
        named |= {*several.split(",")}
    assert {"cpu", "cuda", "peers"} <= named <= extras
    listed = set(
        re.findall(
            r"`(\w+)`",
            "".join(re.findall(r"^\| (`.*?) \|", section(DOCS / "install.md", "Extras"), re.M)),
        )
    )
    assert listed == extras
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = (line for line in pins if line.startswith("torch=="))
    assert set(re.findall(r"torch==[\d.]+\d", text)) == {torch}
    assert {line.partition(" ")[0] for line in pins} >= {
        *project["tool"]["uv"]["constraint-dependencies"]
    }
    (index,) = project["tool"]["uv"]["index"]
    assert set(re.findall(r"https://download\.pytorch\.org/\S+\w", text)) == {index["url"]}


def test_what_vllm_calls_otherwise_is_on_its_page() -> None:
    page = (DOCS / "coming-from-vllm.md").read_text(encoding="utf-8")
    assert [name for name in explain.VLLM if f"--{name.replace('_', '-')}" not in page] == []
    for name, ours in explain.VLLM.items():
        rows = "".join(line for line in page.splitlines() if f"--{name.replace('_', '-')}" in line)
        missing = [
            knob for knob in re.findall(r"\b[a-z]+(?:\.[a-z_]+|(?==))", ours) if knob not in rows
        ]
        assert missing == [], name


# ---- configuration


def test_every_option_and_knob_is_described() -> None:
    text = (REFERENCE / "configuration.md").read_text(encoding="utf-8")
    missing = []
    for folder in (
        *(compose.conf_dir() / group for group in compose.GROUPS),
        compose.conf_dir() / "preset",
    ):
        for file in folder.glob("*.yaml"):
            if f"`{file.stem}`" not in text and f"`{folder.name}={file.stem}`" not in text:
                missing.append(f"{folder.name}={file.stem}")
    for cls in {*compose.OPTIONS.values(), *compose.TARGETLESS.values()}:
        names = {
            f.name: (f"`{f.name}`", f"`{getattr(cls, 'group', '')}.{f.name}`") for f in fields(cls)
        }
        missing += [
            f"{cls.__name__}.{name}"
            for name, written in names.items()
            if not any(w in text for w in written)
        ]
    assert missing == []


def test_the_users_class_of_the_walk_through_works(user_dir: Path) -> None:
    import torch

    source = next(
        block
        for block in blocks(REFERENCE / "configuration.md", "python")
        if "class Float8" in block
    )
    option = blocks(REFERENCE / "configuration.md", "yaml")[0]
    (user_dir / "conf" / "quant").mkdir()
    (user_dir / "my_quant.py").write_text(source)
    (user_dir / "conf" / "quant" / "float8.yaml").write_text(option)
    composed = compose.compose(["quant=float8", "quant.skip=[down_proj]"], user_dir / "conf")
    method = compose.build(composed["quant"])
    assert method.quantizes("layers.0.qkv_proj") and not method.quantizes("layers.0.down_proj")
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(size, generator=generator).bfloat16() for size in ((48, 64), (48,), (3, 64))
    )
    packed, expected = method.pack(weight, bias), x.double() @ weight.double().t() + bias.double()
    assert (packed(x).double() - expected).norm() / expected.norm() < 0.04
    assert sum(t.numel() * t.element_size() for t in packed.parameters()) == 48 * (64 + 2 + 2)


def written(user_dir: Path) -> Path:
    """The files of the page on classes of one's own, in a user's folder; gives that of options."""
    page = REFERENCE / "configuration.md"
    for block in (*blocks(page, "python"), *blocks(page, "yaml")):
        if found := re.match(r"# mine/(\S+)\n", block):
            (user_dir / found[1]).parent.mkdir(parents=True, exist_ok=True)
            (user_dir / found[1]).write_text(block)
    return user_dir / "conf"


def test_the_users_strategies_of_the_walk_through_work(user_dir: Path) -> None:
    from minivllm import LLM, SamplingParams

    options, params = written(user_dir), SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[5, 6, 7]] * 4
    small = ["cache.block_size=4", "cache.num_blocks=24"]
    with LLM(device="cpu", batching="patient", overrides=small, config_dir=options) as llm:
        llm.generate(prompts, params)
        assert llm.engine.scheduler.preemption.free == 0.25
    evicting = [*small, "cache.eviction_budget=32", "cache.eviction.step=3"]
    with LLM(device="cpu", cache="every_other", overrides=evicting, config_dir=options) as llm:
        llm.generate(prompts, params)
        assert llm.engine.cache.counters.blocks_evicted > 0


def test_the_users_proposer_of_the_walk_through_works(user_dir: Path) -> None:
    from minivllm import LLM, SamplingParams

    options, params = written(user_dir), SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[5, 6, 7]] * 2
    with LLM(device="cpu") as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    knobs = ["speculative.adaptive=false", "speculative.num_speculative_tokens=2"]
    with LLM(device="cpu", speculative="last_time", overrides=knobs, config_dir=options) as llm:
        outputs = llm.generate(prompts, params)
        counters = llm.engine.launcher.speculation.counters
        propose = llm.engine.launcher.speculation.proposer.propose
        assert propose(SimpleNamespace(token_ids=[1, 2, 3, 4, 1]), 2) == [2, 3]
        assert propose(SimpleNamespace(token_ids=[1, 2, 3, 3]), 2) == [3]
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert counters.num_drafts > 0 and set(counters.drafts_of_length) <= {1, 2}


def test_the_users_metric_of_the_walk_through_works(user_dir: Path) -> None:
    (node,) = compose.compose(["measure=gaps"], written(user_dir))["measure"]["metrics"].values()
    trace = RequestTrace("a", input_tokens=3, scheduled_s=0.0)
    trace.token_times = [1.0, 2.0, 5.0]
    assert compose.build(node).samples(trace) == [3000.0]
    assert compose.build({**node, "after": 3}).samples(trace) == []


def test_the_users_pass_of_the_walk_through_works(user_dir: Path) -> None:
    from minivllm import LLM

    source = next(
        block
        for block in blocks(REFERENCE / "configuration.md", "python")
        if "class SofterNorm" in block
    )
    (user_dir / "my_passes.py").write_text(source)
    passes = "runtime.passes=[{_target_: my_passes.SofterNorm, eps: 1e-3}]"
    with LLM("tiny", device="cpu", overrides=[passes]) as llm:
        (report,) = (one for one in llm.engine.loaded.passes if one.name == "softer_norm")
        assert report.count == 2 * llm.engine.loaded.config.num_layers + 1


@each_page
def test_what_an_example_imports_is_there(page: Path) -> None:
    """Of this package; the examples of optional packages are not run."""
    for source in blocks(page, "python"):
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.ImportFrom)
                and str(node.module).partition(".")[0] == "minivllm"
            ):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_examples_of_the_python_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    sources = blocks(GUIDES / "python.md", "python")
    for source in sources:
        exec(compile(source, "python.md", "exec"), {})
    assert len(sources) == 4 and "first token after" in capsys.readouterr().out


def test_the_notebook_runs_and_is_shown_with_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    notebook = DOCS / "notebooks" / "own_figure.ipynb"
    cells = [
        cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    monkeypatch.chdir(notebook.parent)
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
    assert len(names["axes"].lines) == 4 and names["output"].outputs[0].token_ids
    matplotlib.pyplot.close(names["figure"])
    assert all(
        cell["execution_count"] and cell["outputs"]
        for cell in cells
        if "import" not in cell["source"][0]
    )
    assert notebook.stat().st_size < 200_000


def test_the_study_of_ones_own_is_a_study(user_dir: Path, cli: Callable[..., Any]) -> None:
    (preset,) = blocks(GUIDES / "studies.md", "yaml")
    folder = user_dir / "conf" / "preset"
    folder.mkdir()
    (folder / "night.yaml").write_text(preset)
    done = cli(f"--config-dir={user_dir / 'conf'}", "preset=night", "sweep.dry_run=true")
    assert done.code == 0 and "5 of 5 measurements" in done.out, done.err
    (folder / "late.yaml").write_text(f"# a remark\n{preset}")
    done = cli(f"--config-dir={user_dir / 'conf'}", "preset=late", "sweep.dry_run=true")
    assert (
        done.code == 2
        and "preset/late.yaml overrides workload, as only a file can whose first line is"
        in done.err
    )


# ---- models


def test_every_architecture_and_option_is_in_the_table_of_models() -> None:
    text = section(REFERENCE / "models.md", "Families")
    options = {file.stem for file in (compose.conf_dir() / "model").glob("*.yaml")} - {"hf"}
    assert [
        name for name in (*supported_architectures(), *sorted(options)) if f"`{name}`" not in text
    ] == []
    kinds = section(REFERENCE / "models.md", "Rope")
    assert set(re.findall(r"^\| `(\w+)` \|", kinds, re.MULTILINE)) == set(ROPE_KINDS)


def test_a_new_family_is_as_small_as_its_walk_through_says() -> None:
    """The diff shown is in the files as they are, names every line of the package about the family,
    and is short."""
    added: list[str] = []
    for diff in blocks(GUIDES / "adding-a-model.md", "diff"):
        header, _, body = diff.partition("\n")
        text = (ROOT / header.removeprefix("+++ ")).read_text()
        for hunk in body.split("\n@@\n"):
            lines = [line[1:] for line in hunk.splitlines() if line.startswith("+")]
            assert "\n".join(lines) in text, header
            added += lines
    assert 0 < len(added) < 150
    package = [
        line for file in (ROOT / "minivllm").rglob("*.py") for line in file.read_text().splitlines()
    ]
    assert [line for line in package if "Phi3" in line and line not in added] == []


# ---- records


@each_page
def test_tables_and_figures_are_those_of_code_and_records(page: Path) -> None:
    """`python scripts/docs_tables.py` writes them: every marked table and number is that of the
    code, of committed records, or of a file that a script wrote."""
    text = page.read_text(encoding="utf-8")
    assert docs_tables.filled(text) == text


def test_every_kind_of_mark_is_found() -> None:
    marks = {kind for page in PAGES for _, kind, *_ in marked(page.read_text(encoding="utf-8"))}
    assert marks == {*docs_tables.KINDS}
    assert docs_tables.filled("<!-- file: structure.json before.files ,.0f -->7<!-- end -->") == (
        "<!-- file: structure.json before.files ,.0f -->681<!-- end -->"
    )


def test_every_part_of_a_record_has_its_table() -> None:
    text = (REFERENCE / "records.md").read_text(encoding="utf-8")
    named = [name for _, kind, name, _ in marked(text) if kind == "fields"]
    assert sorted(named) == sorted(docs_tables.classes())
    figures = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    assert [figures.count(f"| `{figure.name}` |") for figure in glossary()] == [1] * len(glossary())


def test_statuses_and_provenance_are_described() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|", section(REFERENCE / "records.md", "Statuses"), re.MULTILINE
    )
    assert sorted(rows) == sorted([*record.STATUSES, "status"])
    names = [name for name, _ in ROW.findall(section(REFERENCE / "records.md", "Provenance"))]
    assert names == list(provenance({"runtime": {"device": "cpu"}}, "code"))


def test_the_columns_of_the_tables_are_described() -> None:
    text = section(REFERENCE / "records.md", "The tables beside it") + section(
        REFERENCE / "records.md", "Breakdown"
    )
    columns = [*metrics.request_rows([RequestTrace("r0", 1, 0.0)])[0], *StepTimed._fields]
    columns += Telemetry(os.getpid(), NullGpu()).sample() or {}
    assert [name for name in columns if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "name",
    sorted(
        path.name.removesuffix(archive.SUFFIX)
        for path in (EXAMPLES / "runs").iterdir()
        if archive.is_archive(path)
    ),
)
def test_committed_tables_are_rebuilt_from_their_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.pictures import unpainted
    from tests.report.pagereader import build_report

    # Pictures, which take most of the time, are no tables.
    monkeypatch.setattr("minivllm.report.page.figures", lambda inputs: [])
    monkeypatch.setattr("minivllm.report.page.finish", unpainted)
    build_report(EXAMPLES / "runs" / f"{name}{archive.SUFFIX}", tmp_path)
    written = {path.name for folder in (tmp_path, EXAMPLES / name) for path in folder.glob("*.md")}
    if EXAMPLES / name == PAGE.parent:
        written.add("table.csv")
    for table in written:  # precision.md only where quality was measured
        assert (tmp_path / table).read_text() == (EXAMPLES / name / table).read_text(), table


SHOWN = re.compile(r"!\[[^]]*\]\(\S*reports/examples/cpu/([\w-]+)/")


@each_page
def test_a_busy_block_is_said_wherever_its_figure_is_quoted(page: Path) -> None:
    """In the section of a latency, a rate or a picture; counts and quality are what they are."""
    for section in re.split(r"(?m)^(?=#+ )", page.read_text(encoding="utf-8")):
        quoted = [
            record
            for _, kind, words, _ in marked(section)
            if kind == "record" and re.match(r"\S+ (metrics\.|\S+_ms )", words)
            for record in named(words.split()[0])
        ]
        for name in SHOWN.findall(section):
            if (EXAMPLES / "runs" / f"{name}{archive.SUFFIX}").exists():
                quoted += records_of(name)
        if any(shared(record["validity"]["notes"]) for record in quoted):
            assert re.search(r"\bbusy\b|other processes", section), section.splitlines()[0]


def test_pictures_are_drawn_from_the_records_and_shown() -> None:
    figures = load_script("docs_figures")
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, picture in figures.PICTURES.items():
        assert f"images/{picture.file.name})" in text and picture.file.exists(), name
        if name not in figures.ON_PAGES:
            assert picture.draw(*picture.paths).startswith(b"\x89PNG"), name


def test_simulated_cells_are_as_near_to_measured_ones_as_is_said() -> None:
    arms = [
        f"[arrival.concurrency={n},batching={b}]"
        for n in (3, 8, 24)
        for b in ("continuous", "static")
    ]
    for arm in arms:
        for names, most in (
            ("output_tokens_per_s", 0.07),
            ("ttft_ms.p50", 0.07),
            ("ttft_ms.p99", 0.15),
        ):
            measured, predicted = (
                fmean(
                    value(record, f"metrics.{names}") for record in named(f"simulation-{kind}{arm}")
                )
                for kind in ("measured", "predicted")
            )
            assert abs(predicted / measured - 1) < most, f"{arm} {names}"
