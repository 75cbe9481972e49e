"use strict";
// A checkpoint: what it is, its modules and tensors, their sizes, and which rank holds what.

const ROWS = ["framework", "version", "parallelism", "step", "arguments", "writer"];

function inspectPage(report) {
  const tensors = unpack(report.tensors), root = growTree(tensors);
  const statistics = new Map((report.stats || []).map((row) => [row.name, row]));
  return [
    masthead("checkpoint", report.path, h("p", { class: "chips" }, chip(report.format, "accent"),
      report.step === null ? null : chip(`step ${count(report.step)}`), report.world_size ? chip(plural(report.world_size, "rank")) : null,
      report.mesh ? chip(meshText(report.mesh)) : null)),
    report.problems.length ? problems("This checkpoint is damaged: what can be read is below", report.problems) : null,
    tiles([[magnitude(report.totals.parameters), "parameters"], [count(report.totals.tensors), "tensors"],
      [size(report.totals.bytes), "of tensors"], [count(report.totals.files), "files"]]),
    about(report),
    tensors.length ? shares(report) : section("Tensors", null, h("p", { class: "empty" }, "no tensors")),
    tensors.length ? explorer(report, root, tensors, statistics) : null,
    report.stats ? section("Statistics", plural(report.stats.length, "tensor"), statsTable(report.stats)) : null,
    values(report.values),
    report.notes.length ? problems("Notes", report.notes, "note") : null,
  ];
}

function meshText(mesh) {
  const dims = mesh.shape.map((length, d) => mesh.names ? `${shown(mesh.names[d])} ${length}` : String(length));
  return `mesh ${dims.join(" × ")}`;
}

const problems = (title, list, kind = "error") => h("section", { class: `panel notice ${kind}` },
  h("header", null, h("h2", null, title)), h("ul", null, list.slice(0, 200).map((text) => h("li", null, shown(text)))),
  list.length > 200 ? h("p", { class: "remark" }, `and ${count(list.length - 200)} more`) : null);

function about({ info, mesh, quantized }) {
  const named = info.framework ? ["framework", "version"] : ["writer", "version"];
  const rest = Object.entries(info).filter(([key]) => !ROWS.includes(key)).map(([key, value]) => `${key} ${value}`);
  const quant = Object.entries(quantized).map(([kind, n]) => `${plural(n, "tensor")} ${kind}`).join(", ");
  return facts([
    ["writer", shown([info.framework ? info.writer : named.map((key) => info[key]).filter(Boolean).join(" "), ...rest].filter(Boolean).join(", "))],
    ["framework", info.framework ? shown(named.map((key) => info[key]).filter(Boolean).join(" ")) : ""],
    ["parallel", shown(info.parallelism || "")], ["arguments", shown(info.arguments || "")], ["quantized", shown(quant)],
    ["mesh", mesh && mesh.source === "inferred" ? `${meshText(mesh).slice(5)}, inferred from chunks and writers` : ""],
  ]);
}

function shares({ shares: rows, totals }) {
  const whole = totals.bytes || 1;
  return section("What takes the space", "by part and element type",
    h("div", { class: "stack", "aria-hidden": "true" }, rows.map((row, at) =>
      h("i", { class: row.part, title: `${row.part} ${dtype(row.dtype)}: ${size(row.bytes)}`, css: { "flex-grow": row.bytes / whole, "--at": at } }))),
    table([
      { head: "part", cell: (row) => [h("i", { class: `dot ${row.part}` }), ` ${row.part}`] },
      { head: "dtype", cell: (row) => dtype(row.dtype) },
      { head: "tensors", right: true, cell: (row) => count(row.tensors) },
      { head: "elements", right: true, cell: (row) => magnitude(row.elements) },
      { head: "bytes", right: true, cell: (row) => size(row.bytes) },
      { head: "share", right: true, cell: (row) => percent(row.bytes / whole) },
    ], rows, { most: 8 }));
}

function explorer(report, root, tensors, statistics) {
  const held = new Held(report.held), detail = h("div", { class: "detail" });
  const tree = new TreeView(root, choose), map = new Treemap(choose);
  const mesh = new MeshView(report, tensors, held, (tensor) => choose(tree.find(tensor)));
  function select(node) {
    try { history.replaceState(null, "", node.name ? `#${encodeURIComponent(node.name)}` : "#"); } catch { /* a name that no address holds */ }
    const { drawing, parts } = node.tensor && !node.children.size
      ? tensorDetail(node.tensor, held, statistics.get(node.name)) : { drawing: null, parts: moduleDetail(node, root, choose, tree) };
    detail.replaceChildren(...parts.flat(9).filter(Boolean));
    mesh.onpoint = drawing ? drawing.point : null;
    tree.reveal(node);
    map.show(node);
    mesh.show(node);
  }
  /** What is chosen by a click or the address is brought into view; a module only by the address: its areas are above. */
  function choose(node, addressed) {
    select(node);
    if (addressed || !node.children.size) detail.parentNode.scrollIntoView({ block: "nearest" });
  }
  const made = h("div", { class: "explorer" },
    h("aside", { class: "panel side" }, h("header", null, h("h2", null, "Modules and tensors")), tree.element),
    h("div", { class: "views" },
      section("Sizes", "areas are bytes; a click goes inside", map.element),
      section("Who holds what", mesh.axes, mesh.element),
      h("section", { class: "panel", "aria-live": "polite" }, detail)));
  tree.openSome(root);
  const first = tree.named(addressed());
  select(first || root);
  if (first) requestAnimationFrame(() => choose(first, true));
  window.addEventListener("hashchange", () => { const node = tree.named(addressed()); if (node) choose(node, true); });
  return made;
}

/** The name that the address of the page ends in. */
function addressed() {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; }
}

function moduleDetail(node, root, select, tree) {
  const rows = [...tensorsIn(node)], cut = node.name ? node.name.length + 1 : 0;
  return [
    h("header", null, h("h2", null, node.parent ? nameOf(node.name) : "Everything"),
      h("span", { class: "remark" }, `${plural(rows.length, "tensor")}, ${size(node.bytes)}, ${percent(root.bytes ? node.bytes / root.bytes : 0)} of all`)),
    tensorTable(alike(rows, "name", cut), (tensor) => select(tree.find(tensor)), node.bytes),
  ];
}

function tensorTable(rows, select, whole) {
  return table([
    { head: "tensor", of: labelOf, cell: (t, text) => foldedName(t, text, (each, name) => h("button", { type: "button", class: "link", on: { click: () => select(each) } }, name)) },
    { head: "shape", of: (t) => t.shape.reduce((a, b) => a * b, 1), cell: (t) => h("code", { class: "shape" }, shape(t.shape)) },
    { head: "dtype", of: (t) => t.dtype, cell: (t) => dtype(t.dtype) },
    { head: "placements", of: (t) => (t.placements || []).join(), cell: (t) => placements(t) },
    { head: "bytes", of: (t) => t.bytes, right: true, cell: (t) => [size(t.bytes), bar(whole ? t.bytes / whole : 0, t.part)] },
  ], rows, { search: (t) => `${namesOf(t)} ${dtype(t.dtype)}`, label: "Filter these tensors", most: 20, sort: 4, down: true });
}

const placements = (tensor) => tensor.placements ? h("span", { class: "placements" }, tensor.placements.map((each) => chip(shown(each))))
  : h("span", { class: "remark" }, tensor.chunks === 1 ? "whole" : plural(tensor.chunks, "chunk"));

function tensorDetail(tensor, held, row) {
  const boxes = held.of(tensor), drawing = boxes.length > 1 ? picture(tensor, boxes, held.more(tensor)) : null;
  const stats = row ? [["min", number(row.min)], ["max", number(row.max)], ["mean", number(row.mean)], ["std", number(row.std)],
    ["norm", number(row.norm)], ["largest size", number(row.absmax)],
    ["zeros", row.zeros === null ? number(null) : `${count(row.zeros)} (${(100 * row.zero_share).toFixed(1)}%)`], ["denormal", number(row.denormal)], ["NaN", number(row.nan)], ["Inf", number(row.inf)]] : [];
  const parts = [
    h("header", null, h("h2", null, nameOf(tensor.name))),
    facts([["shape", h("code", null, shape(tensor.shape))], ["dtype", dtype(tensor.dtype)], ["bytes", `${size(tensor.bytes)} (${count(tensor.bytes)})`],
      ["elements", count(tensor.shape.reduce((a, b) => a * b, 1))], ["part", tensor.part],
      ["placements", tensor.placements ? placements(tensor) : "not recorded"], ["chunks stored", count(tensor.chunks)], ...stats]),
    row && row.histogram.length ? histogram(row) : null,
    drawing,
    table([
      { head: "box", cell: (box) => h("code", null, boxText(box)) },
      { head: tensor.by === "files" ? "written by rank" : "held by ranks", cell: (box) => box.said || "not recorded" },
      { head: "elements", right: true, of: (box) => box.elements, cell: (box) => count(box.elements) },
    ], boxes, { most: 8 }),
  ];
  return { drawing, parts };
}

/** How many values have which size, from one power of two to the next. */
function histogram(row) {
  const most = Math.max(...row.histogram.map(([, n]) => n));
  return table([
    { head: "size of values", of: ([e]) => e, cell: ([e]) => h("code", null, `2^${e} to 2^${e + 1}`) },
    { head: "values", right: true, of: ([, n]) => n, cell: ([, n]) => [count(n), bar(n / most, "model")] },
  ], row.histogram, { most: 16 });
}

function statsTable(rows) {
  const column = (head, key) => ({ head, right: true, of: (row) => row[key] ?? -Infinity, cell: (row) =>
    h("span", { class: (key === "nan" || key === "inf") && row[key] ? "alarm" : null }, number(row[key])) });
  return table([{ head: "tensor", of: (row) => row.name, cell: (row, text) => nameOf(row.name, text) },
    ...["min", "max", "mean", "std", "norm", "absmax", "zeros", "nan", "inf"].map((key) => column(key, key))], rows, { search: (row) => row.name, label: "Filter" });
}

function values(rows) {
  const text = (row) => {
    const value = "value" in row ? row.value : row.content;
    return value === undefined ? `<${row.type}>` : typeof value === "string" ? `'${value}'` : JSON.stringify(value);
  };
  if (!rows.length) return null;
  return section("Values", `${plural(rows.length, "value")} that are no tensors`, table([
    { head: "name", of: (row) => row.name, cell: (row, typed) => nameOf(row.name, typed) },
    { head: "type", of: (row) => row.type, cell: (row) => shown(row.type) },
    { head: "value", cell: (row) => long(text(row)) },
  ], rows, { search: (row) => row.name, label: "Filter values", most: 20 }));
}

/** A text of which the first part is shown, and the rest on demand. */
function long(text, most = 160) {
  const first = h("code", { class: "value" }, shown(text.slice(0, most)));
  if (text.length <= most) return first;
  return h("details", null, h("summary", null, first, `… ${count(text.length)} characters`), h("code", { class: "value" }, shown(text.slice(0, 20000)), text.length > 20000 ? ` … and ${count(text.length - 20000)} more` : ""));
}

function runPage(report) {
  const good = report.steps.filter((step) => step.complete).length;
  const steps = plural(report.steps.length, report.steps.some((s) => s.number !== null) ? "step" : "checkpoint");
  const said = good === report.steps.length ? "COMPLETE" : good ? "PARTLY COMPLETE" : "INCOMPLETE", newest = report.steps.find((step) => step.complete);
  return [masthead("run", report.path, answer(`${said}: ${good} of ${steps} complete${newest && good < report.steps.length ? `, the newest of them ${within(newest.path, report.path)}` : ""}`, good > 0, good < report.steps.length)),
    section("Steps", null, table([
      { head: "step", right: true, of: (s) => s.number ?? -1, cell: (s) => s.number === null ? "" : count(s.number) },
      { head: "checkpoint", of: (s) => s.path, cell: (s) => nameOf(within(s.path, report.path)) },
      { head: "saved", of: (s) => s.saved || "", cell: (s) => h("span", { class: "whole" }, s.saved ? `${s.saved.slice(0, 16).replace("T", " ")} UTC` : "–") },
      { head: "bytes", right: true, of: (s) => s.bytes, cell: (s) => size(s.bytes) },
      { head: "format", cell: (s) => s.formats.join(" + ") },
      { head: "", cell: (s) => [chip(s.unread ? "not read" : s.complete ? "complete" : "incomplete", s.complete ? "good" : "bad"), h("ul", { class: "reasons" }, s.reasons.map((why) => h("li", null, shown(why))))] },
      { head: "optimizer", cell: (s) => s.optimizer ? "yes" : "–" },
      { head: "mesh", cell: (s) => s.mesh ? meshText(s.mesh).slice(5) : s.ranks ? plural(s.ranks, "rank") : "–" },
    ], report.steps, { search: (s) => s.path, label: "Filter steps" }))];
}
