"use strict";
// A table whose rows are drawn a page at a time, sorted by its heads and filtered by what is typed.

const PAGE = 50;

/**
 * columns: {head, of(row): sort key, cell(row): node or text, right?: boolean}.
 * options: {search(row): text, sort: column number, down: boolean, label, most: rows at first}.
 */
function table(columns, rows, options = {}) {
  const state = { sort: options.sort ?? -1, down: options.down ?? false, text: "", most: options.most || PAGE };
  const body = h("tbody"), more = h("div", { class: "more" });
  const heads = columns.map((column, at) => h("th", { class: column.right ? "right" : null, scope: "col" },
    column.of ? h("button", { type: "button", on: { click: () => sortBy(at) } }, column.head) : column.head));

  function sortBy(at) {
    state.down = state.sort === at ? !state.down : Boolean(columns[at].right);
    state.sort = at;
    draw();
  }
  function chosen() {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length
      ? rows.filter((row) => { const text = options.search(row).toLowerCase(); return words.every((w) => text.includes(w)); })
      : rows.slice();
    const by = columns[state.sort]?.of;
    if (by) found.sort((a, b) => (state.down ? -1 : 1) * compare(by(a), by(b)));
    return found;
  }
  function draw() {
    const found = chosen(), drawn = found.slice(0, state.most);
    heads.forEach((head, at) => head.setAttribute("aria-sort",
      at === state.sort ? (state.down ? "descending" : "ascending") : "none"));
    body.replaceChildren(...drawn.map((row) => h("tr", null, columns.map((column) =>
      h("td", { class: column.right ? "right" : null, "data-head": column.head || null }, column.cell(row, state.text))))));
    const left = found.length - drawn.length;
    more.replaceChildren();
    if (!found.length) more.append(h("p", { class: "empty" }, "nothing matches"));
    if (left > 0) more.append(h("button", { type: "button", on: { click: () => { state.most += 4 * PAGE; draw(); } } },
      `show ${count(Math.min(left, 4 * PAGE))} more`), h("span", null, ` of ${count(left)} that are left`));
  }
  draw();
  const search = options.search && rows.length > 12 ? searchBox(options.label || "Search", (text) => {
    state.text = text; state.most = options.most || PAGE; draw();
  }) : null;
  return h("div", { class: "table" }, search,
    h("div", { class: "scroll" }, h("table", null, h("thead", null, h("tr", null, heads)), body)), more);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number" || typeof b === "number") return typeof a === "number" ? -1 : 1;
  return natural(String(a), String(b));
}

function searchBox(label, act) {
  let waits = 0;
  return h("input", { type: "search", placeholder: label, "aria-label": label, spellcheck: "false", autocomplete: "off",
    on: { input: ({ target }) => { clearTimeout(waits); waits = setTimeout(() => act(target.value.trim()), 80); } } });
}

/** A bar of a share from 0 to 1. */
const bar = (share, kind = "") => h("span", { class: `bar ${kind}`, "aria-hidden": "true" },
  h("i", { css: { width: `${(100 * Math.max(0, Math.min(1, share || 0))).toFixed(2)}%` } }));
