// Colours, patterns and canvases.

const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
let theme = null; // colours of the style sheet, read once for each scheme

const isDark = () => dark.matches && !printing;

function colours() {
  if (theme?.isDark === isDark()) return theme;
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "panel", "ink", "muted", "line", "accent", "warm", "tint", "warn", "cached"];
  theme = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  theme.isDark = isDark();
  theme.requests = new Map();
  theme.hatches = {};
  return theme;
}

// The colour of a request: the same for its lane and its blocks, and on every page.
function colourOf(number) {
  const { requests } = colours();
  let colour = requests.get(number);
  if (!colour) {
    if (requests.size > 5000) requests.clear();
    const hue = (235 + number * 137.508) % 360; // golden angle: neighbours differ most
    const light = (isDark() ? 0.7 : 0.65) + 0.05 * ((number % 3) - 1);
    colour = `oklch(${light} 0.115 ${hue.toFixed(1)})`;
    requests.set(number, colour);
  }
  return colour;
}

// A hatch that is drawn over a colour: "up", "down" or "cross".
function hatch(context, kind) {
  const { hatches, panel, warn } = colours();
  if (hatches[kind]) return hatches[kind];
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6 * devicePixelRatio;
  const pen = tile.getContext("2d");
  pen.scale(devicePixelRatio, devicePixelRatio);
  pen.strokeStyle = kind === "cross" ? warn : panel;
  pen.lineWidth = kind === "cross" ? 1 : 1.6;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    if (kind !== "down") pen.moveTo(shift - 1, 7), pen.lineTo(shift + 7, -1);
    if (kind !== "up") pen.moveTo(shift - 1, -1), pen.lineTo(shift + 7, 7);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / devicePixelRatio));
  hatches[kind] = pattern;
  return pattern;
}

// Clears a canvas and fits it to its place; the context, in CSS pixels.
function prepare(canvas, width, height) {
  const ratio = devicePixelRatio;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}

// About `count` round times between two, in seconds, and how many decimals they need.
function ticks(from, to, count) {
  const raw = (to - from) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const times = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) times.push(at);
  return [times, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}

// What paints itself again with every frame in which something has changed.
const painters = new Set();
let isDirty = true;
const repaint = () => (isDirty = true);

// Lets a component paint on a canvas: `paint(canvas, width)` with every frame that needs it.
function usePainter(paint) {
  const ref = useRef();
  const latest = useRef();
  latest.current = paint;
  useEffect(() => {
    const painter = () => {
      const width = ref.current?.parentElement.clientWidth;
      if (width) latest.current(ref.current, width);
    };
    painters.add(painter);
    const observer = new ResizeObserver(repaint);
    observer.observe(ref.current.parentElement);
    repaint();
    return () => {
      painters.delete(painter);
      observer.disconnect();
    };
  }, []);
  return ref;
}

dark.addEventListener("change", () => {
  theme = null;
  repaint();
});
addEventListener("beforeprint", () => paintFor(true));
addEventListener("afterprint", () => paintFor(false));

function paintFor(paper) {
  printing = paper;
  document.documentElement.classList.toggle("printing", paper);
  theme = null;
  painters.forEach((paint) => paint());
}
