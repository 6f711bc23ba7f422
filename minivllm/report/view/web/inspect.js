// One request: its whole life, and why it took as long as it did.

const NUM_SLOWEST = 8;
// Parts that the legend has only where a bar has them.
const RARE = ["client", "http", "unseen", "disk", "swapped"];

function Bar({ spent, isSmall }) {
  return html`<div class=${isSmall ? "bar small" : "bar"} role="img"
    aria-label=${spent.parts.map(([part, ms]) => `${WORDS.parts[part]} ${duration(ms)}`).join(", ")}>
    ${spent.parts.map(([part, ms]) => html`<i key=${part} class="part ${part}"
      style=${{ flexGrow: ms }} title=${`${WORDS.parts[part]}: ${duration(ms)}`}></i>`)}
  </div>`;
}

function RequestPanel() {
  const { timeline, selected, index } = view;
  const life = timeline.account.lives.get(selected);
  if (selected === null || !life) return html`<${Slowest} />`;
  const spent = life.until(timeline.until(index), timeline.account.cost);
  const request = timeline.at(index).requests.get(selected);
  const hasCome = life.first <= index;
  return html`<section class="panel request" aria-live="off">
    <h2>Why did request ${selected} take ${hasCome ? duration(spent.total) : "its time"}?
      <button class="quiet" onClick=${() => select(null)} aria-label="Close the request">close</button></h2>
    ${hasCome
      ? html`<${Bar} spent=${spent} />
        <p class="why">${sentence(life, spent, timeline.engine)}</p>
        <${PartsTable} spent=${spent} />`
      : html`<p>It has not arrived yet.</p>`}
    <${Facts} life=${life} spent=${spent} request=${request} />
  </section>`;
}

function PartsTable({ spent }) {
  return html`<table class="parts"><tbody>${spent.parts.map(([part, ms]) => html`<tr key=${part}>
    <td><i class="swatch part ${part}"></i>${WORDS.parts[part]}</td>
    <td>${duration(ms)}</td><td>${rounded((100 * ms) / spent.total, 1)} %</td>
    <td>${spent.steps[part] ? counted(WORDS.sentence.steps, spent.steps[part]) : ""}</td>
  </tr>`)}</tbody></table>`;
}

function Facts({ life, spent, request }) {
  const numTokens = request ? request.numTokens : spent.isDone ? life.numTokens : 0;
  const output = Math.max(0, numTokens - life.numPrompt);
  const facts = [
    ["state", spent.state.toUpperCase() + (spent.isDone && life.finishReason ? ` (${life.finishReason})` : "")],
    ["id", life.id],
    ["prompt", `${life.numPrompt} tokens${life.numReused ? `, ${life.numReused} from the cache` : ""}`],
    ["output", `${output} of ${life.most - life.numPrompt} tokens`],
    ["arrival", `${(life.begin - view.timeline.zero).toFixed(3)} s`],
    ["blocks", request ? request.blocks.length : 0],
  ];
  if (life.priority) facts.push(["priority", life.priority]);
  if (life.parent !== null) facts.push(["started on", `request ${life.parent}`]);
  if (spent.numPreemptions) {
    const times = counted(WORDS.sentence.times, spent.numPreemptions);
    facts.push(["preempted", times + preemptedFor(life.number, spent.preemptedFor).replace(/,$/, "")]);
  }
  return html`<dl class="facts">${facts.map(
    ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`,
  )}</dl>`;
}

// The requests that have taken longest so far, each with its bar.
function Slowest() {
  const { timeline, index } = view;
  const now = timeline.rowAt(index)?.end ?? 0;
  const { account } = timeline;
  const lives = [...account.lives.values()]
    .filter((life) => life.first <= index && life.begin < now)
    .map((life) => [Math.min(life.end ?? Infinity, now) - life.begin, life])
    .sort((a, b) => b[0] - a[0])
    .slice(0, NUM_SLOWEST);
  const longest = lives[0]?.[0] ?? 1;
  const bars = lives.map(([, life]) => life.until(now, account.cost));
  const seen = new Map(bars.flatMap((bar) => bar.parts));
  return html`<section class="panel request">
    <h2>Slowest requests <span class="note">choose one to see why</span></h2>
    <div class="slowest">${lives.map(([seconds, life], i) => html`
      <button key=${life.number} onClick=${() => select(life.number)}>
        <span class="who"><i style=${{ background: colourOf(life.number) }}></i>${life.number}</span>
        <span class="track"><span style=${{ width: `${(100 * seconds) / longest}%` }}>
          <${Bar} spent=${bars[i]} isSmall /></span></span>
        <span class="long">${duration(1e3 * seconds)}</span>
      </button>`)}</div>
    <ul class="legend">${PARTS.filter((part) => !RARE.includes(part) || seen.has(part)).map(
      (part) => html`<li key=${part}><i class="swatch part ${part}"></i>${WORDS.parts[part]}</li>`,
    )}</ul>
  </section>`;
}
