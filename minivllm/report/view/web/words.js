// What a step bundle says, in sentences, as words.py makes them.

const WORDS = JSON.parse(document.getElementById("words").textContent);

const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));

function counted(pair, count) {
  return fill(count === 1 ? pair[0] : pair[1], { count });
}

// A list of [kind, number of the request or null, text, when], the most important first.
function sentences(bundle, engine) {
  const found = [];
  const say = (kind, number, name, values = {}, time = bundle.time_s, group = "decisions") =>
    found.push([kind, number, fill(WORDS[group][name], { request: number, ...values }), time]);
  const entered = new Map();
  for (const [time, number, state] of bundle.states ?? []) entered.set(`${number} ${state}`, time);
  const count = (what, number) => counted(WORDS.counts[what], number);
  const scheduled = bundle.scheduled ?? [];
  const numDecoded = bundle.decoded?.length ?? 0;
  if (bundle.step !== undefined) {
    const tokens = count("tokens", scheduled.reduce((sum, part) => sum + part[2], numDecoded));
    const requests = count("requests", scheduled.length + numDecoded);
    const name = scheduled.length + numDecoded ? "step" : "idle";
    say("step", null, name, { step: bundle.step, tokens, requests });
  }
  if (bundle.held) {
    const [number, reason, needed, free, spare] = bundle.held;
    say("held", number, reason, { ...engine, blocks: count("blocks", needed), free, spare }, bundle.time_s, "held");
  }
  const listed = new Set();
  for (const [number, by, swapped] of bundle.preempted ?? []) {
    listed.add(number);
    const name = swapped ? "swapped" : number === by ? "alone" : "preempted";
    say("preempted", number, name, { by }, entered.get(`${number} preempted`));
  }
  for (const [time, number, state] of bundle.states ?? []) {
    if (state === "preempted" && !listed.has(number) && !bundle.engine) {
      say("preempted", number, "restarted", {}, time);
    }
  }
  for (const [number, , prompt, most, , arrival, parent] of bundle.new ?? []) {
    const values = { tokens: count("tokens", prompt), output: most - prompt, parent };
    if (parent === null) say("queue", number, "arrived", values, arrival);
    else say("queue", number, "forked", values, bundle.end_s);
  }
  for (const [number, , reused, overtook] of bundle.admitted ?? []) {
    const name = reused ? "cached" : overtook ? "overtook" : "admitted";
    say("queue", number, name, { tokens: count("tokens", reused) }, entered.get(`${number} prefill`));
  }
  sayComputed(bundle, numDecoded, say, count);
  sayCached(bundle, say, count);
  for (const [time, number, state, reason] of bundle.states ?? []) {
    if (state === "done") say("done", number, "done", { reason: WORDS.reasons[reason] ?? reason }, time);
  }
  return found;
}

function sayComputed(bundle, numDecoded, say, count) {
  let decoding = numDecoded;
  let numTokens = numDecoded;
  for (const [number, start, size, why] of bundle.scheduled ?? []) {
    if (why === "verify") {
      decoding += 1;
      numTokens += size;
    } else {
      say("prefill", number, why, { tokens: count("tokens", size), start });
    }
  }
  if (decoding) {
    const values = { requests: count("requests", decoding), tokens: count("tokens", numTokens) };
    say("decode", null, "decode", values);
  }
  for (const [number, drafts, accepted] of bundle.drafts ?? []) {
    say("drafts", number, "drafts", { drafts: count("drafts", drafts), accepted }, bundle.end_s);
  }
}

function sayCached(bundle, say, count) {
  const counts = { stored: 0, removed: 0 };
  for (const event of bundle.kv_events ?? []) {
    if (event.type === "AllBlocksCleared") say("cache", null, "cleared");
    else counts[event.type === "BlockStored" ? "stored" : "removed"] += event.blocks.length;
  }
  for (const name of ["copied", "saved", "loaded"]) counts[name] = bundle[name]?.length ?? 0;
  for (const name of ["spilled", "read"]) counts[name] = bundle[name] ?? 0;
  for (const [name, number] of Object.entries(counts)) {
    const time = name === "stored" ? bundle.end_s : bundle.time_s;
    if (number) say("cache", null, name, { blocks: count("blocks", number) }, time);
  }
}
