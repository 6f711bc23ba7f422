"""scripts/kill_replicas.py, without its kills."""

from __future__ import annotations

import http.server
import threading

import pytest

from tests.scripts.load import load_script

kills = load_script("kill_replicas")
ANSWERS = [
    (200, "data: {}\n\ndata: [DONE]\n\n", "answered"),
    (200, "{}", "answered"),
    (200, 'data: {"error": {}}\n\n', "error"),
    (500, '{"error": {}}', "error"),
    (200, "data: {}\n\n", "lost"),
    (503, '{"error": {}}', "refused"),
    (404, "{}", "lost"),
]


def test_no_request_is_lost_unseen() -> None:
    left = [answer[:2] for answer in ANSWERS]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, text = left.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        found = [kills.fate(served.server_port, number) for number in range(len(ANSWERS))]
        served.shutdown()
    assert found == [fate for _, _, fate in ANSWERS]
    assert kills.fate(served.server_port, 0) == "lost"  # nobody listens


def test_what_is_not_so_is_an_error() -> None:
    with pytest.raises(AssertionError, match="it does not"):
        kills.until(lambda: False, 0.0, "it does not")
    assert kills.until(lambda: True, 0.0, "") < 1.0


def test_kills_are_summed() -> None:
    found = kills.summary(
        [
            {"record_after_s": 1.5, "fates": {"error": 1}, "says": "first"},
            {"record_after_s": 1.0, "fates": {"error": 2, "answered": 3}, "says": "second"},
        ]
    )
    assert found == {
        "kills": 2,
        "first_says": "first",
        "record_after_s": [1.5, 1.0],
        "most_record_after_s": 1.5,
        "fates": {"error": 3, "answered": 3},
    }
