"use strict";
// Areas in the ratio of bytes, modules within modules: squarified (Bruls, Huizing, van Wijk, 2000).

const CELLS = 160, HEAD = 19;

/** Return [item, x, y, width, height] of items with a `bytes`, the largest first. */
function squarify(items, x, y, width, height) {
  const placed = [];
  let rest = items.filter((item) => item.bytes > 0);
  let left = sum(rest.map((item) => item.bytes));
  while (rest.length && width > 0 && height > 0) {
    const side = Math.min(width, height), scale = (width * height) / left;
    let taken = 0, total = 0, worst = Infinity;
    for (const item of rest) {
      const next = total + item.bytes, thick = (next * scale) / side;
      const ratio = Math.max(...[rest[0], item].map(({ bytes }) => {
        const long = (bytes * scale) / thick;
        return Math.max(long / thick, thick / long);
      }));
      if (taken && ratio > worst) break;
      worst = ratio; total = next; taken += 1;
    }
    const thick = (total * scale) / side;
    let at = 0;
    for (const item of rest.slice(0, taken)) {
      const long = (item.bytes / total) * side;
      placed.push(width >= height ? [item, x, y + at, thick, long] : [item, x + at, y, long, thick]);
      at += long;
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    rest = rest.slice(taken);
    left -= total;
  }
  return placed;
}

class Treemap {
  constructor(select) {
    this.select = select;
    this.box = h("div", { class: "treemap", role: "group", "aria-label": "Sizes as areas" });
    this.path = h("nav", { class: "crumbs", "aria-label": "Module shown" });
    this.element = h("div", null, this.path, this.box);
    new ResizeObserver(() => this.draw()).observe(this.box);
  }
  show(node) {
    this.node = node;
    while (this.node.tensors < 2 && this.node.parent) this.node = this.node.parent;
    this.selected = node;
    this.draw();
  }
  draw() {
    const { clientWidth: width, clientHeight: height } = this.box;
    if (!this.node || !width) return;
    const way = [];
    for (let at = this.node; at; at = at.parent) way.unshift(at);
    this.path.replaceChildren(...way.flatMap((at, i) => [
      i ? h("span", { "aria-hidden": "true" }, "›") : null,
      h("button", { type: "button", "aria-current": at === this.node ? "true" : null, on: { click: () => this.select(at) } },
        i ? shown(at.step) || "(no name)" : "everything"),
    ]).filter(Boolean), h("span", { class: "bytes" }, size(this.node.bytes)));
    this.box.replaceChildren(...this.cells(this.node, 0, 0, width, height, 0, [width, height]));
    if (!this.node.bytes) this.box.append(h("p", { class: "empty" }, "no bytes: every tensor here is empty"));
  }
  /** The cells of a module in a part of a box of size `whole`, of which all places are shares: so they can be printed. */
  cells(node, x, y, width, height, depth, whole) {
    const items = branches(node).map(({ node: child, label }) => ({ node: child, label, bytes: child.bytes }));
    if (node.tensor) items.push({ node, label: "(itself)", bytes: node.tensor.bytes, leaf: true });
    items.sort((a, b) => b.bytes - a.bytes);
    const rest = items.splice(CELLS);
    if (rest.length) items.push({ node, label: `${count(rest.length)} more`, bytes: sum(rest.map((r) => r.bytes)), leaf: true });
    items.sort((a, b) => b.bytes - a.bytes);
    return squarify(items, x, y, width, height).map(([item, left, top, wide, high]) =>
      wide < 1.5 || high < 1.5 ? null : this.cell(item, left, top, wide, high, depth, whole)).filter(Boolean);
  }
  cell(item, x, y, width, height, depth, [across, down]) {
    const share = (length, of) => `${((100 * length) / of).toFixed(3)}%`;
    const { node, label, bytes } = item, inner = width > 70 && height > 46 && depth < 3 && !item.leaf && node.children.size > 1;
    const named = height > 15 && width > Math.min(38, 10 + 7 * label.length);
    const made = h("div", {
      class: `cell ${partOf(node)} ${inner ? "group" : ""} ${node === this.selected && !item.leaf ? "selected" : ""}`,
      title: `${shown(node.name)}${item.leaf ? ` ${label}` : ""}\n${size(bytes)}, ${plural(item.leaf ? 1 : node.tensors, "tensor")}`,
      tabindex: depth ? "-1" : "0", role: "button", "aria-label": `${label}, ${size(bytes)}`,
      css: { left: share(x, across), top: share(y, down), width: share(width - 1, across), height: share(height - 1, down), "--depth": depth },
      on: {
        click: (event) => { event.stopPropagation(); this.select(node); },
        keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); this.select(node); } },
      },
    }, named ? h("span", { class: "cap" }, h("span", null, label), width > 110 ? h("em", null, size(bytes)) : null) : null);
    if (inner) made.append(...this.cells(node, 3, HEAD, width - 7, height - HEAD - 4, depth + 1, [width - 1, height - 1]));
    return made;
  }
}
