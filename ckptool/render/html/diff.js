"use strict";
// What differs between two checkpoints: names, shapes, types, and how much values changed.

function diffPage(report) {
  const looks = (t) => [h("code", null, shape(t.shape)), " ", dtype(t.dtype)];
  const only = (side, packed) => {
    const rows = unpack(packed);
    return rows.length ? section(`Only in ${side}`, plural(rows.length, "tensor"), table([
      { head: "tensor", of: labelOf, cell: (t, text) => foldedName(t, text, (_, name) => name) },
      { head: "shape", cell: (t) => h("code", null, shape(t.shape)) }, { head: "dtype", of: (t) => t.dtype, cell: (t) => dtype(t.dtype) },
    ], alike(rows), { search: namesOf, label: "Filter tensors", sort: 0 })) : null;
  };
  const pairs = (title, packed) => {
    const rows = unpack(packed);
    return rows.length ? section(title, plural(rows.length, "tensor"), table([
      { head: "tensor", of: labelOf, cell: (t, text) => foldedName(t, text, (_, name) => name) },
      { head: "A", cell: (t) => looks(t.a) }, { head: "B", cell: (t) => looks(t.b) },
    ], alike(rows, "tensor"), { search: namesOf, label: "Filter tensors", sort: 0 })) : null;
  };
  const side = (name, each) => h("div", { class: "side-card" }, h("b", null, name), nameOf(each.path), chip(each.model || each.format || "cannot be read"),
    h("p", { class: "remark" }, `${plural(each.totals.tensors, "tensor")}, ${size(each.totals.bytes)}`));
  return [
    h("header", { class: "masthead" }, h("p", { class: "kind" }, "diff"), answer(report.summary, report.ok)),
    h("div", { class: "sides" }, side("A", report.a), side("B", report.b)),
    report.fit ? h("p", { class: "panel hint" }, h("b", null, "hint "), h("code", null, shown(report.fit.option)), ` gives A ${count(report.fit.common)} of the ${count(report.fit.wanted)} names in B`) : null,
    changedModules(report), changedTensors(report),
    only("A", report.only_a), only("B", report.only_b),
    pairs("Shape differs", report.shape_differs), pairs("Type differs", report.dtype_differs),
    report.findings.length ? findingsPanel(report.findings, "Other differences") : null,
    report.alike ? h("p", { class: "remark" }, `${plural(report.alike, "tensor")} with the same name, shape and type${report.values_compared ? "" : "; their content was not compared: diff --values does"}`) : null,
  ];
}

/** The change relative to what was there; NaN and infinite ones come as text. */
const relative = (value) => value === null ? "–" : typeof value === "string" ? (value === "nan" ? "NaN" : "∞") : value === 0 ? "0" : Number(value.toPrecision(3)).toString();
const weight = (value) => typeof value === "string" ? (value === "nan" ? Infinity : Number.MAX_VALUE) : value ?? -1;

/** How long the bar of a change is: a tenth for each power of ten above 1e-10, so that all bars compare. */
const length = ({ relative: value }) => typeof value === "string" ? 1 : !value ? 0 : Math.max(0.02, 1 + Math.log10(value) / 10);
const change = (row) => [h("span", { class: row.relative === "nan" ? "alarm" : null }, relative(row.relative)), bar(length(row), "change")];

function changedModules({ modules }) {
  if (modules.length < 2) return null;
  return section("Changed by module", "|B − A| / |A|; a bar has a tenth for each power of ten from 1e-10 to 1", table([
    { head: "module", of: (m) => m.module, cell: (m, text) => nameOf(m.module, text) },
    { head: "change", right: true, of: (m) => weight(m.relative), cell: change },
    { head: "changed", right: true, of: (m) => m.changed, cell: (m) => `${count(m.changed)} of ${count(m.tensors)}` },
  ], modules, { search: (m) => m.module, label: "Filter modules" }));
}

function changedTensors({ changed, values_compared: compared, alike: common }) {
  if (!compared || !common) return null;
  if (!changed.length) return section("Changed", null, h("p", { class: "empty good" }, "no tensor that both have changed"));
  return section("Changed tensors", `${plural(changed.length, "tensor")}; change: |B − A| / |A|`, table([
    { head: "tensor", of: (t) => t.tensor, cell: (t, text) => nameOf(t.tensor, text) },
    { head: "change", right: true, of: (t) => weight(t.relative), cell: change },
    { head: "differ", right: true, of: (t) => t.differing, cell: (t) => count(t.differing) },
    { head: "of", right: true, of: (t) => t.elements, cell: (t) => count(t.elements) },
    { head: "largest", right: true, of: (t) => t.largest ?? 0, cell: (t) => number(t.largest) },
  ], changed, { search: (t) => t.tensor, label: "Filter tensors" }));
}
