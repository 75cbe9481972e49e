"use strict";
// What verify found: the answer, each kind of finding with what it affects, the steps of a run.

const MEANINGS = {}, LEVELS = ["error", "warning", "info"];

function verifyPage(report) {
  return [
    masthead(report.against ? "comparison" : "verification", report.path, answer(report.summary, report.ok)),
    report.against ? against(report) : tiles([
      [count(report.totals.tensors), "tensors"], [count(report.totals.files), "files"],
      [report.depth === "quick" ? "no data" : size(report.bytes_read), "read"], [report.format || "unknown", "format"]]),
    findingsPanel(report.findings),
    report.against?.differing.length ? differing(report.against.differing) : null,
  ];
}

function findingsPanel(findings, title = "Findings") {
  if (!findings.length) return section(title, null, h("p", { class: "empty good" }, "nothing to report"));
  const kinds = new Map();
  for (const each of findings) kinds.set(each.code, [...kinds.get(each.code) || [], each]);
  const groups = [...kinds.values()].sort((a, b) => LEVELS.indexOf(a[0].severity) - LEVELS.indexOf(b[0].severity));
  const counts = LEVELS.map((level) => [findings.filter((f) => f.severity === level).length, level]).filter(([n]) => n);
  return section(title, counts.map(([n, level]) => level === "info" ? `${n} info` : plural(n, level)).join(", "), groups.map(kindOf));
}

function kindOf(group) {
  const [{ code, severity, hint }] = group;
  return h("article", { class: `finding ${severity}` },
    h("h3", null, chip(severity, severity), h("code", null, code), h("span", { class: "remark" }, MEANINGS[code] || "")),
    some(group, (finding) => h("li", null, shown(finding.message),
      finding.affected.length > 1 ? h("details", null, h("summary", null, `all ${count(finding.affected.length)} that it affects`),
        some(finding.affected, (each) => h("li", null, shown(each.message)), 100)) : null), 20),
    hint ? h("p", { class: "hint" }, h("b", null, "hint "), shown(hint)) : null);
}

/** A list of which the first are shown, and more on demand. */
function some(list, draw, most) {
  const made = h("ul", null, list.slice(0, most).map(draw));
  if (list.length <= most) return made;
  return [made, h("details", null, h("summary", null, `${count(list.length - most)} more`), h("ul", null, list.slice(most, most + 2000).map(draw)),
    list.length > most + 2000 ? h("p", { class: "remark" }, `and ${count(list.length - most - 2000)} more: verify --json lists all`) : null)];
}

function against({ path, format, against: other }) {
  const side = (name, place, kind, part) => h("div", { class: "side-card" }, h("b", null, name), nameOf(place), chip(kind || "cannot be read"),
    part ? h("p", { class: "remark" }, `${count(part.compared.tensors)} of ${plural(part.total.tensors, "tensor")}, ${size(part.compared.bytes)} of ${size(part.total.bytes)} compared`) : null);
  return h("div", { class: "sides" }, side("A", path, format, other.coverage?.a), side("B", other.path, other.format, other.coverage?.b));
}

function differing(rows) {
  return section("Tensors whose values differ", plural(rows.length, "tensor"), table([
    { head: "tensor", of: (t) => t.tensor, cell: (t, text) => nameOf(t.tensor, text) },
    { head: "differ", right: true, of: (t) => t.differing, cell: (t) => count(t.differing) },
    { head: "of", right: true, of: (t) => t.elements, cell: (t) => count(t.elements) },
    { head: "largest", right: true, of: (t) => t.largest ?? 0, cell: (t) => number(t.largest) },
    { head: "first at", cell: (t) => h("code", null, shape(t.first)) },
    { head: "A", cell: (t) => [h("code", null, shown(t.a.value)), " ", h("span", { class: "remark" }, shown(t.a.place))] },
    { head: "B", cell: (t) => [h("code", null, shown(t.b.value)), " ", h("span", { class: "remark" }, shown(t.b.place))] },
  ], rows, { search: (t) => t.tensor, label: "Filter tensors" }));
}

function verifyRunPage(report) {
  const good = report.steps.filter((step) => step.ok).length;
  const said = report.latest_good === null ? `FAILED: no good step of ${count(report.total)}` : `${report.ok ? "OK" : "FAILED"}: ${good} of ${plural(report.steps.length, "verified step")} good; newest good: ${report.latest_good}`;
  return [masthead("verification of a run", report.path, answer(said, report.ok)),
    section("Steps", `${count(report.steps.length)} of ${count(report.total)} verified`, table([
      { head: "step", right: true, of: (s) => s.number ?? -1, cell: (s) => s.number === null ? "" : count(s.number) },
      { head: "checkpoint", of: (s) => s.path, cell: (s) => nameOf(within(s.path, report.path)) },
      { head: "", cell: (s) => chip(s.ok ? "OK" : "failed", s.ok ? "good" : "bad") },
      { head: "why", cell: (s) => shown(s.reasons.join("; ")) },
    ], report.steps, { search: (s) => s.path, label: "Filter steps" })),
    report.steps.flatMap((step) => step.reports.filter((each) => each.findings.length).map((each) => findingsPanel(each.findings, nameOf(each.path))))];
}
