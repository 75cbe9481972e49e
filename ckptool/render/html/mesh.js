"use strict";
// The ranks as the grid of their device mesh, and a tensor as the boxes that they hold.

const MOST_RANKS = 4096, MOST_DRAWN = 2048, MOST_HELD = 12;

/** A color for the nth of many boxes, apart from its neighbors'. */
const hue = (n) => Math.round((n * 137.508) % 360);

/** The boxes of a tensor with their ranks: [{lo, hi, ranks, elements}]. */
class Held {
  constructor({ boxes, ranks }) { this.shapes = boxes; this.sets = ranks; this.known = new Map(); }
  of(tensor) {
    const key = `${tensor.boxes} ${tensor.ranks}`;
    if (!this.known.has(key)) this.known.set(key, this.expand(this.shapes[tensor.boxes], this.sets[tensor.ranks]));
    return this.known.get(key);
  }
  expand(shapeOf, sets) {
    let boxes = shapeOf.boxes;
    if (shapeOf.edges) {
      boxes = [[[], []]];
      for (const runs of shapeOf.edges) {
        const edges = runs.flatMap(([start, step, n]) => Array.from({ length: n }, (_, i) => start + step * i));
        const spans = edges.slice(1).map((high, i) => [edges[i], high]);
        boxes = boxes.flatMap(([lo, hi]) => spans.map(([low, high]) => [[...lo, low], [...hi, high]]));
      }
    }
    return boxes.map(([lo, hi], at) => ({
      lo, hi, at, ranks: ranksOf(sets[at]), said: sets[at], elements: lo.reduce((n, low, d) => n * (hi[d] - low), 1),
    }));
  }
  more(tensor) { return this.shapes[tensor.boxes].more || 0; }
}

const boxText = ({ lo, hi }) => lo.length ? `[${lo.map((low, d) => `${low}:${hi[d]}`).join(", ")}]` : "[]";

class MeshView {
  /** `select(tensor)` is told what is clicked in a rank's list. */
  constructor(report, tensors, held, select) {
    Object.assign(this, { report, tensors, held, select });
    const seen = new Set();
    for (const sets of report.held.ranks) for (const said of sets) for (const rank of ranksOf(said)) seen.add(rank);
    const world = most([report.world_size || 0, report.mesh ? report.mesh.shape.reduce((a, b) => a * b, 1) : 0, most([...seen], -1) + 1]);
    this.known = seen.size > 0;
    this.order = report.held.order;
    const inside = new Set(this.order), few = world <= MOST_RANKS;
    const others = few ? Array.from({ length: world }, (_, rank) => rank) : [...seen].sort((a, b) => a - b);
    this.ranks = [...this.order || [], ...others.filter((rank) => !inside.has(rank))].slice(0, MOST_RANKS);
    this.hidden = world - this.ranks.length;
    this.cells = new Map();
    this.pinned = null;
    this.says = h("div", { class: "rank", "aria-live": "polite" });
    this.legend = h("p", { class: "remark" });
    this.element = h("div", { class: "mesh" }, this.known ? [h("div", null, this.grid(), this.legend), this.says] : h("p", { class: "empty" },
      world > 1 ? `${plural(world, "rank")}, but the files do not say which of them wrote what`
        : "one process wrote these files, or they do not say which rank did: there is no mesh to show"));
  }
  /** Where a rank sits in the mesh, an index per dim; null where it does not. */
  coordinates(rank) {
    const { mesh } = this.report, at = [];
    let position = this.order ? this.order.indexOf(rank) : rank;
    if (!mesh || position < 0 || position >= mesh.shape.reduce((a, b) => a * b, 1)) return null;
    for (const length of [...mesh.shape].reverse()) { at.unshift(position % length); position = Math.floor(position / length); }
    return at;
  }
  grid() {
    const { mesh } = this.report, whole = this.ranks.length;
    const columns = mesh && mesh.shape.length > 1 ? mesh.shape[mesh.shape.length - 1] : whole <= 8 ? whole : whole <= 64 ? 8 : whole <= 512 ? 32 : 64;
    const block = mesh && mesh.shape.length > 2 ? columns * mesh.shape[mesh.shape.length - 2] : whole || 1;
    this.columns = columns;
    const kind = whole <= 128 ? "large" : whole <= 1024 ? "middle" : "small";
    const blocks = [];
    for (let start = 0; start < whole; start += block) {
      const members = this.ranks.slice(start, start + block).map((rank) => this.cell(rank));
      const label = block < whole ? this.coordinates(this.ranks[start])?.slice(0, -2).map((n, d) => this.dim(d, n)).join(", ") ?? "outside the mesh" : null;
      blocks.push(h("figure", null, label ? h("figcaption", null, label) : null,
        h("div", { class: `grid ${kind}`, css: { "--columns": Math.min(columns, whole) } }, members)));
    }
    this.axes = mesh && mesh.shape.length > 1
      ? `rows: ${this.dimName(mesh.shape.length - 2)}, columns: ${this.dimName(mesh.shape.length - 1)}` : mesh ? this.dimName(0) : "ranks in order: no mesh is recorded";
    return h("div", null,
      h("div", { class: "blocks", role: "group", "aria-label": "Ranks", on: { keydown: (event) => this.key(event), mouseleave: () => this.point(null) } }, blocks),
      this.hidden ? h("p", { class: "remark" }, `and ${count(this.hidden)} more ranks, not drawn`) : null);
  }
  dimName(d) { return shown(this.report.mesh.names?.[d] ?? `mesh dim ${d}`); }
  dim(d, n) { return this.report.mesh.names ? `${this.dimName(d)} ${n}` : `${this.dimName(d)} at ${n}`; }
  cell(rank) {
    const made = h("button", { type: "button", class: "device", tabindex: rank === this.ranks[0] ? "0" : "-1", "aria-pressed": "false", on: {
      mouseenter: () => this.point(rank), focus: () => this.point(rank), blur: () => this.point(null),
      click: () => { this.pinned = this.pinned === rank ? null : rank; this.point(rank); },
    } }, String(rank));
    this.cells.set(rank, made);
    return made;
  }
  key(event) {
    const cells = [...this.cells.values()], at = cells.indexOf(event.target);
    const to = cells[{ ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + this.columns, ArrowUp: at - this.columns, Home: 0, End: cells.length - 1 }[event.key]];
    if (at < 0 || !to) return;
    event.preventDefault();
    cells[at].tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
  /** Show what ranks hold of a module, or of a tensor. */
  show(node) {
    this.node = node;
    if (!this.known) return;
    const bytes = this.bytes = this.bytesOf(node), whole = most([...bytes.values()], 1);
    const boxes = node.tensor && !node.children.size ? this.held.of(node.tensor) : null;
    const colors = new Map();
    if (boxes && boxes.length > 1) for (const box of boxes) for (const rank of box.ranks) if (!colors.has(rank)) colors.set(rank, hue(box.at));
    for (const rank of this.ranks) {
      const cell = this.cells.get(rank), share = (bytes.get(rank) || 0) / whole, color = colors.get(rank);
      cell.classList.toggle("none", !bytes.get(rank));
      cell.classList.toggle("colored", color !== undefined);
      cell.style.setProperty("--share", share.toFixed(3));
      cell.style.setProperty("--hue", color ?? 0);
      cell.setAttribute("aria-label", `rank ${rank}: ${size(bytes.get(rank) || 0)}`);
    }
    const held = [...bytes.values()], of = node.parent ? `of ${shown(node.name)}` : "in all";
    const high = most(held), low = held.reduce((a, b) => Math.min(a, b), high);
    const even = held.length && low === high && held.length === this.ranks.length + this.hidden;
    this.legend.textContent = !held.length ? `no rank is known to hold any ${of}`
      : even ? `each rank holds ${size(held[0])} ${of}`
        : `${plural(held.length, "rank")} ${held.length === 1 ? "holds" : "hold"} ${low === high ? size(low) : `${size(low)} to ${size(high)}`} ${of}`;
    this.point(null);
  }
  bytesOf(node) {
    const bytes = new Map(), looks = this.report.tensors.looks;
    for (const [look, times] of looksOf(node)) {
      const item = itemBytes(looks[look]);
      for (const box of this.held.of(looks[look])) for (const rank of box.ranks)
        bytes.set(rank, (bytes.get(rank) || 0) + times * item * box.elements);
    }
    return bytes;
  }
  /** Show what one rank holds; without one, of what is pinned. */
  point(rank) {
    const at = rank ?? this.pinned ?? this.ranks[0];
    for (const [each, cell] of this.cells) cell.setAttribute("aria-pressed", String(each === this.pinned));
    this.onpoint?.(rank ?? this.pinned ?? null);
    const where = this.coordinates(at), { looks } = this.report.tensors, found = new Map();
    for (const [look, times] of looksOf(this.node)) {
      const mine = this.held.of(looks[look]).filter((box) => box.ranks.includes(at));
      if (mine.length) found.set(look, { mine, times, by: looks[look].by, bytes: itemBytes(looks[look]) * sum(mine.map((b) => b.elements)) });
    }
    const holds = largest(tensorsIn(this.node), (tensor) => found.get(tensor.look)?.bytes, MOST_HELD), kinds = [...found.values()];
    const wrote = kinds.some(({ by }) => by === "files"), placed = kinds.some(({ by }) => by !== "files"), held = sum(kinds.map(({ times }) => times));
    this.says.replaceChildren(
      h("h3", null, `rank ${at}`, where ? h("span", { class: "remark" }, where.map((n, d) => this.dim(d, n)).join(", ")) : null,
        this.pinned === at ? chip("kept", "accent") : null),
      rank === null && this.pinned === null && this.ranks.length > 1 ? h("p", { class: "remark" }, "Point at another rank, or use the arrow keys; a click keeps it.") : "",
      h("p", { class: "remark" }, `${placed ? "holds" : "wrote"} ${size(Math.round(this.bytes.get(at) || 0))} in ${plural(held, "tensor")}`
        + (wrote && placed ? "; of those without placements, what it wrote" : "")),
      h("ul", { class: "holds" }, holds.map((tensor) => [tensor, found.get(tensor.look)]).map(([tensor, { mine, bytes }]) => h("li", null,
        h("button", { type: "button", on: { click: () => this.select(tensor) } }, nameOf(tensor.name)),
        h("code", null, mine.slice(0, 2).map(boxText).join(" ") + (mine.length > 2 ? ` and ${mine.length - 2} more` : "")), h("span", { class: "bytes" }, size(bytes))))),
      held > holds.length ? h("p", { class: "remark" }, `the largest ${holds.length} of ${count(held)}`) : "");
  }
}

const itemBytes = ({ bytes, shape }) => bytes / Math.max(1, shape.reduce((a, b) => a * b, 1));

/** The few items of which `of` is largest, the first of equals; undefined ones are left out. */
function largest(items, of, most) {
  const kept = [];
  for (const item of items) {
    const value = of(item);
    if (value === undefined || (kept.length === most && value <= of(kept[most - 1]))) continue;
    const at = kept.findIndex((each) => of(each) < value);
    kept.splice(at < 0 ? kept.length : at, 0, item);
    kept.length = Math.min(kept.length, most);
  }
  return kept;
}

/** Draw a tensor: the two dims that are cut most, each box in the color of its ranks. */
function picture(tensor, boxes, more) {
  const solid = boxes.filter((box) => box.elements).slice(0, MOST_DRAWN);
  if (!solid.length || !tensor.shape.length) return null;
  const cuts = tensor.shape.map((_, d) => new Set(solid.map((box) => box.lo[d])).size);
  const order = cuts.map((n, d) => [n, d]).sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, 2).map(([, d]) => d).sort((a, b) => a - b);
  const [down, across] = order.length > 1 ? order : [null, order[0]];
  const seen = solid.filter((box) => box.lo.every((low, d) => d === down || d === across || low === 0));
  const width = 1000, tall = down === null ? 90 : Math.max(120, Math.min(460, (width * tensor.shape[down]) / tensor.shape[across]));
  const x = (n) => (n / tensor.shape[across]) * width, y = (n) => down === null ? (n ? tall : 0) : (n / tensor.shape[down]) * tall;
  const rects = seen.map((box) => {
    const [left, top] = [x(box.lo[across]), down === null ? 0 : y(box.lo[down])];
    const [wide, high] = [x(box.hi[across]) - left, (down === null ? tall : y(box.hi[down])) - top];
    const text = box.said || "?", fits = wide > 12 + 9 * Math.min(text.length, 9) && high > 18;
    const group = h("svg:g", { class: box.ranks.length ? "box" : "box unknown", css: { "--hue": hue(box.at) } }, h("svg:title", null, `${boxText(box)}  ${box.ranks.length ? `rank ${text}` : "rank unknown"}`),
      h("svg:rect", { x: left + 0.75, y: top + 0.75, width: Math.max(0.5, wide - 1.5), height: Math.max(0.5, high - 1.5), rx: 2 }),
      fits ? h("svg:text", { x: left + wide / 2, y: top + high / 2, "text-anchor": "middle", "dominant-baseline": "central" }, text.length > 9 ? `${box.ranks[0]} +${box.ranks.length - 1}` : text) : null);
    group.ranks = new Set(box.ranks);
    return group;
  });
  const remarks = [];
  if (tensor.shape.length > 2) remarks.push(`dims ${down} and ${across} of ${tensor.shape.length}, the others at index 0`);
  if (down !== null) remarks.push(`down: dim ${down}, ${count(tensor.shape[down])}; across: dim ${across}, ${count(tensor.shape[across])}`);
  else remarks.push(`dim 0: ${count(tensor.shape[across])} elements`);
  if (more) remarks.push(`and ${plural(more, "more box")} not drawn`);
  const drawn = h("svg:svg", { class: "picture", viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": "Boxes of the tensor by rank", preserveAspectRatio: "none" }, rects);
  const made = h("figure", null, drawn, h("figcaption", { class: "remark" }, remarks.join("; ")));
  made.point = (rank) => rects.forEach((group) => group.classList.toggle("dim", rank !== null && group.ranks.size > 0 && !group.ranks.has(rank)));
  return made;
}
