// The life of each request, every millisecond by what it was spent on, as account.py does.

// What a request would not have had alone.
const CAUSES = [
  "queued", "blocks", "disk", "preempted", "swapped", "recompute", "stalled", "prompts", "others",
];
const PARTS = ["client", "http", "unseen", ...CAUSES, "prefill", "decode", "between"];
const MOST_SERVED = 10_000; // requests of HTTP that are remembered until their answer ends
const MOST_ANSWERED = 100; // of those that the engine has not named by then, as its frames come later
const IN_STEPS = new Set(["prefill", "decode", "recompute", "stalled"]);
const RESTING = { waiting: "queued", preempted: "preempted" };
// Parts with their reasons, by number, and the numbers.
const SPENT = [];
const CODES = new Map();

function codeOf(part, reason) {
  const key = `${part} ${reason}`;
  if (!CODES.has(key)) {
    CODES.set(key, SPENT.length);
    SPENT.push([part, reason]);
  }
  return CODES.get(key);
}

// What a step takes for its tokens: a line through the steps so far, see account.py.
class TokenCost {
  constructor() {
    this.steps = this.tokens = this.ms = this.squares = this.products = 0;
  }

  add(tokens, ms) {
    this.steps += 1;
    this.tokens += tokens;
    this.ms += ms;
    this.squares += tokens * tokens;
    this.products += tokens * ms;
  }

  get msPerToken() {
    const spread = this.steps * this.squares - this.tokens * this.tokens;
    if (spread <= 0) return 0;
    const slope = (this.steps * this.products - this.tokens * this.ms) / spread;
    return Math.max(0, this.ms < slope * this.tokens ? this.products / this.squares : slope);
  }
}

class Life {
  constructor(row) {
    [this.number, this.id, this.numPrompt, this.most, this.priority, this.arrival, this.parent] =
      row;
    this.part = "queued";
    this.reason = "";
    this.since = this.begin = this.arrival;
    this.end = null; // null: it goes on
    this.state = "waiting";
    this.finishReason = null;
    this.numTokens = this.numComputed = this.numLost = this.numPreemptions = 0;
    this.numReused = 0; // tokens found in the prefix cache
    this.hold = null; // the first one for blocks, and when
    this.holdTime = Infinity;
    // Spans, without gaps from arrival on: what each was spent on, and when it ended.
    this.codes = [];
    this.ends = [];
    this.beside = []; // what the step of a span computed: own tokens, others' of prompts, and others
    this.tokensBeside = null; // of the step that goes on
    this.preemptions = []; // [when, for which request]
    this.states = [[this.arrival, "waiting"]];
  }

  enter(time, state, reason) {
    this.state = state;
    this.finishReason = reason;
    this.states.push([Math.max(time, this.arrival), state]);
    if (state === "preempted") {
      this.numLost = this.numComputed;
      this.numPreemptions += 1;
    }
  }

  // It waits, since the most urgent request is held.
  wait(held, time) {
    const reason = held ? held[1] : "";
    const isFirst = held !== undefined && held[0] === this.number;
    if (reason === "blocks" || reason === "reserve") {
      this.part = "blocks";
      this.reason = isFirst ? reason : "behind";
      if (isFirst && this.hold === null) [this.hold, this.holdTime] = [held, time];
    } else {
      this.part = reason === "disk" && isFirst ? "disk" : "queued";
      this.reason = reason;
    }
  }

  // Counts the time until then for the present part.
  spend(until) {
    if (until <= this.since && !IN_STEPS.has(this.part)) return;
    const why = this.part === "queued" || this.part === "blocks" ? this.reason : "";
    const code = codeOf(this.part, why);
    const last = this.codes.length - 1;
    this.since = Math.max(until, this.since);
    if (last >= 0 && this.codes[last] === code && !IN_STEPS.has(this.part)) {
      this.ends[last] = this.since;
    } else {
      this.codes.push(code);
      this.ends.push(this.since);
      this.beside.push(IN_STEPS.has(this.part) && this.part !== "stalled" ? this.tokensBeside : null);
    }
  }

  // It came by HTTP, and then waits for the engine.
  come({ received, sent }) {
    this.since = this.begin = received;
    this.part = "http";
    this.spend(sent);
    this.part = "queued";
  }

  // It has lived as its parent until now.
  follow(parent) {
    this.codes = [...parent.codes];
    this.ends = [...parent.ends];
    this.beside = [...parent.beside];
    this.begin = parent.begin;
  }

  // What its time until then was spent on: milliseconds and steps by part, in the order of PARTS,
  // and milliseconds by reason; a step is divided among its own tokens and those of others.
  until(time, cost) {
    const ms = {};
    const steps = {};
    const reasons = {};
    const shared = {}; // by part, its own tokens and those of others
    const tokens = { prompts: 0, others: 0 };
    let from = this.begin;
    let total = 0;
    for (let index = 0; index < this.ends.length && from < time; index += 1) {
      const [part, reason] = SPENT[this.codes[index]];
      const end = Math.min(this.ends[index], time);
      const spent = 1e3 * (end - from);
      ms[part] = (ms[part] ?? 0) + spent;
      total += spent;
      if (IN_STEPS.has(part)) steps[part] = (steps[part] ?? 0) + 1;
      if (this.beside[index]) {
        const [own, prompts, others] = this.beside[index];
        const known = (shared[part] ??= { own: 0, prompts: 0, others: 0 });
        known.own += own;
        for (const [name, count] of [["prompts", prompts], ["others", others]]) {
          known[name] += count;
          tokens[name] += count;
          if (count) steps[name] = (steps[name] ?? 0) + 1;
        }
      }
      if (part === "queued" || part === "blocks") reasons[reason] = (reasons[reason] ?? 0) + spent;
      from = end;
    }
    for (const [part, { own, prompts, others }] of Object.entries(shared)) {
      if (!(prompts + others)) continue;
      const each = Math.min(cost.msPerToken, ms[part] / (own + prompts + others));
      ms.prompts = (ms.prompts ?? 0) + each * prompts;
      ms.others = (ms.others ?? 0) + each * others;
      ms[part] -= each * (prompts + others);
    }
    const parts = PARTS.filter((part) => ms[part] > 0).map((part) => [part, ms[part]]);
    const states = this.states.filter(([at]) => at <= time);
    return {
      parts, steps, reasons, total, tokens,
      state: states.at(-1)?.[1] ?? "waiting",
      isDone: this.end !== null && this.end <= time,
      numPreemptions: states.filter(([, state]) => state === "preempted").length,
      preemptedFor: this.preemptions.filter(([at]) => at <= time).map(([, by]) => by),
      hold: this.holdTime <= time ? this.hold : null,
    };
  }
}

class Account {
  constructor() {
    this.engine = null;
    this.lives = new Map(); // by number, also of those that have ended
    this.unfinished = new Map();
    this.cost = new TokenCost();
    this.served = new Map(); // by the engine's request id: when it came, its answer and its lives
    this.answered = new Map(); // those whose answers ended before they were named
    this.count = 0; // bundles so far
  }

  take(bundle) {
    const rows = bundle.new ?? [];
    if (bundle.engine) this.begin(bundle.engine, rows);
    const born = rows.filter((one) => !this.unfinished.has(one[0])).map((one) => this.meet(one));
    for (const [time, number, state, reason] of bundle.states ?? []) {
      this.unfinished.get(number)?.enter(time, state, reason);
    }
    const sizes = new Map((bundle.sizes ?? []).map(([number, ...counts]) => [number, counts]));
    for (const life of this.unfinished.values()) {
      if (bundle.engine) [life.part, life.reason] = ["unseen", ""];
      life.spend(bundle.time_s);
    }
    if (bundle.engine) {
      for (const life of this.unfinished.values()) life.part = RESTING[life.state] ?? "between";
    } else if (bundle.step !== undefined) {
      this.plan(bundle, sizes);
    }
    for (const number of bundle.decoded ?? []) {
      this.lives.get(number).numTokens += 1;
      this.lives.get(number).numComputed += 1;
    }
    for (const [number, counts] of sizes) {
      [this.lives.get(number).numTokens, this.lives.get(number).numComputed] = counts;
    }
    for (const [number, , reused] of bundle.admitted ?? []) {
      const life = this.unfinished.get(number);
      if (life && !life.numPreemptions) life.numReused = reused;
    }
    this.count += 1;
    this.finish(bundle, born.filter((one) => this.lives.has(one.parent)));
  }

  // The whole state follows: unfinished requests that it does not name are forgotten.
  begin(engine, rows) {
    this.engine = engine;
    const named = new Map(rows.map(([number, id]) => [number, id]));
    const isForgotten = (life) => named.get(life.number) !== life.id;
    const forgotten = [...this.unfinished.values()].filter(isForgotten);
    for (const { number } of forgotten) {
      this.lives.delete(number);
      this.unfinished.delete(number);
    }
    for (const life of forgotten) this.answer(servedBy(life));
  }

  // What the process of HTTP says of a request: before the engine does, and at its end.
  noteServed(id, received, sent, answered) {
    if (answered === null) {
      this.served.set(id, { received, sent, answered, lives: [] });
      shorten(this.served, MOST_SERVED);
      return;
    }
    const served = this.served.get(id);
    if (!served || served.answered !== null) return;
    served.answered = answered;
    if (served.lives.length) {
      this.answer(id);
    } else {
      this.served.delete(id);
      this.answered.set(id, served);
      shorten(this.answered, MOST_ANSWERED);
    }
  }

  known(id) {
    return this.served.get(id) ?? this.answered.get(id);
  }

  // Counts the time to the end of its answer, once both ends are known.
  answer(id) {
    const served = this.known(id);
    if (!served || served.answered === null) return;
    if (served.lives.some((life) => this.unfinished.get(life.number) === life)) return;
    this.served.delete(id);
    this.answered.delete(id);
    for (const life of served.lives) {
      if (life.end === null) continue; // it was forgotten
      life.part = "http";
      life.spend(served.answered);
    }
  }

  meet(row) {
    const life = new Life(row);
    const served = this.known(servedBy(life));
    if (served) {
      served.lives.push(life);
      life.come(served);
    }
    life.first = this.count; // the bundle that names it
    this.lives.set(life.number, life);
    this.unfinished.set(life.number, life);
    return life;
  }

  // Decides what each request spends a step on.
  plan(bundle, sizes) {
    const decoded = new Set(bundle.decoded);
    const scheduled = new Map((bundle.scheduled ?? []).map((one) => [one[0], one]));
    const swapped = new Map((bundle.preempted ?? []).map((one) => [one[0], one[2]]));
    let prompts = 0;
    let tokens = decoded.size;
    for (const [, , size, why] of scheduled.values()) {
      if (why !== "verify") prompts += size;
      tokens += size;
    }
    if (tokens) this.cost.add(tokens, 1e3 * (bundle.end_s - bundle.time_s));
    for (const [number, by] of bundle.preempted ?? []) {
      this.lives.get(number).preemptions.push([bundle.time_s, by]);
    }
    for (const [number, life] of this.unfinished) {
      const work = scheduled.get(number);
      let grows = false;
      if (decoded.has(number)) {
        life.part = "decode";
      } else if (work) {
        const [, start, , why] = work;
        life.part = start < life.numPrompt && why !== "verify" ? "prefill" : "decode";
        if (start < life.numLost) life.part = "recompute";
      } else if (life.state === "preempted") {
        if (life.part !== "preempted" && life.part !== "swapped") {
          life.part = swapped.get(number) ? "swapped" : "preempted";
        }
      } else if (life.state === "waiting") {
        life.wait(bundle.held, bundle.time_s);
      } else if (life.state !== "done" || life.part === "between") {
        // With overlapping steps a token of the step before arrives in this one.
        grows = sizes.has(number) && sizes.get(number)[0] > life.numTokens;
        life.part = grows ? "decode" : "stalled";
      }
      const [own, ownOthers] = ownTokens(work, decoded.has(number));
      life.tokensBeside = [own + ownOthers + grows, prompts - own, tokens - prompts - ownOthers];
    }
  }

  finish(bundle, forks) {
    for (const life of this.unfinished.values()) life.spend(bundle.end_s);
    for (const life of forks) life.follow(this.lives.get(life.parent));
    const ended = [...this.unfinished.values()].filter((life) => life.state === "done");
    for (const life of ended) {
      life.end = bundle.end_s;
      this.unfinished.delete(life.number);
    }
    for (const life of this.unfinished.values()) if (IN_STEPS.has(life.part)) life.part = "between";
    for (const life of ended) this.answer(servedBy(life));
  }
}

// Forgets the oldest where there are too many.
function shorten(requests, most) {
  if (requests.size > most) requests.delete(requests.keys().next().value);
}

// The request of HTTP that it belongs to.
function servedBy(life) {
  return life.id.split(".")[0];
}

// Tokens of its prompt, and others, that a step computes of a request.
function ownTokens(work, decodes) {
  if (!work) return [0, decodes ? 1 : 0];
  return work[3] === "verify" ? [0, work[2]] : [work[2], 0];
}

// Why the request took as long as it did: first what it would not have had alone, then the rest.
function sentence(life, spent, engine) {
  const texts = WORDS.sentence;
  const { parts, total } = spent;
  const isCause = ([part]) => CAUSES.includes(part);
  const ranked = [...parts].sort((a, b) => isCause(b) - isCause(a) || b[1] - a[1]);
  const share = (ms) => rounded((100 * ms) / total, 0);
  const [first, ...others] = ranked.filter(([, ms]) => Number(share(ms)) >= 1);
  const alone = ranked.reduce((left, one) => left - (isCause(one) ? one[1] : 0), total);
  const kind = (spent.isDone ? "done" : "unfinished") + (first && isCause(first) ? "_beside" : "");
  const values = { number: life.number, id: life.id, total: duration(total), alone: duration(alone) };
  const lines = [fill(texts[kind], values)];
  if (!first) return lines[0];
  const [most, ms] = first;
  const reason = because(most, life, spent, engine);
  lines.push(fill(texts.most, { share: share(ms), time: duration(ms), because: reason }));
  const rest = others.map(([part, each]) => fill(texts.one, { part: WORDS.parts[part], share: share(each) }));
  if (rest.length) lines.push(fill(texts.rest, { list: rest.join(", ") }));
  return lines.join(" ");
}

function because(part, life, spent, engine) {
  let reason = "";
  if (part === "queued" || part === "blocks") {
    let longest = "";
    let most = -1;
    for (const [name, ms] of Object.entries(spent.reasons)) {
      if (name in WORDS[part] && ms > most) [longest, most] = [name, ms];
    }
    const [, , needed, free, spare] = spent.hold ?? [0, "", 0, 0, 0];
    reason = fill(WORDS[part][longest], { ...engine, needed, free, spare });
  }
  return fill(WORDS.because[part], {
    reason,
    prompt_tokens: life.numPrompt,
    tokens: spent.tokens[part]?.toLocaleString("en-US"),
    steps: counted(WORDS.sentence.steps, spent.steps[part] ?? 0),
    times: counted(WORDS.sentence.times, spent.numPreemptions),
    for: preemptedFor(life.number, spent.preemptedFor),
  });
}

// For which requests the blocks of a request were taken, as part of a sentence.
function preemptedFor(number, neededBy) {
  const texts = WORDS.sentence.for;
  const others = [...new Set(neededBy)].filter((one) => one !== number);
  if (!others.length) return neededBy.length ? texts.alone : "";
  const last = others.pop();
  if (!others.length) return fill(texts.one, { requests: last });
  return fill(texts.several, { requests: `${others.join(", ")} and ${last}` });
}

// Halves upwards, also what is half but for rounding errors.
function rounded(value, digits) {
  const scale = 10 ** digits;
  return (Math.floor(value * scale + 0.5 + 1e-6) / scale).toFixed(digits);
}

function duration(ms) {
  if (ms >= 1000) return fill(WORDS.sentence.s, { value: rounded(ms / 1000, 2) });
  return fill(WORDS.sentence.ms, { value: rounded(ms, ms >= 100 ? 0 : ms >= 10 ? 1 : 2) });
}
