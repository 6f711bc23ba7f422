{
  const FONT = "12px system-ui, sans-serif";
  const REACH = 24; // pixels from the pointer to the point that it names
  const unpack = async (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  // Text and lines were drawn for a light page; the reader's colours take their place.
  const themed = (text) => {
    const style = getComputedStyle(document.documentElement);
    return text.replace(/#[0-9a-f]{6}/gi, (c) => style.getPropertyValue(`--c${c.slice(1)}`).trim() || c);
  };
  let ready = null;
  const charts = () => ready ??= (async () => {
    const [library, text] = await Promise.all([unpack("library"), unpack("charts")]);
    const script = document.createElement("script");
    script.textContent = library;
    document.head.append(script);
    const { ink, grid, figures } = JSON.parse(themed(text));
    return { ink, grid, figures: new Map(figures) };
  })();

  // ---- axes

  const number = (value) => (value && Math.abs(value) < 1e-3
    ? Number(value.toPrecision(6)).toExponential() : value.toLocaleString("en", { maximumSignificantDigits: 6 }));
  const even = (low, high, most) => {
    const raw = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((times) => times * power >= raw * 0.999);
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
  };
  // Within a decade even; within two 1, 2 and 5 of each power of ten; else powers.
  const logarithmic = (low, high, most) => {
    if (high < 10 * low) return even(low, high, most);
    const digits = high < 100 * low ? [1, 2, 5] : [1];
    const first = Math.floor(Math.log10(low));
    const powers = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, i) => first + i);
    const all = powers.flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`)));
    const seen = all.filter((tick) => tick >= low && tick <= high);
    const each = Math.ceil(seen.length / most);
    return seen.filter((_, i) => i % each === 0);
  };
  const ticks = (axis, space) => (plot, index, low, high) => {
    const most = Math.max(2, Math.floor((index ? plot.bbox.height : plot.bbox.width) / devicePixelRatio / space));
    return (axis.log ? logarithmic : even)(low, high, most);
  };
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = FONT;
  const widest = (lines, least = 0) => Math.max(least, ...lines.map((line) => pen.measureText(line).width));
  const broken = (text, most) => text.split(" ").reduce((lines, word) => {
    const longer = `${lines.at(-1)} ${word}`;
    if (lines.length && widest([longer]) <= most) lines[lines.length - 1] = longer;
    else lines.push(word);
    return lines;
  }, []).join("\n");

  // ---- series

  const POLYGONS = {
    s: [[-1, -1], [1, -1], [1, 1], [-1, 1]], D: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
    "^": [[0, -1.2], [1.2, 1], [-1.2, 1]], v: [[0, 1.2], [1.2, -1], [-1.2, -1]],
  };
  const CROSSES = { P: [[-1.3, 0, 1.3, 0], [0, -1.3, 0, 1.3]], X: [[-1, -1, 1, 1], [-1, 1, 1, -1]] };
  const mark = (at, series, x, y, unit) => {
    const size = 4 * unit;
    at.beginPath();
    if (CROSSES[series.marker]) {
      for (const [a, b, c, d] of CROSSES[series.marker]) {
        at.moveTo(x + a * size, y + b * size);
        at.lineTo(x + c * size, y + d * size);
      }
      at.lineWidth = 3 * unit;
    } else {
      if (POLYGONS[series.marker]) for (const [a, b] of POLYGONS[series.marker]) at.lineTo(x + a * size, y + b * size);
      else at.arc(x, y, 1.1 * size, 0, 2 * Math.PI);
      at.closePath();
      if (!series.hollow) at.fill();
      at.lineWidth = 1.5 * unit;
    }
    at.stroke();
  };
  const line = (at, points, isStepped) => {
    at.beginPath();
    let last = null;
    for (const [x, y] of points) {
      if (y === null) last = null;
      else if (last === null) at.moveTo(x, last = y);
      else {
        if (isStepped) at.lineTo(x, last);
        at.lineTo(x, last = y);
      }
    }
    at.stroke();
  };
  const paint = (plot, panel, hidden) => {
    const { ctx: at, bbox } = plot;
    const unit = devicePixelRatio;
    const [x, y] = ["x", "y"].map((axis) => (value) => (value === null ? null : plot.valToPos(value, axis, true)));
    at.save();
    at.beginPath();
    at.rect(bbox.left, bbox.top - 5 * unit, bbox.width + 5 * unit, bbox.height + 10 * unit);
    at.clip();
    for (const series of panel.series.filter((one) => !hidden.has(one.label))) {
      at.strokeStyle = at.fillStyle = series.colour;
      at.lineWidth = (series.kind === "line" ? 1.8 : 1.4) * unit;
      at.setLineDash(series.dashed ? [6 * unit, 4 * unit] : []);
      if (series.kind === "band") {
        at.globalAlpha = 0.35;
        at.fillRect(x(series.x[0]), bbox.top, x(series.x[1]) - x(series.x[0]), bbox.height);
        at.globalAlpha = 1;
      } else if (series.kind === "points") {
        at.lineWidth = 2 * unit;
        (series.low ?? []).forEach((low, i) => line(at, [[x(low), y(series.y[i])], [x(series.high[i]), y(series.y[i])]]));
        series.x.forEach((value, i) => mark(at, series, x(value), y(series.y[i]), unit));
      } else {
        line(at, series.x.map((value, i) => [x(value), y(series.y[i])]), series.kind === "steps");
      }
    }
    at.restore();
  };

  // ---- a panel: what it draws, what the pointer names, and a part of it enlarged

  const nearest = (plot, panel, hidden) => {
    let found = null;
    let least = REACH ** 2;
    for (const series of panel.series) {
      if (!series.names || hidden.has(series.label)) continue;
      series.x.forEach((value, i) => {
        const name = series.names[i] ?? series.label;
        if (series.y[i] === null || !name) return;
        const [x, y] = [plot.valToPos(value, "x"), plot.valToPos(series.y[i], "y")];
        const distance = (x - plot.cursor.left) ** 2 + (y - plot.cursor.top) ** 2;
        if (distance < least) [found, least] = [{ name, x, y }, distance];
      });
    }
    return found;
  };
  const draw = (slot, panel, { ink, grid }, hidden, zoomed) => {
    const place = slot.appendChild(document.createElement("div"));
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    for (const [axis, where] of [["y", "before"], ["x", "after"]]) {
      const label = document.createElement("p");
      label.className = "axis";
      label.textContent = panel[axis].label;
      place[where](label);
    }
    const rows = panel.rows.map((name) => broken(name, Math.min(220, 0.4 * slot.clientWidth)));
    const scale = ({ log, range }, dir) => ({ time: false, auto: false, distr: log ? 3 : 1, dir, range: (_, low, high) => [low, high], min: range[0], max: range[1] });
    // uPlot would leave out most ticks of a logarithmic axis, though `splits` are as many as fit.
    const filter = (_, splits) => splits;
    const axis = { stroke: ink, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, size: 4 }, gap: 4, filter };
    const values = (_, splits) => splits.map(number);
    const named = { ...axis, grid: { show: false }, splits: () => rows.map((_, i) => i), values: () => rows };
    const plot = new uPlot({
      width: place.clientWidth, height: panel.height, padding: [10, 14, 0, 4],
      legend: { show: false },
      cursor: { x: false, y: false, points: { show: false }, drag: { x: true, y: true, uni: 20, setScale: false } },
      scales: { x: scale(panel.x, 1), y: scale(panel.y, rows.length ? -1 : 1) },
      axes: [
        { ...axis, values, splits: ticks(panel.x, 75), size: 28 },
        {
          ...(rows.length ? named : { ...axis, values, splits: ticks(panel.y, 32) }),
          size: (_, texts) => widest((texts ?? []).flatMap((text) => text.split("\n")), 34) + 14,
        },
      ],
      series: [{}, { points: { show: false }, paths: () => null }],
      hooks: {
        draw: [(self) => paint(self, panel, hidden)],
        setCursor: [(self) => {
          const point = self.cursor.left < 0 ? null : nearest(self, panel, hidden);
          tip.hidden = !point;
          if (!point) return;
          tip.textContent = point.name;
          const isRight = point.x > self.over.clientWidth / 2;
          tip.style.cssText = `top:${point.y + 8}px; ${isRight ? `right:${self.over.clientWidth - point.x + 8}px` : `left:${point.x + 8}px`}`;
        }],
        setSelect: [(self) => {
          const { left, top, width, height } = self.select;
          const ends = (axis, from, length) => [self.posToVal(from, axis), self.posToVal(from + length, axis)].sort((a, b) => a - b);
          const part = {};
          if (width) part.x = ends("x", left, width);
          if (height) part.y = ends("y", top, height);
          self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (width || height) zoomed(self, part);
        }],
      },
    }, [panel.x.range, [null, null]], place);
    plot.over.append(tip);
    new ResizeObserver(() => {
      if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: panel.height });
    }).observe(slot);
    return plot;
  };

  // Panels in one place are over one range of x, also of a part of them.
  const fill = (slot, panels, theme, hidden) => {
    const whole = document.createElement("button");
    Object.assign(whole, { type: "button", className: "whole", textContent: "show all", hidden: true });
    const show = (plot, part) => {
      for (const [name, [min, max]] of Object.entries(part)) plot.setScale(name, { min, max });
    };
    const plots = panels.map((panel) => draw(slot, panel, theme, hidden, (self, part) => {
      whole.hidden = false;
      for (const plot of plots) show(plot, plot === self ? part : part.x ? { x: part.x } : {});
    }));
    const reset = () => {
      whole.hidden = true;
      plots.forEach((plot, i) => show(plot, { x: panels[i].x.range, y: panels[i].y.range }));
    };
    whole.addEventListener("click", reset);
    for (const plot of plots) plot.over.addEventListener("dblclick", reset);
    slot.append(whole);
    return plots;
  };
  const open = async (place) => {
    const hidden = new Set();
    place.classList.add("drawing-now"); // has its width, and is not seen
    const { figures, ...theme } = await charts();
    const items = figures.get(place.dataset.chart);
    const plots = [...place.querySelectorAll(".plot")].flatMap((slot, i) => fill(slot, items[i], theme, hidden));
    for (const key of place.querySelectorAll(".legend button")) {
      key.addEventListener("click", () => {
        const shown = key.getAttribute("aria-pressed") !== "true";
        key.setAttribute("aria-pressed", shown);
        hidden[shown ? "delete" : "add"](key.dataset.series);
        for (const plot of plots) plot.redraw(false);
      });
    }
    place.classList.replace("drawing-now", "drawn");
  };
  const watch = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      // The static picture stays where a browser cannot draw.
      open(target).catch((error) => { target.classList.remove("drawing-now"); console.warn(error.message); });
    }
  }, { rootMargin: "800px" });
  for (const place of document.querySelectorAll(".drawing")) watch.observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
}
