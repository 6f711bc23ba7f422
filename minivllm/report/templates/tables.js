"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const original = [...body.rows];
  const key = (row, column) => {
    const cell = row.cells[column];
    const raw = "sort" in cell.dataset ? cell.dataset.sort : cell.textContent.trim();
    const number = Number(raw.replaceAll(",", ""));
    return raw === "" || raw === "–" ? null : Number.isNaN(number) ? raw : number;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  const sort = (column) => {
    // Numbers first show their greatest; a third click restores the order of measurement.
    const cycle = heads[column].classList.contains("text") ? ["ascending", "descending"] : ["descending", "ascending"];
    const next = cycle[cycle.indexOf(heads[column].getAttribute("aria-sort")) + 1] ?? null;
    for (const head of heads) head.removeAttribute("aria-sort");
    let rows = [...original];
    if (next) {
      heads[column].setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      rows.sort((x, y) => {
        const a = key(x, column), b = key(y, column);
        // Rows without a figure stay at the end whichever way the column is sorted.
        return a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b);
      });
    }
    body.append(...rows);
  };
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(column));
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(column); }
    });
  });
}
for (const input of document.querySelectorAll("input[data-filter]")) {
  const rows = [...document.getElementById(input.dataset.filter).tBodies[0].rows];
  const status = input.closest(".filter").querySelector("[role=status]");
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    status.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  });
}
// A number may lead to a record in a closed list.
const reveal = () => {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  const folded = target && (target.closest("details:not([open])") ?? target.querySelector(":scope > details[data-printed]:not([open])"));
  if (folded) { folded.open = true; target.scrollIntoView(); }
};
addEventListener("hashchange", reveal);
reveal();
// On paper nothing can be opened.
for (const details of document.querySelectorAll("details[data-printed]")) {
  const closed = () => { details.open = false; };
  addEventListener("beforeprint", () => {
    if (details.open) return;
    details.open = true;
    addEventListener("afterprint", closed, { once: true });
  });
}
for (const { firstElementChild: text, lastElementChild: button } of document.querySelectorAll(".command")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch { // not allowed to: what is selected can be copied by hand
      getSelection().selectAllChildren(text);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
// What is wider than its box says so in words, too: a shadow is easily missed.
const boxes = new ResizeObserver((entries) => {
  for (const { target } of entries) target.classList.toggle("cut", target.scrollWidth > target.clientWidth + 1);
});
for (const box of document.querySelectorAll(".scroll, .card")) boxes.observe(box);
