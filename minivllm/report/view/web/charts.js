// Charts over time, under the lanes and on their time axis, and distributions.

const NUM_BINS = 180;
const CHART_HEIGHT = 58;

// Numbers of the rows between two times, up to an item, averaged over bins of equal length.
function binned(timeline, from, to, index) {
  const wide = (to - from) / NUM_BINS;
  const empty = () => new Float64Array(NUM_BINS);
  const [stepped, out, prefill, decode] = Array.from({ length: 4 }, empty);
  const held = { running: [], waiting: [], used: [] };
  const rows = timeline.rows;
  const last = index - timeline.first;
  let place = Math.max(0, firstAt(rows, (row) => row.end >= from) - 1);
  let bin = 0;
  for (; place <= last && rows[place].time <= to; place += 1) {
    const row = rows[place];
    const long = row.end - row.time;
    const before = place ? rows[place - 1] : null;
    const start = before && row.time - before.end < 3 * long ? before.end : row.time;
    for (const at of overlaps(start, row.end, from, wide)) {
      const share = at.part / (row.end - start || 1);
      out[at.bin] += row.out * share;
      if (row.parts) {
        stepped[at.bin] += at.part;
        prefill[at.bin] += row.prefill * at.part;
        decode[at.bin] += row.decode * at.part;
      }
    }
    for (; bin < NUM_BINS && from + bin * wide < row.end; bin += 1) {
      const seen = from + bin * wide < row.time && before ? before : row;
      for (const name of Object.keys(held)) held[name][bin] = seen[name];
    }
  }
  const until = timeline.rows[last]?.end ?? from;
  const mean = (sums, weights) => [...sums].map((sum, at) => (weights[at] ? sum / weights[at] : 0));
  const isPast = (at) => from + (at + 0.5) * wide <= until && from + (at + 1) * wide > timeline.start;
  const past = (list) => list.map((value, at) => (isPast(at) ? value : null));
  const latest = (name) => Array.from({ length: NUM_BINS }, (_, at) => held[name][at] ?? null);
  const seen = (at) => {
    const left = from + at * wide;
    return Math.min(left + wide, until) - Math.max(left, timeline.start);
  };
  return {
    x: Array.from({ length: NUM_BINS }, (_, at) => from + (at + 0.5) * wide - timeline.zero),
    out: past([...out].map((sum, at) => sum / Math.max(seen(at), 1e-9))),
    prefill: past(mean(prefill, stepped)),
    decode: past(mean(decode, stepped)),
    running: latest("running"), waiting: latest("waiting"), used: latest("used"),
  };
}

function* overlaps(start, end, from, wide) {
  const first = Math.max(0, Math.floor((start - from) / wide));
  const last = Math.min(NUM_BINS - 1, Math.floor((end - from) / wide));
  for (let bin = first; bin <= last; bin += 1) {
    const left = from + bin * wide;
    const part = Math.min(end, left + wide) - Math.max(start, left);
    if (part > 0) yield { bin, part };
  }
}

// The gauges of a window up to a time, at the bins' places; each holds until the next.
function gauged(timeline, from, to, time) {
  const memory = Array(NUM_BINS).fill(null);
  const watts = Array(NUM_BINS).fill(null);
  const wide = (to - from) / NUM_BINS;
  let next = 0;
  for (let bin = 0; bin < NUM_BINS && from + (bin + 0.5) * wide <= time; bin += 1) {
    while (timeline.gauges[next]?.time_s <= from + (bin + 1) * wide) next += 1;
    const gauge = timeline.gauges[next - 1];
    memory[bin] = gauge?.memory_bytes == null ? null : gauge.memory_bytes / 1e9;
    watts[bin] = gauge?.watts ?? null;
  }
  return { memory, watts };
}

const CHARTS = [
  { name: "Batch", unit: "tokens a step", digits: 1, series: [["prefill", "warm"], ["decode", "cool"]], isStacked: true },
  { name: "Output", unit: "tokens/s", digits: 0, series: [["out", "cool"]] },
  { name: "Requests", unit: "", digits: 0, series: [["waiting", "warm"], ["running", "cool"]] },
  { name: "Blocks", unit: "in use", digits: 0, series: [["used", "cool"]] },
  { name: "Memory", unit: "GB", digits: 2, series: [["memory", "cool"]], isGauge: true },
  { name: "Power", unit: "W", digits: 0, series: [["watts", "warm"]], isGauge: true },
];
const SERIES_NAMES = { out: "", used: "", memory: "", watts: "" };

function ChartsOverTime({ data, from, to, zero, time }) {
  const shown = CHARTS.filter(
    (chart) => !chart.isGauge || data[chart.series[0][0]].some((value) => value !== null),
  );
  return html`<div class="charts">
    ${shown.map((chart) => html`<${Chart} key=${chart.name} chart=${chart} data=${data}
      from=${from - zero} to=${to - zero} time=${time - zero} />`)}
  </div>`;
}

function Chart({ chart, data, from, to, time }) {
  const ref = useRef();
  const plot = useRef(null);
  const scheme = isDark();
  const stacked = chart.isStacked
    ? chart.series.map((_, index) => data.x.map((__, at) => {
      const values = chart.series.slice(index).map(([name]) => data[name][at]);
      return values[0] === null ? null : values.reduce((sum, value) => sum + value, 0);
    }))
    : chart.series.map(([name]) => data[name]);
  useEffect(() => {
    plot.current = new uPlot(chartOptions(chart, ref.current.clientWidth), [data.x, ...stacked], ref.current);
    const observer = new ResizeObserver(() => {
      plot.current.setSize({ width: ref.current.clientWidth, height: CHART_HEIGHT });
    });
    observer.observe(ref.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [scheme]);
  useEffect(() => {
    plot.current.setData([data.x, ...stacked], false);
    plot.current.setScale("x", { min: from, max: to });
  });
  const now = Math.min(NUM_BINS - 1, Math.max(0, Math.floor(((time - from) / (to - from)) * NUM_BINS - 1e-6)));
  const values = [...chart.series].reverse().map(([name, tone]) => {
    const value = data[name].slice(0, now + 1).findLast((one) => one !== null);
    const label = SERIES_NAMES[name] ?? name;
    return html`<span class="value ${tone}"><i></i>${label} ${value == null ? "–" : value.toFixed(chart.digits)}</span>`;
  });
  return html`<div class="chart">
    <div class="caption"><b>${chart.name}</b> <span>${chart.unit}</span>${values}</div>
    <div class="plot" ref=${ref} role="img" aria-label=${`${chart.name} ${chart.unit} over time`}></div>
  </div>`;
}

function chartOptions(chart, width) {
  const { muted, line } = colours();
  const grid = { stroke: line, width: 1 };
  return {
    width, height: CHART_HEIGHT, padding: [4, 0, 4, 0],
    legend: { show: false }, cursor: { show: false }, select: { show: false },
    scales: {
      x: { time: false, auto: false },
      y: { range: (_, __, most) => [0, (most || 1) * 1.05] },
    },
    axes: [
      { show: false },
      {
        size: GUTTER, stroke: muted, font: "10px system-ui, sans-serif", grid, ticks: { show: false }, gap: 4,
        splits: (_, __, ___, most) => [0, most / 1.05],
        values: (_, splits) => splits.map((value) => compact(value)),
      },
    ],
    series: [{}, ...chart.series.map(([, tone]) => ({
      stroke: toneOf(tone), fill: `color-mix(in srgb, ${toneOf(tone)} ${chart.isStacked ? 45 : 14}%, transparent)`,
      width: 1.25, points: { show: false }, spanGaps: Boolean(chart.isGauge),
      dash: tone === "warm" && !chart.isStacked ? [4, 2] : undefined,
      paths: chart.isGauge ? undefined : uPlot.paths.stepped({ align: 1 }),
    }))],
  };
}

const toneOf = (tone) => (tone === "warm" ? colours().warm : colours().accent);

function compact(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(2)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(2)}k`;
  return value >= 100 ? value.toFixed(0) : String(+value.toPrecision(2));
}

// Counts of times by their logarithm, up to an item; it follows the view forwards.
class Distribution {
  constructor(name) {
    this.name = name;
    this.reset(null);
  }

  reset(timeline) {
    this.timeline = timeline;
    this.counts = new Map();
    this.total = 0;
    this.index = -1;
  }

  // Takes the samples up to an item; those that the timeline has forgotten stay counted.
  follow(timeline, index) {
    if (timeline !== this.timeline || index < this.index) this.reset(timeline);
    const samples = timeline[this.name];
    for (let at = firstAt(samples, (one) => one[0] > this.index); at < samples.length; at += 1) {
      const [when, ms, count = 1] = samples[at];
      if (when > index) break;
      const bin = Math.round(100 * Math.log10(Math.max(ms, 1e-3)));
      this.counts.set(bin, (this.counts.get(bin) ?? 0) + count);
      this.total += count;
    }
    this.index = index;
    return this;
  }

  // A percentile in milliseconds; null where there are too few samples to say.
  percentile(share) {
    if (this.total < 1 / (1 - share)) return null;
    let rest = share * this.total;
    for (const bin of [...this.counts.keys()].sort((a, b) => a - b)) {
      rest -= this.counts.get(bin);
      if (rest <= 0) return 10 ** (bin / 100);
    }
    return null;
  }

  // Bars: [left, right] in ms and the count, over the whole range.
  bars(count) {
    const bins = [...this.counts.keys()];
    const low = Math.min(...bins) - 2;
    const wide = Math.max(1, Math.ceil((Math.max(...bins) + 3 - low) / count));
    const bars = Array.from({ length: count }, (_, at) => ({
      left: 10 ** ((low + at * wide) / 100), right: 10 ** ((low + (at + 1) * wide) / 100), count: 0,
    }));
    for (const [bin, number] of this.counts) bars[Math.floor((bin - low) / wide)].count += number;
    return bars;
  }
}

const MARKS = [["p50", 0.5], ["p95", 0.95], ["p99", 0.99]];

function Histogram({ title, distribution }) {
  const bars = distribution.total ? distribution.bars(28) : [];
  const most = Math.max(1, ...bars.map((bar) => bar.count));
  const marks = MARKS.map(([name, share]) => [name, distribution.percentile(share)]);
  return html`<figure class="histogram">
    <figcaption><b>${title}</b> <span>n ${distribution.total}</span></figcaption>
    <div class="bars" role="img" aria-label=${`Distribution of ${title}`}>
      ${bars.map((bar) => html`<i style=${{ height: `${(100 * bar.count) / most}%` }}
        title=${`${duration(bar.left)} to ${duration(bar.right)}: ${bar.count}`}></i>`)}
    </div>
    <div class="range"><span>${bars.length ? duration(bars[0].left) : ""}</span>
      <span>${bars.length ? duration(bars.at(-1).right) : ""}</span></div>
    <dl>${marks.map(([name, ms]) => html`<div><dt>${name}</dt><dd>${ms === null ? "–" : duration(ms)}</dd></div>`)}</dl>
  </figure>`;
}
