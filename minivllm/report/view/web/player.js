// Where in time the page looks: playing, pausing, stepping, zooming.

const SPEEDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100];
const LIVE_SPAN_S = 20;
const LEAST_SPAN_S = 0.001;

// What the page looks at. `index` is of the item shown last, `span` the seconds that the lanes
// show (null: as suits), `awaited` the id of a request to choose once it arrives, `next` what a new
// connection brings while the page is paused.
const view = {
  timeline: new Timeline(), isLive: false, index: -1, time: 0, isPlaying: false, speed: 1, span: null,
  selected: null, hovered: null, connection: "", info: null, key: "", awaited: null, next: null,
};

function show(changes) {
  Object.assign(view, changes);
  repaint();
}

const select = (number) => show({ selected: number });

// Shows the state after an item, and pauses.
function seek(index) {
  const { timeline } = view;
  if (!timeline.items.length) return;
  const at = Math.min(Math.max(index, timeline.first), timeline.count - 1);
  show({ index: at, time: timeline.rowAt(at).end, isPlaying: false });
}

function seekTime(time) {
  const { timeline } = view;
  const at = Math.min(Math.max(time, timeline.start), timeline.end);
  show({ time: at, index: timeline.indexAt(at), isPlaying: false });
}

function toggle() {
  const isAtEnd = !view.isLive && view.time >= view.timeline.end;
  if (isAtEnd && !view.isPlaying) seekTime(view.timeline.start);
  show({ isPlaying: !view.isPlaying });
  if (view.next) adopt(view.next);
}

// Looks at another timeline from now on.
const adopt = (timeline) => show({ timeline, index: -1, next: null });

const nextMark = () => view.timeline.marks.find((index) => index > view.index);

// Moves on with the time that has passed.
function advance(seconds) {
  const { timeline } = view;
  if (!timeline.items.length) return;
  if (!view.isPlaying) {
    if (view.index >= 0 && view.index < timeline.first) seek(timeline.first);
    return;
  }
  if (view.isLive) {
    if (view.index !== timeline.count - 1) show({ index: timeline.count - 1, time: timeline.end });
    return;
  }
  const time = Math.min(view.time + seconds * view.speed, timeline.end);
  show({ time, index: timeline.indexAt(time), isPlaying: time < timeline.end });
}

// The time that the lanes and charts show: from, to.
function windowOf() {
  const { timeline, time, isLive } = view;
  const whole = Math.max(timeline.end - timeline.start, LEAST_SPAN_S);
  const span = view.span ?? (isLive ? Math.min(Math.max(whole, 2), LIVE_SPAN_S) : whole);
  if (isLive) {
    const to = Math.max(time, timeline.start + span);
    return [to - span, to];
  }
  if (span >= whole) return [timeline.start, timeline.end];
  const from = Math.min(Math.max(time - 0.75 * span, timeline.start), timeline.end - span);
  return [from, from + span];
}

function zoom(factor) {
  const [from, to] = windowOf();
  const whole = view.isLive ? 600 : view.timeline.end - view.timeline.start;
  const span = Math.max(LEAST_SPAN_S, (to - from) * factor);
  show({ span: span >= whole ? (view.isLive ? whole : null) : span });
}

const KEYS = {
  " ": ["space", "play or pause", toggle],
  ArrowRight: ["→", "one step on", (event) => seek(view.index + (event.shiftKey ? 10 : 1))],
  ArrowLeft: ["←", "one step back; with shift ten", (event) => seek(view.index - (event.shiftKey ? 10 : 1))],
  ArrowDown: ["↓", "next request", () => selectNext(1)],
  ArrowUp: ["↑", "previous request", () => selectNext(-1)],
  p: ["p", "next preemption", () => nextMark() !== undefined && seek(nextMark())],
  Home: ["home", "to the start", () => seek(view.timeline.first)],
  End: ["end", "to the end", () => seek(view.timeline.count - 1)],
  "+": ["+", "shorter time", () => zoom(0.5)],
  "-": ["−", "longer time", () => zoom(2)],
  0: ["0", "all the time", () => show({ span: null })],
  "/": ["/", "filter events", () => document.getElementById("filter").focus()],
  Escape: ["esc", "no request chosen", () => select(null)],
};

function selectNext(step) {
  const lives = livesIn(view.timeline, ...windowOf());
  if (!lives.length) return;
  const at = lives.findIndex((life) => life.number === view.selected);
  select(lives.at(at < 0 && step > 0 ? 0 : (at + step) % lives.length).number);
}

addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input:not([type=range],[type=checkbox]), textarea, select");
  const isPressing = event.key === " " && event.target.matches("button, input, summary");
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping || isPressing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input[type=range]") && event.key.startsWith("Arrow")) return;
  const action = KEYS[event.key]?.[2];
  if (!action) return;
  event.preventDefault();
  action(event);
});

function Controls() {
  const { timeline, isLive, isPlaying, time, speed } = view;
  const isEmpty = !timeline.items.length;
  const name = isPlaying ? "pause" : isLive ? "follow" : "play";
  return html`<div class="controls" role="toolbar" aria-label="Time">
    <button class="main" onClick=${toggle} disabled=${isEmpty} title="space">${name}</button>
    <button onClick=${() => seek(view.index - 1)} disabled=${isEmpty} title="←" aria-label="one step back">‹ step</button>
    <button onClick=${() => seek(view.index + 1)} disabled=${isEmpty} title="→" aria-label="one step on">step ›</button>
    <button onClick=${KEYS.p[2]} disabled=${nextMark() === undefined} title="p">next preemption</button>
    <input class="scrub" type="range" min=${timeline.start} max=${timeline.end} step="any" value=${time}
      aria-label="Time" aria-valuetext=${`${(time - timeline.zero).toFixed(3)} seconds`}
      onInput=${(event) => seekTime(+event.target.value)} />
    <output class="clock">${(time - timeline.zero).toFixed(3)} s</output>
    ${!isLive && html`<label>speed <select value=${speed} onChange=${(event) => show({ speed: +event.target.value })}>
      ${SPEEDS.map((one) => html`<option key=${one} value=${one}>${one}×</option>`)}</select></label>`}
    <span class="zoom"><button onClick=${() => zoom(0.5)} title="+" aria-label="shorter time">+</button>
      <button onClick=${() => zoom(2)} title="−" aria-label="longer time">−</button>
      <button onClick=${() => show({ span: null })} title="0">fit</button></span>
    <details class="keys"><summary>keys</summary><dl>${Object.values(KEYS).map(
      ([key, what]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`,
    )}</dl></details>
  </div>`;
}
