// The blocks of the cache, each in the colour of the request that holds it.

const MOST_CELL = 18; // pixels

// How the blocks are laid out: cells of a size in columns.
function layOut(count, width, height) {
  let cell = Math.floor(Math.sqrt((width * height) / Math.max(1, count)));
  cell = Math.max(1, Math.min(MOST_CELL, cell));
  const columns = Math.max(1, Math.floor(width / cell));
  return { cell, columns, height: Math.ceil(count / columns) * cell };
}

const placeOf = (block, { cell, columns }) => [
  ((block - 1) % columns) * cell, // block 0 is reserved and not shown
  Math.floor((block - 1) / columns) * cell,
];

function blockAt(x, y, { cell, columns }, count) {
  const column = Math.floor(x / cell);
  const block = Math.floor(y / cell) * columns + column + 1;
  return column < columns && block >= 1 && block <= count ? block : null;
}

function paintGrid(context, layout, { state, selected, hovered }) {
  const { cell } = layout;
  const size = cell - (cell > 8 ? 2 : cell > 4 ? 1 : 0);
  const { panel, line, cached, ink } = colours();
  const count = state.engine?.num_blocks ?? 0;
  const chosen = state.requests.get(selected)?.blocks.length ? selected : null;
  const shared = [];
  const owned = new Set();
  context.fillStyle = line;
  context.beginPath();
  for (let block = 1; block <= count; block += 1) {
    const [x, y] = placeOf(block, layout);
    context.rect(x, y, size, size);
  }
  context.fill();
  for (const { number, blocks } of state.requests.values()) {
    context.fillStyle = colourOf(number);
    context.globalAlpha = chosen === null || chosen === number ? 1 : 0.4;
    for (const block of blocks) {
      if (owned.has(block)) {
        shared.push(block);
        if (chosen !== number) continue;
      }
      owned.add(block);
      const [x, y] = placeOf(block, layout);
      context.fillRect(x, y, size, size);
    }
  }
  context.globalAlpha = 1;
  const inner = Math.max(1, Math.round(size * 0.36));
  const offset = Math.floor((size - inner) / 2);
  context.fillStyle = panel;
  for (const block of new Set(shared)) {
    const [x, y] = placeOf(block, layout);
    context.fillRect(x + offset, y + offset, inner, inner);
  }
  paintCached(context, state, owned, layout, size, { panel, cached });
  if (hovered !== null && hovered !== undefined) {
    const [x, y] = placeOf(hovered, layout);
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    context.strokeRect(x - 1, y - 1, size + 2, size + 2);
  }
}

// Cached blocks that nobody owns are rings.
function paintCached(context, state, owned, layout, size, { panel, cached }) {
  const rim = size > 8 ? 2 : size > 2 ? 1 : 0;
  const unowned = [...state.cached.keys()].filter((block) => !owned.has(block));
  for (const [colour, inset] of rim ? [[cached, 0], [panel, rim]] : [[cached, 0]]) {
    context.fillStyle = colour;
    for (const block of unowned) {
      const [x, y] = placeOf(block, layout);
      context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
    }
  }
}

// What is known of a block, in words.
function blockText(block, state) {
  const owners = [state.owners().get(block) ?? []].flat();
  const isCached = state.cached.has(block);
  if (!owners.length) return `Block ${block}: ${isCached ? "cached, no owner" : "free"}`;
  const size = state.engine.block_size;
  const place = state.requests.get(owners[0]).blocks.indexOf(block) * size;
  const who = owners.length > 1 ? `shared by requests ${owners.join(", ")}` : `request ${owners[0]}`;
  return `Block ${block}: ${who}, tokens ${place} to ${place + size - 1}${isCached ? ", cached" : ""}`;
}
