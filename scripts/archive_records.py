"""Pack the records of sweeps, one file each, that a report, a comparison and `load_records` read in
place of the folder.

    python scripts/archive_records.py runs/precision            # writes runs/precision.tar.xz
    python scripts/archive_records.py runs/a runs/b --output reports/examples/cpu/runs
    python scripts/archive_records.py runs/fit --all-steps      # for engine.steps=FILE
    python scripts/archive_records.py runs/many --first-requests  # of many cells
    python scripts/archive_records.py runs/many --without steps requests  # a table needs none

An archive has each record.json, its tables and events, every value as it was recorded. Pages draw
steps and telemetry of a cell's first block alone, so those of later blocks are left out, and their
events, unless --all-steps is given; --without leaves out tables of every block, and a page has no
figure of them. The record names what was left out in `slimmed` and has the digests of its tables as
they are packed. Logs, traces, plans and workloads are left out, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from program import exit_code, new_parser

from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records import archive
from minivllm.bench.records.events import LARGEST, read_events
from minivllm.bench.records.reading import read_json
from minivllm.bench.records.schema import migrated
from minivllm.bench.records.storage import EVENTS, RECORD, REQUESTS, STEPS, TABLES, TELEMETRY
from minivllm.bench.records.tables import read_table
from minivllm.errors import BadInput
from minivllm.platform import files

DRAWN_ONCE = (STEPS, TELEMETRY, EVENTS)  # of which pages draw a cell's first block
DROPPABLE = {name.partition(".")[0]: name for name in TABLES}  # by what --without calls them
ORDER = (
    RECORD,
    REQUESTS,
    STEPS,
    TELEMETRY,
    EVENTS,
)  # in an archive: what is alike lies together, and is packed better


def packed_table(directory: Path, name: str, digest: str | None) -> bytes:
    """A table in few bytes once it is packed: plain columns, of floats byte by byte."""
    import pyarrow
    import pyarrow.parquet

    table = read_table(directory, name, digest)
    floats = []
    for column in table.schema:
        if pyarrow.types.is_floating(column.type):
            floats.append(column.name)
        elif pyarrow.types.is_list(column.type) and pyarrow.types.is_floating(
            column.type.value_type
        ):
            floats.append(f"{column.name}.list.element")
    sink = io.BytesIO()
    plain = {
        "compression": "none",
        "use_dictionary": False,
        "write_statistics": False,
        "store_schema": False,
    }
    pyarrow.parquet.write_table(table, sink, use_byte_stream_split=floats, **plain)
    content = sink.getvalue()
    if not pyarrow.parquet.read_table(io.BytesIO(content)).equals(table):
        raise BadInput(f"{directory / name} would not be read as it is")
    return content


def packed_record(row: dict[str, Any], left_out: tuple[str, ...]) -> dict[str, bytes]:
    """The files of a record by name: its tables and events that are not left out, and record.json,
    in the present schema."""
    directory = Path(row["directory"])
    found = {
        name: packed_table(directory, name, row.get(f"digests.{name}"))
        for name in TABLES
        if name not in left_out and archive.exists(directory / name)
    }
    if EVENTS not in left_out and archive.exists(directory / EVENTS):
        read_events(directory, {EVENTS: row[f"digests.{EVENTS}"]})
        found[EVENTS] = archive.read_bytes(directory / EVENTS, LARGEST, EVENTS)
    record = migrated(read_json(directory / RECORD))
    slimmed = {
        *(record.get("slimmed") or ()),
        *(n for n in left_out if archive.exists(directory / n)),
    }
    record["digests"] = {
        name: hashlib.sha256(content).hexdigest() for name, content in found.items()
    }
    record["slimmed"] = sorted(slimmed) or None
    return {RECORD: json.dumps(record, indent=1).encode() + b"\n", **found}


def pack(
    source: Path,
    target: Path,
    all_steps: bool = False,
    first_requests: bool = False,
    without: Sequence[str] = (),
) -> int:
    """Write the archive of a sweep's folder, or of another archive.

    Args:
        without: file names of tables that no record of it keeps.

    Returns:
        How many records it has.

    Raises:
        BadInput: a record or a table of it cannot be read.
    """
    rows, unreadable = read_rows(source)
    if unreadable:
        raise BadInput(f"{unreadable[0]}: {unreadable[0].reason}")
    first = {cell.ok[0]["directory"] for cell in gather(rows) if cell.ok}
    members: dict[tuple[int, str], bytes] = {}
    for row in rows:
        later = (*(() if all_steps else DRAWN_ONCE), *([REQUESTS] if first_requests else []))
        left_out = (*without, *(() if row["directory"] in first else later))
        for name, content in packed_record(row, left_out).items():
            members[ORDER.index(name), f"{Path(row['directory']).name}/{name}"] = content
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for (_, name), content in sorted(members.items()):
            # of no time and no owner: the same records are the same bytes
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    content = lzma.compress(sink.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    files.atomically(target, lambda path: path.write_bytes(content) and None)  # type: ignore[arg-type, return-value]
    return len(rows)


def main() -> None:
    """Entry point; see the module's docstring. Raises BadInput, see `pack`."""
    parser = new_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of sweeps, or archives")
    parser.add_argument(
        "--output", type=Path, help="folder of the archives; beside each sweep by default"
    )
    parser.add_argument(
        "--all-steps", action="store_true", help="keep steps and telemetry of every block"
    )
    parser.add_argument(
        "--first-requests", action="store_true", help="leave out the requests of later blocks"
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=sorted(DROPPABLE),
        help="tables that are left out of every block",
    )
    given = parser.parse_args()
    without = [DROPPABLE[name] for name in given.without]
    for source in given.runs:
        name = source.name.removesuffix(archive.SUFFIX) + archive.SUFFIX
        target = (given.output or source.parent) / name
        count = pack(source, target, given.all_steps, given.first_requests, without)
        print(f"{target}: {count} records, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(exit_code(main))
