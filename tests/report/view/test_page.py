"""The page of the live view: what lies in it, a recording played, a server followed."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minivllm.engine.batching import Continuous
from minivllm.report.view.account import Account
from minivllm.report.view.page import live_page, recorded_page
from minivllm.report.view.why import parts, sentence
from tests.report.browser import watch
from tests.report.view.conftest import TITLE, Recorded
from tests.report.view.recording import record

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route, WebSocketRoute

MOST_BYTES = 150_000  # page and libraries
SERVER = "http://view.test/"


def test_the_page_and_its_libraries_are_small() -> None:
    assert len(live_page().encode()) < MOST_BYTES
    assert len(recorded_page("empty", []).encode()) < MOST_BYTES


def test_a_page_loads_nothing_and_may_run_only_its_own_scripts() -> None:
    for text, connections in ((live_page(), "'self'"), (recorded_page("one", []), "'none'")):
        policy = re.search(r'Security-Policy" content="([^"]*)"', text)
        assert policy is not None
        assert "default-src 'none'" in policy[1] and f"connect-src {connections};" in policy[1]
        assert "unsafe" not in policy[1] and "script-src 'sha256-" in policy[1]
        assert not re.search(r"<link[^>]*http|src=|url\(|@import|<script[^>]*src", text)


def test_a_recording_lies_in_its_page_unharmed_and_harmless() -> None:
    items = [{"new": [[0, "</script><script>alert(1)</script>", 1, 2, 0, 0.0, None]]}]
    text = recorded_page(TITLE, items)
    packed = re.search(r'id="data">([^<]*)<', text)
    assert packed is not None
    assert json.loads(gzip.decompress(base64.b64decode(packed[1]))) == items
    assert "alert(1)" not in text and f"<title>{html.escape(TITLE)}</title>" in text
    assert text.count("</script>") == text.count("<script") == 4
    assert recorded_page(TITLE, items) == text  # the same again


def shown(page: Page, name: str = "index") -> Any:
    return page.evaluate(f"minivllmView.view.{name}")


def rendered(page: Page) -> None:
    """Wait until what has changed is on the page."""
    page.wait_for_timeout(50)
    until(page, lambda: bool(page.evaluate("minivllmView.isSettled()")))


def test_a_recording_opens_where_the_cache_is_fullest(recorded: Recorded) -> None:
    used = [bundle["num_used_blocks"] for bundle in recorded.bundles]
    assert shown(recorded.page) == used.index(max(used))
    assert recorded.page.locator("h1").text_content() == TITLE
    assert "recorded" in str(recorded.page.locator(".status").text_content())


def test_steps_and_the_scrub_bar_move_in_time(recorded: Recorded) -> None:
    page, bundles = recorded.page, recorded.bundles
    page.keyboard.press("Home")
    assert shown(page) == 0
    page.get_by_role("button", name="one step on").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    page.get_by_role("button", name="one step back").click()
    assert shown(page) == 11
    rendered(page)
    head = page.locator(".decisions h2").text_content()
    assert head and head.startswith(f"Step {bundles[11]['step']} computes")
    scrub = page.get_by_role("slider", name="Time")
    scrub.focus()
    page.keyboard.press("End")
    assert shown(page) == len(bundles) - 1
    scrub.evaluate("e => { e.value = 0.1; e.dispatchEvent(new Event('input')); }")
    at = shown(page)
    assert bundles[at]["end_s"] <= 0.1 < bundles[at + 1]["end_s"]


def test_it_plays_pauses_and_finds_the_next_preemption(recorded: Recorded) -> None:
    page, bundles = recorded.page, recorded.bundles
    page.locator("body").click(position={"x": 2, "y": 2})
    page.keyboard.press("Home")
    page.keyboard.press("p")
    first = next(at for at, bundle in enumerate(bundles) if bundle.get("preempted"))
    assert shown(page) == first
    rendered(page)
    number = bundles[first]["preempted"][0][0]
    said = page.locator(".decisions li.preempted").first.text_content()
    assert said and said.startswith(f"Request {number} preempted")
    page.keyboard.press(" ")
    assert shown(page, "isPlaying")
    until(page, lambda: shown(page) > first)
    page.get_by_role("button", name="pause").click()
    assert shown(page) > first and not shown(page, "isPlaying")
    page.keyboard.press("Escape")


def test_the_log_is_filtered_by_words_kinds_and_request(recorded: Recorded) -> None:
    page = recorded.page
    page.locator("h1").click()
    page.keyboard.press("End")
    page.keyboard.press("/")
    page.keyboard.type("request 3 ")
    rows = page.locator(".rows li")
    rendered(page)
    texts = rows.all_text_contents()
    assert len(texts) > 3 and all("Request 3 " in text for text in texts)
    for kind in ("queue", "prefill", "done"):
        page.locator(f".filters input[name={kind}]").uncheck()
    rendered(page)
    kinds = {*page.locator(".rows .kind").all_text_contents()}
    assert kinds <= {"held", "preempted"}
    page.get_by_label("Filter events by text").fill("")
    for kind in ("queue", "prefill", "done"):
        page.locator(f".filters input[name={kind}]").check()
    page.evaluate("minivllmView.show({ selected: 5 })")
    page.locator(".log input[name=own]").check()
    rendered(page)
    texts = rows.all_text_contents()
    assert len(texts) > 3 and all("Request 5 " in text for text in texts)
    page.locator(".log input[name=own]").uncheck()
    page.locator("h1").click()
    page.keyboard.press("Escape")


def legend(browser: Browser, items: list[dict[str, Any]]) -> list[str]:
    """Of the slowest requests of a recording, where it opens."""
    page = browser.new_page()
    page.set_content(recorded_page(TITLE, items))
    page.wait_for_selector(".slowest")
    names = page.locator(".slowest + .legend li").all_text_contents()
    page.close()
    return names


def test_the_legend_has_every_part_of_the_slowest_requests(
    recorded: Recorded, browser: Browser
) -> None:
    usual = legend(browser, recorded.items)
    assert "between steps" in usual and "not seen" not in usual
    # a viewer who comes later has not seen what was before the first bundle
    new = [[7, "r7", 3, 9, 0, -2.0, None]]
    first = {"time_s": 0.0, "end_s": 0.1, "engine": recorded.items[0]["engine"], "new": new}
    assert legend(browser, [first]) == ["not seen", *usual]


def test_a_click_on_a_lane_or_a_block_tells_a_requests_life(recorded: Recorded) -> None:
    page = recorded.page
    page.evaluate("minivllmView.seek(200)")
    rendered(page)
    lanes = page.locator("#lanes")
    lanes.click(position={"x": 100, "y": 25})
    assert shown(page, "selected") == 0
    rendered(page)
    panel = page.locator(".panel.request")
    assert "Why did request 0 take" in str(panel.locator("h2").text_content())
    assert "Request 0 (0.0) took " in str(panel.locator(".why").text_content())
    parts = panel.locator(".parts tr")
    shares = [
        float(text.split()[0]) for text in parts.locator("td:nth-child(3)").all_text_contents()
    ]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    page.keyboard.press("Escape")
    page.locator("#grid").click(position={"x": 5, "y": 5})
    owners = page.evaluate("[minivllmView.view.timeline.at(200).owners().get(1)].flat()")
    assert shown(page, "selected") in owners
    page.keyboard.press("ArrowDown")
    assert shown(page, "selected") not in (None, *owners)
    page.keyboard.press("Escape")
    assert shown(page, "selected") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(recorded: Recorded, scheme: Any) -> None:
    page = recorded.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("minivllmView.seek(150)")
    rendered(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.set_viewport_size({"width": 1400, "height": 900})
    page.emulate_media(color_scheme="light")


class Server:
    """A server that a test speaks for: it holds sockets and notes commands."""

    def __init__(self, page: Page) -> None:
        self.sockets: list[WebSocketRoute] = []
        self.commands: list[tuple[str, Any]] = []
        self.info: dict[str, Any] = {"model": "tiny", "key": False}
        self.info |= {"load": True, "text": True, "chat": True}
        page.route(f"{SERVER}**", self._answer)
        page.route_web_socket(
            re.compile(r"ws://view\.test/ws/events"), lambda socket: self.sockets.append(socket)
        )

    def _answer(self, route: Route) -> None:
        path = route.request.url.removeprefix(SERVER)
        if path == "":
            route.fulfill(body=live_page(), content_type="text/html")
        elif path == "view/info":
            route.fulfill(json=self.info)
        else:
            self.commands.append((path, json.loads(route.request.post_data or "null")))
            if path == "view/replica":
                route.fulfill(json={"replica": self.commands[-1][1]["number"]})
                return
            pieces = [{"choices": [{"delta": {"content": word}}]} for word in ("Hello", " there")]
            lines = [f"data: {json.dumps(piece)}\n\n" for piece in pieces]
            route.fulfill(body="".join(lines) + "data: [DONE]\n\n")

    def send(self, items: list[dict[str, Any]]) -> None:
        self.sockets[-1].send(json.dumps(items))


@pytest.fixture
def live(browser: Browser) -> Iterator[tuple[Page, Server, list[str]]]:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    errors = watch(page, SERVER)
    server = Server(page)
    page.goto(SERVER)
    until(page, lambda: bool(server.sockets))
    yield page, server, errors
    page.close()


def until(page: Page, is_so: Callable[[], bool]) -> None:
    """Wait for it."""
    for _ in range(400):
        if is_so():
            return
        page.wait_for_timeout(50)
    raise AssertionError("waited in vain")


def test_a_server_is_followed_paused_and_found_again(
    live: tuple[Page, Server, list[str]], recorded: Recorded
) -> None:
    page, server, errors = live
    items = recorded.items
    server.send(items[:100])
    until(page, lambda: shown(page) >= 0)
    bundles = [item for item in items[:100] if "gauges" not in item]
    until(page, lambda: shown(page) == len(bundles) - 1)
    rendered(page)
    assert page.locator(".status").text_content() == "live"
    page.get_by_role("button", name="pause").click()
    server.send(items[100:200])
    until(page, lambda: page.evaluate("minivllmView.view.timeline.count") > 100)
    rendered(page)
    assert shown(page) == len(bundles) - 1
    page.get_by_role("button", name="follow").click()
    until(page, lambda: shown(page) > len(bundles))
    server.sockets[-1].close()
    until(page, lambda: "lost" in str(page.locator(".status").text_content()))
    until(page, lambda: len(server.sockets) == 2)
    server.send(items[:50])
    until(page, lambda: 0 <= shown(page) < 50)
    until(page, lambda: page.locator(".status").text_content() == "live")
    assert errors == []


def test_another_key_takes_the_place_of_a_connection(
    live: tuple[Page, Server, list[str]], recorded: Recorded
) -> None:
    page, server, errors = live
    server.info["key"] = True
    server.sockets[-1].close()
    key = page.locator("input[type=password]")
    key.wait_for()
    for number, word in enumerate(("wrong", "right", "another"), start=2):
        key.fill(word)
        key.blur()
        until(page, lambda number=number: len(server.sockets) == number)  # type: ignore[misc]
        if word == "wrong":
            server.sockets[-1].close()
            until(page, lambda: "lost" in str(page.locator(".status").text_content()))
    server.send(recorded.items[:20])
    until(page, lambda: page.locator(".status").text_content() == "live")
    page.wait_for_timeout(2000)  # longer than the pause before another attempt
    assert len(server.sockets) == 4 and errors == []


def test_another_replica_can_be_chosen(
    live: tuple[Page, Server, list[str]], recorded: Recorded
) -> None:
    page, server, errors = live
    assert page.locator("select[name=replica]").count() == 0
    server.info |= {"replicas": 3, "replica": 1}
    server.sockets[-1].close()
    chosen = page.locator("select[name=replica]")
    chosen.wait_for()
    assert chosen.input_value() == "1" and chosen.locator("option").count() == 3
    server.send(recorded.items[:100])
    until(page, lambda: shown(page) > 0)
    chosen.select_option("2")
    until(page, lambda: bool(server.commands))
    assert server.commands == [("view/replica", {"number": 2})]
    until(page, lambda: chosen.input_value() == "2")
    until(page, lambda: len(server.sockets) == 3)  # another history
    server.send(recorded.items[:20])
    until(page, lambda: 0 <= shown(page) < 20)
    assert errors == []


def test_commands_go_by_post(live: tuple[Page, Server, list[str]], recorded: Recorded) -> None:
    page, server, errors = live
    server.send(recorded.items[:20])
    rate = page.locator("input[name=rate]")
    rate.wait_for()
    rate.evaluate("e => { e.value = 2.5; e.dispatchEvent(new Event('input')); }")
    until(page, lambda: bool(server.commands))
    assert server.commands == [("view/load", {"rate": 2.5, "input_len": 64, "output_len": 32})]
    page.get_by_role("button", name="empty the prefix cache").click()
    until(page, lambda: server.commands[-1][0] == "reset_prefix_cache")
    for text in ("Hi!", "And?"):
        page.get_by_role("textbox", name="Prompt").fill(text)
        page.get_by_role("button", name="send").click()
        page.get_by_role("button", name="send").wait_for()
    path, body = server.commands[-1]
    assert path == "v1/chat/completions" and body["stream"] and body["model"] == "tiny"
    assert body["messages"] == [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "And?"},
    ]
    assert page.locator(".turns p").all_text_contents()[-1] == "Hello there"
    assert errors == []


def test_a_model_without_a_chat_template_continues_the_text(
    live: tuple[Page, Server, list[str]], recorded: Recorded
) -> None:
    page, server, _ = live
    server.info["chat"] = False
    page.reload()
    until(page, lambda: len(server.sockets) == 2)
    server.send(recorded.items[:20])
    page.get_by_role("textbox", name="Prompt").fill("Once")
    page.get_by_role("button", name="send").click()
    until(page, lambda: bool(server.commands))
    assert server.commands[0][0] == "v1/completions" and server.commands[0][1]["prompt"] == "Once"


def test_the_history_that_a_live_page_keeps_is_bounded(recorded: Recorded) -> None:
    script = """(items) => {
      const { Timeline } = minivllmView;
      const [timeline, whole] = [new Timeline(200), new Timeline()];
      for (const item of items) timeline.append(item), whole.append(item);
      const { first } = timeline;
      const owners = (of, at) => JSON.stringify([...of.at(at).owners()]);
      const same = (at) => owners(timeline, at) === owners(whole, at);
      return [timeline.items.length, timeline.rows.length, first, timeline.log[0][0],
        same(first), same(timeline.count - 1), same(first + 10)];
    }"""
    items = record(num_requests=60, mean_gap_s=0.05)
    kept, rows, first, logged, *same = recorded.page.evaluate(script, items)
    assert first > 0 and first + kept == (len(items) + 1) / 2 and rows == kept < 900
    assert logged >= first and all(same)


LIVES = """([items, engine]) => {
  const { Timeline, sentence } = minivllmView;
  const timeline = new Timeline();
  for (const item of items) timeline.append(item);
  const at = (index) => [...timeline.account.lives.values()].flatMap((life) => {
    const now = timeline.rowAt(index).end;
    const spent = life.until(now, timeline.account.cost);
    const text = life.first <= index && life.begin < now && sentence(life, spent, engine);
    return text ? [[life.number, spent.parts, text]] : [];
  });
  return [at(timeline.count - 1), at(Math.floor(timeline.count / 2))];
}"""


def of_http(bundles: list[dict[str, Any]], early: bool) -> list[dict[str, Any]]:
    """The same, with request 0 from HTTP: it came 2 ms before the engine had it, and its answer was
    written 1 ms after its last step, which is told before or after that step."""
    new = next(bundle for bundle in bundles if "new" in bundle)["new"][0]
    times = [new[1].split(".")[0], new[5] - 0.002, new[5] - 0.001]
    done = next(
        at
        for at, bundle in enumerate(bundles)
        if any(change[1:3] == [0, "done"] for change in bundle.get("states", ()))
    )
    answered_s = bundles[done]["end_s"] + 0.001
    end = [{"http": [*times, answered_s]}]
    told = 0 if early else done + 1
    return [{"http": [*times, None]}, *bundles[:told], *end, *bundles[told:]]


@pytest.mark.parametrize(("strategy", "early"), [("recompute", False), ("swap", True)])
def test_the_page_accounts_for_every_millisecond_as_python_does(
    recorded: Recorded, strategy: str, early: bool
) -> None:
    policy = Continuous(6, 32, watermark=0.1, preemption=strategy)
    items = record(policy, host_slots=60, seed=2, samples=2, retold_every=90)
    bundles = [item for item in items if "gauges" not in item]
    engine, middle = bundles[0]["engine"], bundles[len(bundles) // 2]["end_s"]
    served = of_http(bundles, early)
    lives = recorded.page.evaluate(LIVES, [served, engine])
    whole = Account.of(served)
    for until_s, told in zip((bundles[-1]["end_s"], middle), lives, strict=True):
        account = Account.of([one for one in served if one.get("end_s", 0.0) <= until_s])
        account.cost = whole.cost  # the page knows it from the whole recording
        expected = {n: life for n, life in account.lives.items() if life.ms}
        assert {number for number, _, _ in told} == expected.keys()
        for number, found, text in told:
            life = expected[number]
            assert dict(found) == pytest.approx(parts(life, account), rel=1e-6, abs=1e-6)
            assert text == sentence(life, account)
            begin = life.new.arrival_s - 0.002 * (number == 0)
            total = sum(ms for _, ms in found)
            assert total == pytest.approx(1e3 * (life.since_s - begin), rel=1e-6)
    names = {part for _, found, _ in lives[0] for part, _ in found}
    assert names >= {"http", "queued", "blocks", "prompts", "others", "decode", "between"}
    assert ("swapped" if strategy == "swap" else "recompute") in names
