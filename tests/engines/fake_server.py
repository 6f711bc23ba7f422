"""A small server that speaks OpenAI's completions API, and can go wrong: `python fake_server.py
'{"port": 0, ...}'`.

Settings: port (0 finds a free one, printed), delay_s before it listens, ids (whether it takes and
tells token ids), per_chunk (tokens of a chunk), continuous ("usage" or "timings" on each chunk, for
who asks; "strict" refuses that), usage (False: none at the end), end_s (from the last token to the
end), fault ("refuse" every request, "die" in mid-stream, "error" in mid-stream, "endless": no
reason is given for the end), path (of a file that every request body is appended to), reset (a path
that may be POSTed to), kept (how often that one says that it did nothing), step_s, extra_prompt
(tokens that it counts besides the prompt's), redirect (where every request is sent instead), models
(the bytes that answer /models; "endless" for ones without an end), events (instead of tokens:
strings as they are, other values as JSON events; "..." repeats the one before for ever, a thousand
times a second at most, "silence" waits), with the probes answered as always; chat (deltas that
answer every request to the chat API, without which there is none; "silence" waits for a second at
most), thinks (how many tokens of thoughts come before an answer by the chat or responses API, whose
answers are then of as many tokens as are asked for), calls (the answer calls a tool), details
(False: how many tokens were thoughts is not told), strict (names of fields that a request may not
have).
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

POLL_S = 0.01  # how soon a server in a thread ends
REPEAT_S = 0.001  # between events that are repeated


class Handler(BaseHTTPRequestHandler):
    settings: dict[str, Any] = {}
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.plain(status, json.dumps(body).encode())

    def redirected(self) -> bool:
        if target := self.settings.get("redirect"):
            self.send_response(307)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return bool(target)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def plain(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @property
    def route(self) -> str:
        return self.path.partition("?")[0]

    def do_GET(self) -> None:
        if self.redirected():
            return None
        if (models := self.settings.get("models")) is not None and models != "endless":
            return self.plain(200, models.encode())
        if models == "endless":
            self.begin()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"A" * (1 << 20))
        if self.route != "/v1/models":
            return self.answer(404, {"error": {"message": "no such path"}})
        self.answer(
            200, {"data": [{"id": "small", "max_model_len": self.settings.get("context", 512)}]}
        )

    def do_POST(self) -> None:
        if self.redirected():
            return None
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.settings.get("path"):
            with open(self.settings["path"], "a") as file:
                file.write(
                    json.dumps({"at": self.path, "key": self.headers["Authorization"], **body})
                    + "\n"
                )
        if unknown := sorted(body.keys() & set(self.settings.get("strict", ()))):
            return self.answer(400, {"error": {"message": f"unknown field {unknown[0]}"}})
        if self.path == self.settings.get("reset"):
            self.settings["kept"] = self.settings.get("kept", 0) - 1
            return self.answer(200, {"success": self.settings["kept"] < 0})
        if self.route == "/v1/chat/completions" and "chat" in self.settings:
            return self.chat(self.settings["chat"])
        if self.route in ("/v1/chat/completions", "/v1/responses") and "thinks" in self.settings:
            self.begin()
            with contextlib.suppress(OSError):
                (self.think if "messages" in body else self.respond)(body)
            return None
        if self.route != "/v1/completions":
            return self.answer(404, {"error": {"message": "no such path"}})
        if self.settings.get("fault") == "refuse":
            return self.answer(400, {"error": {"message": "this model is not for you"}})
        ids = self.settings.get("ids", True)
        if not ids and not isinstance(body["prompt"], str):
            return self.answer(422, {"detail": "prompt must be a string"})
        counting = body["stream_options"].get("continuous_usage_stats") or body.get(
            "timings_per_token"
        )
        if counting and self.settings.get("continuous") == "strict":
            return self.answer(400, {"error": {"message": "no such option"}})
        self.begin()
        with contextlib.suppress(OSError):  # the client may have gone
            if "events" in self.settings and body["max_tokens"] > 2:
                self.misbehave(self.settings["events"])
            else:
                self.stream(body, ids)

    def chat(self, deltas: list[Any]) -> None:
        """Stream these deltas, a reason for the end, and the usage."""
        self.begin()
        with contextlib.suppress(OSError):
            for delta in deltas:
                if delta == "silence":
                    time.sleep(1)
                else:
                    self.event(choices=[{"delta": delta, "finish_reason": None}])
            if self.settings.get("fault") == "endless":
                return
            self.event(choices=[{"delta": {}, "finish_reason": "stop"}])
            self.event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 40})
            self.wfile.write(b"data: [DONE]\n\n")

    def pieces(self, total: int) -> list[tuple[bool, int]]:
        """Chunks of an answer: whether it still thinks, and how many tokens."""
        size, thinks = self.settings.get("per_chunk", 1), min(self.settings["thinks"], total)
        parts = [(True, thinks), (False, total - thinks)]
        return [
            (is_thought, min(size, count - start))
            for is_thought, count in parts
            for start in range(0, count, size)
        ]

    def think(self, body: dict[str, Any]) -> None:
        """An answer of the chat API."""
        total, thoughts = body["max_tokens"], 0
        self.event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for is_thought, count in self.pieces(total):
            time.sleep(self.settings.get("step_s", 0.002))
            thoughts += count * is_thought
            function = {"index": 0, "function": {"arguments": "x" * count}}
            said = {"tool_calls": [function]} if self.settings.get("calls") else None
            said = said or {"content": "x" * count}
            choice: dict[str, Any] = {
                "delta": {"reasoning_content": "x" * count} if is_thought else said
            }
            if self.settings.get("ids", True):
                choice["token_ids"] = list(range(5, 5 + count))
            self.event(choices=[choice])
        reason = "tool_calls" if self.settings.get("calls") else "length"
        self.event(choices=[{"delta": {}, "finish_reason": reason}])
        details = {"completion_tokens_details": {"reasoning_tokens": thoughts}}
        used = {"prompt_tokens": 11, "completion_tokens": total}
        self.event(choices=[], usage=used | (details if self.settings.get("details", True) else {}))
        self.wfile.write(b"data: [DONE]\n\n")

    def respond(self, body: dict[str, Any]) -> None:
        """An answer of the responses API."""
        total, thoughts = body["max_output_tokens"], 0
        self.event(type="response.created", response={"status": "in_progress"})
        for is_thought, count in self.pieces(total):
            time.sleep(self.settings.get("step_s", 0.002))
            if self.settings.get("fault") == "error" and total > 2:
                return self.event(type="error", message="the GPU fell off")
            thoughts += count * is_thought
            kind = "reasoning_text" if is_thought else "output_text"
            self.event(type=f"response.{kind}.delta", delta="x" * count)
        used: dict[str, Any] = {"input_tokens": 11, "output_tokens": total}
        if self.settings.get("details", True):
            used["output_tokens_details"] = {"reasoning_tokens": thoughts}
        details = {"reason": "max_output_tokens"}
        response = {"status": "incomplete", "incomplete_details": details, "usage": used}
        self.event(type="response.incomplete", response=response)

    def misbehave(self, events: list[Any]) -> None:
        data = b""
        for event in events:
            if event == "...":
                while True:
                    self.wfile.write(data)
                    time.sleep(REPEAT_S)
            if event == "silence":
                return time.sleep(60)
            data = event.encode("latin-1") if isinstance(event, str) else self.encoded(event)
            self.wfile.write(data)
        self.wfile.write(b"data: [DONE]\n\n")

    @staticmethod
    def encoded(event: Any) -> bytes:
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def event(self, **event: Any) -> None:
        self.wfile.write(self.encoded(event))
        self.wfile.flush()

    def prompt_usage(self, body: dict[str, Any]) -> dict[str, int]:
        return {"prompt_tokens": len(body["prompt"]) + self.settings.get("extra_prompt", 0)}

    def so_far(self, body: dict[str, Any], tokens: int) -> dict[str, Any]:
        """What a chunk says of the tokens up to its own."""
        kind = self.settings.get("continuous")
        if kind == "usage" and body["stream_options"].get("continuous_usage_stats"):
            return {"usage": {**self.prompt_usage(body), "completion_tokens": tokens}}
        return (
            {"timings": {"predicted_n": tokens}}
            if kind == "timings" and body.get("timings_per_token")
            else {}
        )

    def prompt_details(self) -> dict[str, Any]:
        return {"prompt_tokens_details": {"cached_tokens": 3}}

    def stream(self, body: dict[str, Any], ids: bool) -> None:
        size, total = self.settings.get("per_chunk", 1), body["max_tokens"]
        endless = self.settings.get("fault") == "endless"
        self.wfile.write(b": a comment\n\n")
        for start in range(0, total, size):
            time.sleep(self.settings.get("step_s", 0.002))
            count = min(size, total - start)
            if start >= total // 2 and total > 1:
                if self.settings.get("fault") == "die":
                    return
                if self.settings.get("fault") == "error":
                    return self.event(error={"message": "the GPU fell off"})
            last = start + count == total
            end_s = self.settings.get("end_s")
            over = last and not endless and end_s is None
            choice = {"text": "x" * count, "finish_reason": "length" if over else None}
            if ids:
                choice["token_ids"] = list(range(start + 5, start + 5 + count))
            self.event(choices=[choice], **self.so_far(body, start + count))
        if end_s is not None:
            time.sleep(end_s)
            self.event(choices=[{"text": "", "finish_reason": "length"}])
        usage = {**self.prompt_usage(body), "completion_tokens": total}
        if self.settings.get("usage", True):
            self.event(choices=[], usage={**usage, **self.prompt_details()})
        self.wfile.write(b"data: [DONE]\n\n")


def serve(settings: dict[str, Any]) -> ThreadingHTTPServer:
    """A server that listens; the caller runs it."""
    handler = type("Settled", (Handler,), {"settings": settings})
    server = ThreadingHTTPServer(("127.0.0.1", settings.get("port", 0)), handler)
    server.daemon_threads = True
    return server


def in_thread(**settings: Any) -> tuple[ThreadingHTTPServer, str]:
    """A running server and its URL."""
    server = serve(settings)
    threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}/v1"


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print("starting up", flush=True)
    time.sleep(given.get("delay_s", 0))
    if given.get("fault") == "exit":
        print("no GPU found", flush=True)
        sys.exit(4)
    serve(given).serve_forever()
