"""Tables of prompts: CSV, Parquet, packed files and saved datasets give what JSON lines give."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minivllm.bench.records.identity import cell_id
from minivllm.bench.workloads.from_file.file import File
from minivllm.bench.workloads.workload import Workload
from minivllm.errors import BadInput

ROWS: list[dict[str, Any]] = [
    {"prompt": 'one, "two"\nthree', "max_tokens": 3, "temperature": 0.5},
    {"prompt": "12", "max_tokens": None, "temperature": None},
]


def generate(path: Path, **knobs: Any) -> Workload:
    made = File(str(path), **knobs)
    made.check_lengths(400)
    return made.generate(lambda text: list(text.encode()), 256, 400, seed=0)


def save(folder: Path, rows: list[dict[str, Any]], pieces: int = 1) -> Path:
    """A folder as save_to_disk writes it."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    names = []
    for piece in range(pieces):
        names.append(f"data-{piece:05}-of-{pieces:05}.arrow")
        part = table.slice(piece * len(rows) // pieces, len(rows) // pieces)
        with pa.ipc.new_stream(str(folder / names[-1]), table.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def written(kind: str, folder: Path) -> Path:
    """The rows in a file of this kind."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    table = b'prompt,max_tokens,temperature\r\n"one, ""two""\nthree",3,0.5\r\n12,,\r\n'
    if kind == "dataset":
        return save(folder / "saved", ROWS, pieces=2)
    path = folder / f"prompts.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        data = table if "csv" in kind else lines
        path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "csv.gz", "parquet", "dataset"])
def test_every_kind_of_file_gives_the_same_requests(kind: str, tmp_path: Path) -> None:
    work = generate(written(kind, tmp_path), output_len=7)
    assert [(r.text, r.max_tokens, r.sampling) for r in work.requests] == [
        ('one, "two"\nthree', 3, {"temperature": 0.5}),
        ("12", 7, None),
    ]
    assert work.notes == ()


def test_a_saved_dataset_of_several_splits_needs_the_name_of_one(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    for name in ("train", "test"):
        save(folder / name, [{"prompt": name}])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert [r.text for r in generate(folder, split="test").requests] == ["test"]
    for knobs in ({}, {"split": "../train"}):
        with pytest.raises(BadInput, match=r"holds train, test splits; say which one"):
            generate(folder, **knobs)
    with pytest.raises(BadInput, match=r"split=test: .*holds one dataset"):
        generate(folder / "train", split="test")
    with pytest.raises(BadInput, match=r"split=test: .*is no saved dataset"):
        generate(written("csv", tmp_path), split="test")


def test_a_saved_dataset_that_changes_is_read_again_and_is_another_cell(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [{"prompt": "a"}])
    config = {"workload": {"path": str(folder)}}
    before, same = cell_id(config, "f"), cell_id(config, "f")
    generate(folder)
    save(tmp_path / "new", [{"prompt": 3}])
    for file in (tmp_path / "new").iterdir():
        file.rename(folder / file.name)
    assert before == same != cell_id(config, "f")
    with pytest.raises(BadInput, match="saved: row 1: prompt must be a non-empty string"):
        generate(folder)


def test_what_hugging_face_has_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"dev": made}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "several"):
        assert [r.text for r in generate(tmp_path / name).requests] == ['one, "two"\nthree', "12"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt,prompt\nx,y\n", "a.csv:1: the header has prompt twice; leave one"),
        ("a.csv", b"prompt,max_tokens\nx\n", "a.csv:2: 1 of 2 columns; is the file cut off"),
        ("a.csv", b"prompt\nx,y\n", "a.csv:2: the row has 2 cells and the header 1"),
        ("a.csv", b'prompt\n"x"y\n', "a.csv:2: not valid CSV"),
        ("a.csv", b"prompt,max_tokens\nx,1,\n", "a.csv:2: the row has 3 cells and the header 2"),
        ("a.csv", b"prompt,max_tokens\n,,\n", "a.csv:2: the row has 3 cells and the header 2"),
        ("a.csv", b"prompt,a,a\nx,1,1\n", "a.csv:1: the header has a twice"),
        ("a.csv", b"prompt\n\xff\n", "a.csv:2: not UTF-8"),
        ("a.csv", b"prompt,max_tokens\nx,many\n", "a.csv:2: max_tokens='many' must be a whole"),
        ("a.csv", b"prompt\n", "holds no prompts"),
        ("a.parquet", b"PAR1" + bytes(20), "is no Parquet file that can be read"),
        ("a.csv.gz", gzip.compress(b"prompt\nx\n", mtime=0)[:-6], "cannot be read"),
    ],
)
def test_a_damaged_table_is_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        generate(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("state", "message"),
    [("{}", "lists no files"), ('{"_data_files": [{"filename": "../x"}]}', "lists no files")],
)
def test_a_damaged_dataset_is_one_line(tmp_path: Path, state: str, message: str) -> None:
    folder = save(tmp_path / "saved", [{"prompt": "a"}])
    (folder / "state.json").write_text(state)
    with pytest.raises(BadInput, match=message):
        generate(folder)
    save(tmp_path / "again", [{"prompt": "a"}])
    (tmp_path / "again" / "data-00000-of-00001.arrow").write_bytes(b"nothing of the sort")
    with pytest.raises(BadInput, match=r"data-00000-of-00001\.arrow cannot be read"):
        generate(tmp_path / "again")


def test_names_of_files_are_shown_without_control_characters(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [{"prompt": "a"}])
    name = "\x1b]0;title\x07data.arrow"
    (folder / name).write_bytes(b"nothing of the sort")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(BadInput, match=r": data\.arrow cannot be read") as caught:
        generate(folder)
    assert str(caught.value).isprintable()


def test_cells_of_lists_and_messages_are_json(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        'prompt_token_ids,messages,stop\n"[1, 2]",,"[""a"", ""b""]"\n'
        ',"[{""role"": ""user"", ""content"": ""hi""}]",\n'
    )
    ids, chat = generate(path).requests
    assert ids.prompt_token_ids == (1, 2) and ids.sampling == {"stop": ["a", "b"]}
    assert chat.text == "user: hi\nassistant:"
