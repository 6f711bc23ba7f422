// Requests over time, a lane for each: its colour says which one it is, its pattern the state.

const GUTTER = 52; // for the number of a request; charts below keep the same
const AXIS = 20;
const STATE_OF = {
  queued: "waiting", blocks: "waiting", disk: "waiting", unseen: "waiting", http: "waiting",
  stalled: "idle", between: "idle", swapped: "preempted",
};

// The lives that a time window meets, oldest first.
function livesIn(timeline, from, to) {
  const lives = [];
  for (const life of timeline.account.lives.values()) {
    if (life.begin <= to && (life.end ?? Infinity) >= from) lives.push(life);
  }
  return lives.sort((a, b) => a.number - b.number);
}

function laneHeight(count, height) {
  return Math.min(20, Math.max(5, Math.floor((height - AXIS) / Math.max(1, count))));
}

// Paints lanes; returns what lies where: [number, top, bottom] of each lane.
function paintLanes(context, width, height, model) {
  const { timeline, held, from, to, time, selected, hovered, top } = model;
  const { muted, line, ink, tint, warn } = colours();
  const across = (at) => GUTTER + ((at - from) / (to - from)) * (width - GUTTER);
  const places = [];
  paintAxis(context, width, height, { from, to, zero: timeline.zero, across });
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  const high = model.laneHeight;
  model.lives.forEach((life, index) => {
    const y = AXIS + index * high - top;
    if (y + high < AXIS || y > height) return;
    places.push([life.number, y, y + high]);
    if (life.number === selected || life.number === hovered) {
      context.fillStyle = life.number === selected ? tint : line;
      context.fillRect(0, y, width, high);
    }
    if (high >= 9 || life.number === selected || life.number === hovered) {
      context.fillStyle = colourOf(life.number);
      context.fillRect(6, y + high / 2 - 3.5, 7, 7);
      context.fillStyle = life.number === held ? warn : life.number === selected ? ink : muted;
      context.textAlign = "left";
      context.fillText(life.number, 18, y + high / 2 + 0.5);
    }
  });
  const now = across(time);
  const hasFuture = time < timeline.end;
  for (const isFuture of hasFuture ? [false, true] : [false]) {
    context.save();
    context.beginPath();
    if (isFuture) context.rect(now, 0, width - now, height);
    else context.rect(GUTTER, 0, hasFuture ? now - GUTTER : width, height);
    context.clip();
    context.globalAlpha = isFuture ? 0.28 : 1;
    model.lives.forEach((life, index) => {
      const y = AXIS + index * high - top;
      if (y + high < AXIS || y > height) return;
      if (isFuture ? (life.end ?? Infinity) > time : life.begin <= time) {
        paintLife(context, life, y, high, { from, to, across, end: timeline.end });
      }
    });
    context.restore();
  }
  if (now <= width) {
    context.fillStyle = ink;
    context.fillRect(Math.min(now, width - 1), AXIS, 1, height - AXIS);
  }
  context.restore();
  return places;
}

function paintAxis(context, width, height, { from, to, zero, across }) {
  const { muted, line } = colours();
  const [times, digits] = ticks(from - zero, to - zero, Math.max(2, (width - GUTTER) / 110));
  context.textAlign = "center";
  for (const at of times) {
    const x = Math.round(across(at + zero));
    if (x < GUTTER) continue;
    context.fillStyle = line;
    context.fillRect(x, AXIS, 1, height - AXIS);
    context.fillStyle = muted;
    if (x < width - 22) context.fillText(`${at.toFixed(digits)} s`, Math.max(x, GUTTER + 12), 9);
  }
}

function laneState(life, index) {
  const [part] = SPENT[life.codes[index]];
  return STATE_OF[part] ?? part;
}

// One life: step by step where there is room, else by state.
function paintLife(context, life, y, high, { from, to, across, end }) {
  const { ink, warn } = colours();
  const first = firstAt(life.ends, (one) => one > from);
  const last = Math.min(firstAt(life.ends, (one) => one >= to) + 1, life.ends.length);
  const pen = { context, life, y, high };
  const wide = across(Math.min(life.end ?? end, to)) - across(Math.max(life.begin, from));
  if (last - first < wide / 5) {
    let begin = first ? life.ends[first - 1] : life.begin;
    for (let index = first; index < last; index += 1) {
      const state = laneState(life, index);
      if (index + 1 < last && state === "waiting" && laneState(life, index + 1) === state) continue;
      paintPart(pen, state, across(begin), across(life.ends[index]));
      begin = life.ends[index];
    }
  } else {
    life.states.forEach(([at, state], index) => {
      const next = life.states[index + 1]?.[0] ?? life.end ?? end;
      if (state !== "done" && next > from && at < to) {
        paintPart(pen, state, across(at), across(next));
      }
    });
  }
  for (const [at, state] of life.states) {
    if (state !== "preempted" || at < from || at > to) continue;
    const x = across(at);
    context.fillStyle = warn;
    context.beginPath();
    context.moveTo(x - 3.5, y + 1);
    context.lineTo(x + 3.5, y + 1);
    context.lineTo(x, y + 6);
    context.fill();
  }
  if (life.end !== null && life.end <= to) {
    context.fillStyle = ink;
    context.fillRect(across(life.end) - 0.5, y + 1, 2, high - 2);
  }
}

function paintPart({ context, life, y, high }, state, left, right) {
  const { muted, warn } = colours();
  const start = Math.max(left, GUTTER - 2);
  const wide = Math.max(right - start, 0.7);
  const inset = high >= 9 ? 2 : 1;
  const [over, tall] = [y + inset, high - 2 * inset];
  if (state === "waiting") {
    context.strokeStyle = muted;
    context.lineWidth = 1.5;
    context.setLineDash([1.5, 3]);
    context.beginPath();
    context.moveTo(start, y + high / 2);
    context.lineTo(start + wide, y + high / 2);
    context.stroke();
    context.setLineDash([]);
  } else if (state === "preempted") {
    context.fillStyle = hatch(context, "cross");
    context.fillRect(start, over, wide, tall);
    context.strokeStyle = warn;
    context.lineWidth = 1;
    if (wide > 3) context.strokeRect(start + 0.5, over + 0.5, wide - 1, tall - 1);
  } else if (state === "idle") {
    context.fillStyle = colourOf(life.number);
    context.fillRect(start, y + high / 2 - 0.75, wide, 1.5);
  } else {
    context.fillStyle = colourOf(life.number);
    context.fillRect(start, over, wide, tall);
    if (state === "decode") return;
    context.fillStyle = hatch(context, state === "recompute" ? "down" : "up");
    context.fillRect(start, over, wide, tall);
  }
}
