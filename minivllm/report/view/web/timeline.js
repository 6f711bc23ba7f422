// What has been seen so far: every bundle, the state at any of them, and what the charts show.

const KEY = 500; // items from one kept state to the next
const MOST_LIVE = 12_000; // bundles that a live page keeps
const MOST_GAUGES = 20_000;

class Timeline {
  constructor(most = Infinity) {
    this.most = most;
    this.zero = 0; // when the first item began
    this.first = 0; // index of the oldest item that is kept
    this.items = [];
    this.rows = []; // numbers of each item, for charts
    this.keys = new Map(); // state before every KEY-th item
    this.log = []; // [index, kind, number, text, time]
    this.gauges = [];
    this.ttft = []; // [index, ms]
    this.itl = []; // [index, ms, how many]
    this.marks = []; // indices of items in which somebody is preempted
    this.tip = new ViewState();
    this.account = new Account();
    this.shown = { index: -1, state: new ViewState() };
    this.lastHeld = "";
    this.outputs = new Map(); // by request: when its last token came
  }

  get count() {
    return this.first + this.items.length;
  }

  get engine() {
    return this.tip.engine;
  }

  get start() {
    return this.rows.length ? this.rows[0].time : 0;
  }

  get end() {
    return this.rows.length ? this.rows[this.rows.length - 1].end : 0;
  }

  append(item) {
    if (item.gauges) {
      this.gauges.push(item.gauges);
      if (this.gauges.length > MOST_GAUGES) this.gauges.splice(0, MOST_GAUGES / 10);
      return;
    }
    if (item.http) {
      this.account.noteServed(...item.http);
      return;
    }
    const index = this.count;
    if (index === 0) this.zero = item.time_s;
    if (index % KEY === 0) this.keys.set(index, this.tip.clone());
    this.items.push(item);
    const out = this.noteTokens(item, index);
    this.account.take(item);
    this.tip.apply(item);
    this.rows.push(this.row(item, out));
    if (item.preempted) this.marks.push(index);
    this.write(item, index);
    if (this.items.length > this.most + KEY) this.forget();
  }

  row(item, out) {
    const row = {
      time: item.time_s, end: item.end_s, out, last: item.step ?? this.rows.at(-1)?.last,
      prefill: 0, decode: item.decoded?.length ?? 0, parts: item.decoded?.length ?? 0, running: 0, drafts: 0, accepted: 0,
      waiting: item.num_waiting, used: item.num_used_blocks,
    };
    for (const [, , count, why] of item.scheduled ?? []) {
      if (why === "verify") row.decode += count;
      else row.prefill += count;
      row.parts += 1;
    }
    for (const [, drafts, accepted] of item.drafts ?? []) {
      row.drafts += drafts;
      row.accepted += accepted;
    }
    for (const { state } of this.tip.requests.values()) {
      row.running += state === "prefill" || state === "decode";
    }
    return row;
  }

  // How many tokens of output an item brings; notes the times between them.
  noteTokens(item, index) {
    let sum = 0;
    const gaps = new Map();
    const prompts = new Map((item.new ?? []).map((one) => [one[0], one]));
    const sizes = new Map((item.sizes ?? []).map(([number, numTokens]) => [number, numTokens]));
    for (const number of item.decoded ?? []) {
      if (!sizes.has(number)) sizes.set(number, this.tip.requests.get(number).numTokens + 1);
    }
    for (const [number, numTokens] of sizes) {
      const known = this.tip.requests.get(number);
      const prompt = prompts.get(number);
      const numPrompt = prompt ? prompt[2] : known.numPrompt;
      const grown = numTokens - Math.max(numPrompt, known && !prompt ? known.numTokens : 0);
      if (grown <= 0 || numTokens <= numPrompt) continue;
      const last = this.outputs.get(number);
      this.outputs.set(number, item.end_s);
      if (item.engine) continue;
      sum += grown;
      if (last === undefined) {
        this.ttft.push([index, 1e3 * (item.end_s - (prompt ? prompt[5] : known.arrival))]);
        continue; // the first tokens, however many, end no gap
      }
      const ms = (1e3 * (item.end_s - last)) / grown;
      gaps.set(ms, (gaps.get(ms) ?? 0) + grown);
    }
    for (const [ms, count] of gaps) this.itl.push([index, ms, count]);
    for (const [, number, state] of item.states ?? []) {
      if (state === "done") this.outputs.delete(number);
    }
    return sum;
  }

  write(item, index) {
    for (const [kind, number, text, time] of sentences(item, this.engine)) {
      if (kind === "step") continue;
      if (kind === "held") {
        const held = `${item.held[0]} ${item.held[1]}`;
        if (held === this.lastHeld) continue;
        this.lastHeld = held;
      }
      this.log.push([index, kind, number, text, time]);
    }
    if (!item.held) this.lastHeld = "";
  }

  // Drops the oldest items.
  forget() {
    const bound = this.first + KEY;
    this.items.splice(0, KEY);
    this.rows.splice(0, KEY);
    this.keys.delete(this.first);
    this.first = bound;
    for (const list of [this.log, this.ttft, this.itl]) {
      list.splice(0, firstAt(list, (one) => one[0] >= bound));
    }
    this.marks = this.marks.filter((index) => index >= bound);
    const oldest = this.rows[0].time;
    for (const [number, life] of this.account.lives) {
      if (life.end !== null && life.end < oldest) this.account.lives.delete(number);
    }
  }

  // The state after an item. It belongs to the timeline: do not keep it.
  at(index) {
    const { shown } = this;
    const key = Math.max(this.first, index - (index % KEY));
    if (index < shown.index || key > shown.index + 1 || shown.index < this.first - 1) {
      shown.state = this.keys.get(key).clone();
      shown.index = key - 1;
    }
    while (shown.index < index) shown.state.apply(this.items[++shown.index - this.first]);
    return shown.state;
  }

  rowAt(index) {
    return this.rows[index - this.first];
  }

  // Until when a request's time counts, at an item: at the last one, also what came after it.
  until(index) {
    return index === this.count - 1 ? Infinity : this.rowAt(index)?.end ?? 0;
  }

  item(index) {
    return this.items[index - this.first];
  }

  // Index of the last item that has ended by then; the first item before that.
  indexAt(time) {
    return Math.max(this.first, this.first + firstAt(this.rows, (row) => row.end > time) - 1);
  }
}

// Index of the first one for which `is` holds, of a list in which it holds from some place on.
function firstAt(list, is) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (is(list[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}
