"""Requests wait for their grammar, and others do not."""

from __future__ import annotations

import threading
from typing import Any

from minivllm.engine.options import SamplingParams, StructuredOutputs
from minivllm.errors import BadInput
from minivllm.processes.messages import Submit
from minivllm.serving.processes.grammar_compiler import GrammarCompiler


class Grammars:
    """Grammars whose compilation a test releases; one that begins with ( is wrong."""

    def __init__(self) -> None:
        self.released = threading.Semaphore(0)
        self.known = {StructuredOutputs(regex="known")}

    def tokenizer(self) -> None:
        raise BadInput("there is none")

    def compiled(self, outputs: StructuredOutputs) -> bool:
        return outputs in self.known

    def compile(self, outputs: StructuredOutputs) -> None:
        assert self.released.acquire(timeout=60)
        if outputs.regex == "(":
            raise BadInput("wrong")
        self.known.add(outputs)


def submit(request_id: str, regex: str) -> Submit:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex=regex))
    return Submit(request_id, [1], params)


def finished(compiler: GrammarCompiler) -> list[tuple[str, str | None]]:
    """What has finished, once something has."""
    found: list[Any] = []
    while not found:
        found = compiler.finished()
    return [(message.request_id, error and str(error)) for message, error in found]


def test_only_new_grammars_wait() -> None:
    grammars = Grammars()
    compiler = GrammarCompiler(grammars)  # type: ignore[arg-type]
    assert not compiler.takes(submit("b", "known")) and not compiler.waiting
    for request_id, regex in (("c", "new"), ("left", "newer"), ("d", "(")):
        assert compiler.takes(submit(request_id, regex))
    assert compiler.waiting and compiler.finished() == []
    assert not compiler.takes(submit("e", "known"))
    compiler.drop("left")
    compiler.drop("unknown")
    grammars.released.release()
    assert finished(compiler) == [("c", None)]
    assert not compiler.takes(submit("f", "new"))
    grammars.released.release()
    assert finished(compiler) == [("d", "wrong")]
    assert not compiler.waiting


def test_a_large_grammar_does_not_hold_small_ones() -> None:
    held = threading.Event()

    class Slow(Grammars):
        def compile(self, outputs: StructuredOutputs) -> None:
            if outputs.choice is not None:
                assert held.wait(60)

    compiler = GrammarCompiler(Slow())  # type: ignore[arg-type]
    large = StructuredOutputs(choice=tuple(f"text {number}" for number in range(5000)))
    params = SamplingParams(structured_outputs=large)
    assert compiler.takes(Submit("large", [1], params)) and compiler.takes(submit("small", "a"))
    assert finished(compiler) == [("small", None)]
    held.set()
    assert finished(compiler) == [("large", None)]
