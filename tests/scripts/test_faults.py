"""scripts/faults.py: one of its cases, and what it says of others."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile

import pytest

from tests.forked import ForkedPopen, fork_known, popen, template
from tests.scripts.load import load_script

faults = load_script("faults")


def test_a_cut_connection_ends_for_both_ends() -> None:
    ours, theirs = socket.socketpair()
    program = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"
    words = [sys.executable, "-c", program, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(words, pass_fds=[theirs.fileno()]) as process:
        try:
            faults.cut(process.pid)
        except OSError as error:
            process.kill()
            pytest.skip(f"connections of other processes cannot be had: {error}")
        assert ours.recv(1) == b"" and process.wait(60) == 0


def test_what_is_not_so_stands_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*case: object) -> None:
        raise AssertionError("the last request ended after 20.0 s")

    def skip(*case: object) -> None:
        raise faults.NotPermitted("not root")

    rows = []
    for run in (fail, skip, lambda *case: {"right": 4, "errors": 0, "last_after_s": 9.5}):
        monkeypatch.setattr(faults, "run_case", run)
        rows.append(faults.row_of("host_rank", "decoding", "cut", 0))
    assert [" ".join(line.split()) for line in faults.table(rows).splitlines()[1:]] == [
        "host_rank decoding cut the last request ended after 20.0 s",
        "host_rank decoding cut two hosts need network namespaces: not root",
        "host_rank decoding cut 4 0 9.5",
    ]
    of_sort = {"faults": 2, "failures": 1, "right": 4, "errors": 0}
    most = {"last_after_s": 9.5, "undisturbed_s": 0.0}
    assert faults.summary(rows) == {"host_rank": {**of_sort, "most": most}}


def test_each_sort_meets_each_fault_and_the_link_of_hosts_is_cut() -> None:
    found = [*faults.cases(faults.SORTS, faults.MOMENTS, faults.FAULTS)]
    assert len(found) == len(set(found)) == 7 * 12 + 2 * 4
    assert {fault for name, _, fault in found if name.startswith("host_")} == {"cut"}


@pytest.mark.real
@pytest.mark.parametrize(
    ("sort", "fault"), [("replica", "kill"), ("host_actor", "cut")], ids=["process", "host"]
)
def test_a_replica_that_is_gone_costs_no_request(
    sort: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed; an actor of Ray on another host, when the link to it is cut."""
    if sort == "host_actor":
        pytest.importorskip("ray")
    if sort != "host_actor":  # a fork is where its template is
        fork_known(monkeypatch)
        if popen() is ForkedPopen:
            template()  # which stays
    with tempfile.TemporaryDirectory(prefix="k") as own:
        monkeypatch.setattr(tempfile, "tempdir", own)
        monkeypatch.setenv("TMPDIR", own)
        monkeypatch.setattr(faults, "TOKENS", 200)  # which take longer than cutting a link
        try:
            row = faults.run_case(sort, "decoding", fault, 0)
        except faults.NotPermitted as error:
            pytest.skip(f"network namespaces are not permitted: {error}")
    assert row["right"] == faults.CLIENTS and "of 2 has stopped" in row["says"]
