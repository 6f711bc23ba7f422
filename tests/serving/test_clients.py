"""The clients that people point at a server, as npm installs them: Claude Code, Codex and the AI
SDK, each with a question, a tool call, and a conversation that outgrows the context.

`make clients` installs them. Nothing but this machine is reached."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serving.scripted import ScriptedClient, scripted

HERE = Path(__file__).resolve().parent / "clients"
PACKAGES = Path(sys.prefix) / "clients"
SECONDS = 120.0  # for one command
QUESTION, ANSWER = "What is 2+2?", "Four, says the script."
FOUND = "It says heron."
SUMMARY = "We spoke of many signs."
# What the two agents ask for when their context is full.
COMPACTIONS = ("create a detailed summary of", "CONTEXT CHECKPOINT COMPACTION")
# The tool of each client that reads a file, as its name stands in the prompt, and the arguments.
READERS = {
    '"name": "Read"': ("Read", {"file_path": "{folder}/note.txt"}),
    '"name": "exec_command"': ("exec_command", {"cmd": "cat note.txt"}),
    '"name": "read"': ("read", {"path": "note.txt"}),
}

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        shutil.which("node") is None or not (PACKAGES / "node_modules").is_dir(),
        reason="needs Node.js and the clients of npm: make clients",
    ),
]


@dataclass
class Agent:
    """A folder with a file, in which the clients run, and the server that they are pointed at."""

    url: str
    engine: ScriptedClient
    folder: Path

    def run(self, *command: str, text: str = "") -> str:
        """What a command writes to stdout. It sees no settings of this machine's user, and finds a
        closed port where it would reach out."""
        closed = "http://127.0.0.1:9"
        known = {
            **{
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "CODEX_HOME": str(self.folder),
            },
            **{"HTTP_PROXY": closed, "HTTPS_PROXY": closed, "NO_PROXY": "127.0.0.1", "KEY": "none"},
            **{"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_AUTH_TOKEN": "none"},
            **{"ANTHROPIC_MODEL": "scripted", "ANTHROPIC_SMALL_FAST_MODEL": "scripted"},
            **{"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
            **{"DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1"},
        }
        done = subprocess.run(
            command,
            input=text,
            cwd=self.folder,
            env=known,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def claude(self, *words: str, text: str) -> str:
        """The answer of Claude Code to a prompt."""
        return self.run(str(PACKAGES / "node_modules/.bin/claude"), "-p", *words, text=text).strip()

    def codex(self, *words: str, text: str) -> str:
        """The last message of Codex in a turn."""
        provider = f'{{name="m",base_url="{self.url}/v1",wire_api="responses",env_key="KEY"}}'
        settings = {
            **{"model_provider": "m", "model_providers.m": provider, "model": "scripted"},
            **{"model_context_window": "200000", "sandbox_mode": "danger-full-access"},
            **{"analytics.enabled": "false", "check_for_update_on_startup": "false"},
        }
        options = [part for name in settings for part in ("-c", f"{name}={settings[name]}")]
        command = [str(PACKAGES / "node_modules/.bin/codex"), "exec", *words, *options]
        last = self.folder / "last.txt"
        self.run(*command, "--skip-git-repo-check", "-o", str(last), "-", text=text)
        return last.read_text().strip()


def scripts(folder: Path) -> Callable[[str], str]:
    """What the model answers to the end of a conversation."""

    def answer(prompt: str) -> str:
        end = prompt.rpartition("<|user|>")[2]
        if "<|tool|>" in end:
            return FOUND if "heron" in end else "The tool has not found it."
        if any(words in end for words in COMPACTIONS):
            return f"<summary>{SUMMARY}</summary>"
        if "note.txt" not in end:
            return ANSWER
        name, arguments = next(READERS[mark] for mark in READERS if mark in prompt)
        call = json.dumps({"name": name, "arguments": arguments}).replace("{folder}", str(folder))
        return f"I look.\n<tool_call>\n{call}\n</tool_call>"

    return answer


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    (tmp_path / "note.txt").write_text("The word is heron.\n")
    (tmp_path / "model").mkdir()
    with scripted(tmp_path / "model", scripts(tmp_path)) as (url, engine):
        yield Agent(url, engine, tmp_path)


def assert_compacted(agent: Agent) -> None:
    """The conversation was summed up, and went on without what had filled the context."""
    before, after = agent.engine.prompts[-2:]
    assert any(words in before for words in COMPACTIONS)
    assert SUMMARY in after and len(after) < len(before)


def test_claude_code_asks_and_reads_a_file(agent: Agent) -> None:
    assert agent.claude(text=QUESTION) == ANSWER
    assert agent.claude("--allowedTools", "Read", text="What does note.txt say?") == FOUND


def test_claude_code_compacts_when_the_prompt_is_too_long(agent: Agent) -> None:
    assert agent.claude(text=" =" * 145_000 + QUESTION) == ANSWER
    assert agent.claude("--continue", text=QUESTION) == ANSWER  # it compacts no single exchange
    assert agent.claude("--continue", text=" =" * 40_000 + QUESTION) == ANSWER
    assert_compacted(agent)


def test_codex_asks_and_reads_a_file(agent: Agent) -> None:
    assert agent.codex(text=QUESTION) == ANSWER
    assert agent.codex(text="What does note.txt say?") == FOUND


def test_codex_compacts_when_the_context_is_full(agent: Agent) -> None:
    assert agent.codex(text=" =" * 180_000 + QUESTION) == ANSWER
    assert agent.codex("resume", "--last", text=QUESTION) == ANSWER
    assert_compacted(agent)


def test_the_ai_sdk_reads_every_api(agent: Agent) -> None:
    out = agent.run("node", str(HERE / "ai_sdk.mjs"), str(PACKAGES), agent.url)
    found: dict[str, Any] = json.loads(out)
    assert set(found) == {"chat", "completions", "responses", "messages", "compatible"}
    for name, one in found.items():
        assert one["question"] == one["streamed"] == ANSWER
        code = "invalid_request_error" if name == "messages" else "context_length_exceeded"
        assert one["tooLong"] == [400, code]
        if name != "completions":
            assert one["called"] == one["streamedCall"] == FOUND
            assert one["inputs"] == [{"path": "note.txt"}]
