// The page as a whole.

const RENDER_MS = 100; // least time between two renderings of what is no canvas
const LANES_HEIGHT = 400;
const GRID_HEIGHT = 330;
const LEGENDS = [
  ["waiting", "WAITING"], ["prefill", "PREFILL"], ["decode", "DECODE"],
  ["recompute", "computed again"], ["preempted", "PREEMPTED"], ["done", "DONE"],
];
const BLOCK_LEGENDS = [
  ["owned", "a request's"], ["shared", "shared"], ["cached", "cached, no owner"], ["free", "free"],
];
const ttft = new Distribution("ttft");
const itl = new Distribution("itl");

function isRunning(number) {
  const state = view.timeline.at(view.index).requests.get(number)?.state;
  return state === "prefill" || state === "decode";
}

function Lanes() {
  const scroller = useRef();
  const places = useRef([]);
  const touched = useRef(-Infinity); // when the user scrolled last
  const canvas = usePainter((canvas, width) => {
    const [from, to] = windowOf();
    const { timeline, time, selected, hovered } = view;
    const lives = livesIn(timeline, from, to);
    const high = laneHeight(lives.length, LANES_HEIGHT);
    const whole = AXIS + lives.length * high;
    const box = scroller.current;
    const height = Math.min(LANES_HEIGHT, Math.max(whole, 120));
    box.style.height = `${height}px`;
    box.firstChild.style.height = `${Math.max(whole, height)}px`;
    if (whole > height && performance.now() - touched.current > 4000) {
      const running = lives.flatMap((life, at) => (isRunning(life.number) ? [at] : []));
      const middle = (running[0] + running.at(-1)) / 2;
      if (running.length) box.scrollTop = middle * high - height / 2;
    }
    const context = prepare(canvas, width, height);
    const held = timeline.item(view.index)?.held?.[0];
    const model = { timeline, held, from, to, time, selected, hovered, lives, laneHeight: high, top: box.scrollTop };
    places.current = paintLanes(context, width, height, model);
  });
  const laneAt = (event) => {
    const y = event.clientY - canvas.current.getBoundingClientRect().top;
    return places.current.find(([, top, bottom]) => y >= Math.max(top, AXIS) && y < bottom)?.[0] ?? null;
  };
  const hover = (event) => {
    const hovered = laneAt(event);
    const request = view.timeline.at(view.index).requests.get(hovered);
    canvas.current.title = request
      ? `request ${hovered}: ${request.state.toUpperCase()}, ${request.numComputed} of ${request.numTokens} tokens computed`
      : "";
    if (hovered !== view.hovered) show({ hovered });
  };
  const click = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const [from, to] = windowOf();
    if (event.clientY - box.top < AXIS) {
      seekTime(from + ((event.clientX - box.left - GUTTER) / (box.width - GUTTER)) * (to - from));
    } else {
      select(laneAt(event));
    }
  };
  const scrolled = () => {
    touched.current = performance.now();
    repaint();
  };
  return html`<div class="scroller" ref=${scroller} onWheel=${scrolled} onTouchMove=${scrolled} onScroll=${repaint}>
    <div class="tall"><canvas ref=${canvas} id="lanes" role="img" onClick=${click}
      onPointerMove=${hover}
      onPointerLeave=${() => show({ hovered: null })}
      aria-label="Requests over time, a lane for each; ↑ and ↓ choose one"></canvas></div></div>`;
}

function Requests() {
  const { timeline, index, time } = view;
  const [from, to] = windowOf();
  const data = { ...binned(timeline, from, to, index), ...gauged(timeline, from, to, time) };
  return html`<section class="panel requests">
    <h2>Requests <${Legend} entries=${LEGENDS} /></h2>
    <${Lanes} />
    <${ChartsOverTime} data=${data} from=${from} to=${to} zero=${timeline.zero} time=${time} />
  </section>`;
}

const Legend = ({ entries }) => html`<ul class="legend">${entries.map(
  ([kind, name]) => html`<li key=${kind}><i class="swatch ${kind}"></i>${name}</li>`,
)}</ul>`;

function Blocks() {
  const layout = useRef(null);
  const [hovered, setHovered] = useState(null);
  const count = view.timeline.engine?.num_blocks ?? 0;
  const canvas = usePainter((canvas, width) => {
    layout.current = layOut(count, width, GRID_HEIGHT);
    const context = prepare(canvas, width, Math.max(layout.current.height, 1));
    if (view.index < 0) return;
    const state = view.timeline.at(view.index);
    paintGrid(context, layout.current, { state, selected: view.selected, hovered });
  });
  const block = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return blockAt(event.clientX - box.left, event.clientY - box.top, layout.current, count);
  };
  const click = (event) => {
    const owners = [view.timeline.at(view.index).owners().get(block(event)) ?? []].flat();
    const next = owners[(owners.indexOf(view.selected) + 1) % owners.length]; // of a shared one
    select(next ?? null);
  };
  const hover = (at) => {
    setHovered(at);
    repaint();
  };
  const state = view.index >= 0 ? view.timeline.at(view.index) : null;
  const text = hovered !== null && state ? blockText(hovered, state) : `${state?.numUsedBlocks ?? 0} of ${count} blocks in use, ${state?.engine.block_size ?? 0} tokens each`;
  return html`<section class="panel blocks">
    <h2>Blocks <${Legend} entries=${BLOCK_LEGENDS} /></h2>
    <div><canvas ref=${canvas} id="grid" role="img" aria-label=${`Blocks of the cache: ${text}`}
      onClick=${click} onPointerMove=${(event) => hover(block(event))} onPointerLeave=${() => hover(null)}></canvas></div>
    <p class="note">${text}</p>
  </section>`;
}

function Latency() {
  const { timeline, index } = view;
  return html`<section class="panel latency"><h2>Latency so far</h2>
    <div class="histograms">
      <${Histogram} title="TTFT" distribution=${ttft.follow(timeline, index)} />
      <${Histogram} title="ITL" distribution=${itl.follow(timeline, index)} />
    </div></section>`;
}

// Tokens a second and drafts accepted over the last second of steps, or the last steps.
function recent() {
  const { timeline, index } = view;
  const at = index - timeline.first;
  const now = timeline.rows[at]?.end ?? 0;
  let [out, drafts, accepted] = [0, 0, 0];
  let first = at;
  for (; first >= 0 && now - timeline.rows[first].end < 1; first -= 1) {
    out += timeline.rows[first].out;
    drafts += timeline.rows[first].drafts;
    accepted += timeline.rows[first].accepted;
  }
  const seconds = now - (timeline.rows[Math.max(first, 0)]?.end ?? now);
  return { rate: seconds > 0 ? out / seconds : 0, acceptance: drafts ? accepted / drafts : null };
}

function Vitals() {
  const { timeline, index } = view;
  const row = timeline.rowAt(index);
  if (!row) return null;
  const { rate, acceptance } = recent();
  const gauge = timeline.gauges[firstAt(timeline.gauges, (one) => one.time_s > row.end) - 1];
  const vitals = [
    ["step", row.last ?? "–"],
    ["running", row.running],
    ["waiting", row.waiting],
    ["blocks in use", `${row.used} / ${timeline.engine.num_blocks}`],
    ["output, last second", `${compact(rate)} tokens/s`],
  ];
  if (acceptance !== null) vitals.push(["drafts accepted", `${(100 * acceptance).toFixed(0)} %`]);
  if (gauge?.memory_bytes != null) vitals.push(["memory", `${(gauge.memory_bytes / 1e9).toFixed(2)} GB`]);
  if (gauge?.watts != null) vitals.push(["power", `${gauge.watts.toFixed(0)} W`]);
  return html`<dl class="vitals">${vitals.map(
    ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`,
  )}</dl>`;
}

// Chooses the replica that all viewers of a server see.
function Replica() {
  const { info } = view;
  const choose = async ({ target }) => {
    const answer = await post("view/replica", { number: Number(target.value) });
    show({ info: { ...info, ...(await answer.json()) } });
    connect(); // What the other replica did before is another history.
  };
  return html`<label>replica <select name="replica" onChange=${choose}>${[...Array(info.replicas).keys()].map(
    (number) => html`<option key=${number} value=${number} selected=${number === info.replica}>${number}</option>`,
  )}</select></label>`;
}

function App() {
  const { timeline, isLive, isPlaying, connection, info, index } = view;
  const { engine } = timeline;
  const status = isLive ? (connection === "live" && !isPlaying ? "paused" : connection) : "recorded";
  return html`
    <header>
      <h1>${document.title}</h1>
      <p>${[info?.model, engine && `batching ${engine.batching}`, engine && `preemption ${engine.preemption}`,
        engine && `at most ${engine.max_num_seqs} requests and ${engine.max_num_batched_tokens} tokens a step`,
      ].filter(Boolean).join(" · ")}</p>
      ${isLive && info?.replicas > 1 && html`<${Replica} />`}
      <span class="status ${isLive ? connection.split(" ")[0] : ""}" role="status">${status}</span>
    </header>
    <${Vitals} />
    <${Controls} />
    ${isLive && info?.key && html`<${Key} />`}
    ${index < 0
      ? html`<p class="panel empty">${isLive ? `The engine's state comes when the server is reached: ${connection}.` : "Nothing is recorded here."}</p>`
      : html`<main>
        <div class="wide"><${Requests} /><${Log} /></div>
        <div class="narrow"><${Decisions} /><${Blocks} /><${RequestPanel} />
          ${isLive && info?.text && html`<${Chat} />`} ${isLive && info?.load && html`<${Load} />`}
          <${Latency} /></div>
      </main>`}`;
}

// Chooses the request that the prompt box has sent, once it is there.
function chooseAwaited() {
  for (const life of view.awaited ? view.timeline.account.unfinished.values() : []) {
    if (life.id === view.awaited) show({ selected: life.number, awaited: null });
  }
}

let rendered = 0;
let isStale = true;
let before = performance.now();

function frame(now) {
  advance((now - before) / 1000);
  before = now;
  if (isDirty) {
    isDirty = false;
    isStale = true;
    chooseAwaited();
    painters.forEach((paint) => paint());
  }
  if (isStale && now - rendered >= RENDER_MS) {
    rendered = now;
    isStale = false;
    render(html`<${App} />`, document.getElementById("app"));
  }
  requestAnimationFrame(frame);
}

// Where a recording opens: where the most blocks are in use.
function busiest(timeline) {
  let best = 0;
  timeline.rows.forEach((row, at) => row.used > timeline.rows[best].used && (best = at));
  return timeline.first + best;
}

async function start() {
  const data = document.getElementById("data");
  view.isLive = data === null;
  if (view.isLive) {
    view.isPlaying = true;
    join();
  } else {
    const packed = Uint8Array.from(atob(data.textContent.trim()), (one) => one.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    for (const item of await new Response(unpacked).json()) view.timeline.append(item);
    const { timeline } = view;
    if (timeline.items.length) seek(busiest(timeline));
    const suitable = (timeline.end - timeline.start) / 30;
    view.speed = SPEEDS.find((speed) => speed >= suitable) ?? SPEEDS.at(-1);
  }
  requestAnimationFrame(frame);
}

globalThis.minivllmView = { view, Timeline, sentences, sentence, seek, show, isSettled: () => !isDirty && !isStale }; // for tests and the curious
start().catch((error) => {
  document.getElementById("app").textContent = `This page cannot be shown: ${error.message}`;
});
