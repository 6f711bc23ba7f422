"""How the programs in scripts/ begin and end."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from minivllm.errors import BadInput
from tests.scripts.load import load_script

program = load_script("program")
exit_code, output_file = program.exit_code, program.output_file


def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise BadInput("this\nis wrong")

    assert exit_code(main) == 2
    assert capsys.readouterr().err == "error: this is wrong\n"


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (3, 3), ("done", 0)])
def test_a_number_is_the_exit_code(result: object, code: int) -> None:
    assert exit_code(lambda: result) == code


def test_an_error_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 / 0)


def test_a_file_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=output_file)
    there = tmp_path / "there.json"
    assert parser.parse_args(["--out", str(there)]).out == there and not there.exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parser.parse_args(["--out", "~/there.json"]).out == there
    for wrong, said in (
        (tmp_path, f"{tmp_path} is a folder; give a file"),
        (tmp_path / "no" / "x.json", f"there is no folder {tmp_path}/no"),
        (there, f"{there} may not be written"),
    ):
        if wrong == there:
            monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(["--out", str(wrong)])
        assert stop.value.code == 2 and said in capsys.readouterr().err
