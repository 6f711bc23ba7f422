"""A small server that speaks OpenAI's completions API, and can go wrong: `python fake_server.py '{"port": 0, ...}'`.

Settings: port (0 finds a free one, printed), delay_s before it listens, ids (whether it takes and tells token ids),
per_chunk (tokens of a chunk), fault ("refuse" every request, "die" in mid-stream, "error" in mid-stream, "endless": no
reason is given for the end), path (of a
file that every request body is appended to), reset (a path that may be POSTed to), step_s.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    settings: dict[str, Any] = {}
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self.answer(404, {"error": {"message": "no such path"}})
        self.answer(200, {"data": [{"id": "small", "max_model_len": self.settings.get("context", 512)}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.settings.get("path"):
            with open(self.settings["path"], "a") as file:
                file.write(json.dumps({"at": self.path, "key": self.headers["Authorization"], **body}) + "\n")
        if self.path == self.settings.get("reset"):
            return self.answer(200, {})
        if self.path != "/v1/completions":
            return self.answer(404, {"error": {"message": "no such path"}})
        if self.settings.get("fault") == "refuse":
            return self.answer(400, {"error": {"message": "this model is not for you"}})
        ids = self.settings.get("ids", True)
        if not ids and not isinstance(body["prompt"], str):
            return self.answer(422, {"detail": "prompt must be a string"})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client may have gone
            self.stream(body, ids)

    def event(self, **event: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

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
            choice = {"text": "x" * count, "finish_reason": "length" if last and not endless else None}
            if ids:
                choice["token_ids"] = list(range(start + 5, start + 5 + count))
            self.event(choices=[choice])
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": total}
        self.event(choices=[], usage={**usage, "prompt_tokens_details": {"cached_tokens": 3}})
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
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}/v1"


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print("starting up", flush=True)
    time.sleep(given.get("delay_s", 0))
    if given.get("fault") == "exit":
        print("no GPU found", flush=True)
        sys.exit(4)
    serve(given).serve_forever()
