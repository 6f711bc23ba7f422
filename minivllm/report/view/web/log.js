// The decisions of the step that is shown, and the log of all of them.

const KINDS = {
  held: "held", preempted: "preempted", queue: "queue", prefill: "prefill", decode: "decode",
  cache: "cache", drafts: "drafts", done: "done",
};
const MOST_ROWS = 150;
const MOST_DECISIONS = 6;

function Decisions() {
  const { timeline, index } = view;
  const item = timeline.item(index);
  const found = item ? sentences(item, timeline.engine) : [];
  const [head, rest] = found[0]?.[0] === "step" ? [found[0][2], found.slice(1)] : ["Between steps.", found];
  const shown = rest.slice(0, MOST_DECISIONS);
  return html`<section class="panel decisions">
    <h2>${item ? head : "Nothing has happened yet."}</h2>
    <ol>${shown.map(([kind, number, text], at) => html`<li key=${at} class=${kind}>
      <${Chip} number=${number} />${text}</li>`)}
      ${rest.length > shown.length && html`<li class="note">and ${rest.length - shown.length} more</li>`}
    </ol>
  </section>`;
}

function Chip({ number }) {
  if (number === null) return html`<i class="chip"></i>`;
  return html`<button class="chip" style=${{ background: colourOf(number) }}
    aria-label=${`Choose request ${number}`} onClick=${() => select(number)}></button>`;
}

function Log() {
  const [hidden, setHidden] = useState(new Set(["cache", "decode", "drafts"]));
  const [text, setText] = useState("");
  const [isOwn, setOwn] = useState(false);
  const { timeline, index, selected } = view;
  const toggle = (kind) => {
    const next = new Set(hidden);
    if (!next.delete(kind)) next.add(kind);
    setHidden(next);
  };
  const wanted = text.toLowerCase();
  const rows = [];
  const { log } = timeline;
  let at = firstAt(log, (one) => one[0] > index) - 1;
  for (; at >= 0 && rows.length < MOST_ROWS; at -= 1) {
    const [, kind, number, sentence] = log[at];
    if (hidden.has(kind) || (isOwn && selected !== null && number !== selected)) continue;
    if (!wanted || sentence.toLowerCase().includes(wanted)) rows.push(log[at]);
  }
  rows.sort((a, b) => b[4] - a[4]); // a request may arrive while a step is computed
  return html`<section class="panel log">
    <h2>Events <span class="note">newest first</span>
      <label><input type="checkbox" name="own" checked=${isOwn} onChange=${() => setOwn(!isOwn)} />chosen request only</label></h2>
    <div class="filters">
      <input type="search" placeholder="filter, e.g. request 7" value=${text} id="filter"
        aria-label="Filter events by text" onInput=${(event) => setText(event.target.value)} />
      ${Object.entries(KINDS).map(([kind, name]) => html`<label key=${kind}>
        <input type="checkbox" name=${kind} checked=${!hidden.has(kind)} onChange=${() => toggle(kind)} />${name}</label>`)}
    </div>
    <ol class="rows" tabindex="0" aria-label="Events">
      ${rows.map((row) => html`<${Row} key=${`${row[0]} ${row[3]}`} row=${row} />`)}
      ${!rows.length && html`<li class="note">No event so far passes the filter.</li>`}
    </ol>
  </section>`;
}

function Row({ row: [index, kind, number, text, time] }) {
  return html`<li class=${kind}>
    <button class="time" onClick=${() => seek(index)} title="Show this moment">
      ${(time - view.timeline.zero).toFixed(3)}</button>
    <${Chip} number=${number} /><span class="kind">${kind}</span><span>${text}</span>
  </li>`;
}
