"use strict";
// What was measured of ways to save: a chart and a table.

function machine({ machine: of, versions }) {
  return facts([["machine", shown(`${plural(of.cores, "core")} ${of.processor}, ${size(of.memory_bytes)} memory`)], ["disk", shown(of.filesystem)],
    ["versions", shown(Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", "))]]);
}

const reasons = (title, map, kind) => Object.keys(map).length
  ? problems(title, Object.entries(map).map(([name, why]) => `${name}: ${why}`), kind) : null;

function benchPage(report) {
  const { settings, limits, strategies } = report, clean = (row) => row.consistency.verdict === "consistent";
  const limit = Object.entries(limits).filter(([, value]) => value).map(([name, value]) => [name.replaceAll("_", " "), `${size(Math.floor(value))}/s`]);
  const mark = (row) => row.name === report.best ? chip("best", "good") : null;
  return [
    h("header", { class: "masthead" }, h("p", { class: "kind" }, "bench: ways to save"), h("p", { class: `answer ${report.best ? "good" : "bad"}` }, shown(report.advice))),
    tiles([[size(settings.nbytes), "state"], [count(settings.tensors), "tensors"], [count(settings.ranks), `${settings.device} ranks`], [count(settings.repeat), "saves after the first"]]),
    section("Seconds after the call", "median of the steady saves", chart(report, mark)),
    section("Measured", null, table([
      { head: "strategy", of: (r) => r.name, cell: (r) => [shown(r.name), " ", mark(r)] },
      { head: "blocked", right: true, of: (r) => r.blocked.median, cell: (r) => seconds(r.blocked.median) },
      ...(strategies.some((r) => r.overlapped) ? [{ head: "overlapped", right: true, of: (r) => r.overlapped?.median ?? -1, cell: (r) => r.overlapped ? h("span", { title: "blocked, if training waits for the staging only before its next optimizer step" }, seconds(r.overlapped.median)) : "–" }] : []),
      { head: "first", right: true, of: (r) => r.blocked.first, cell: (r) => seconds(r.blocked.first) },
      { head: "written", right: true, of: (r) => r.written.median, cell: (r) => seconds(r.written.median) },
      { head: "durable", right: true, of: (r) => r.durable.median, cell: (r) => seconds(r.durable.median) },
      { head: "load", right: true, of: (r) => r.loaded?.median ?? -1, cell: (r) => r.loaded ? h("span", { title: r.loaded.of_limit === null ? "" : `${Math.round(100 * r.loaded.of_limit)} % of the copy's limit` }, seconds(r.loaded.median)) : "–" },
      { head: "steps", right: true, of: (r) => r.steps.slowdown ?? 0, cell: (r) => r.steps.slowdown === null ? "–" : `${r.steps.slowdown > 0 ? "+" : ""}${Math.round(100 * r.steps.slowdown)} %` },
      { head: "memory", right: true, of: (r) => r.host_memory.extra, cell: (r) => `+ ${size(r.host_memory.extra)}` },
      { head: "saved state", cell: (r) => [chip(r.consistency.verdict, clean(r) ? "good" : "bad"), " ", shown(r.consistency.cause ?? "")] },
      ...(strategies.some((r) => r.cost) ? [
        { head: "a save costs", right: true, of: (r) => r.cost.save, cell: (r) => seconds(r.cost.save) },
        { head: "of training time", right: true, of: (r) => r.cost.lost ?? 0, cell: (r) => r.cost.lost === null ? "–" : `${(100 * r.cost.lost).toPrecision(2)} %` },
        { head: "hours a week", right: true, of: (r) => r.cost.hours_a_week ?? 0, cell: (r) => r.cost.hours_a_week === null ? "–" : r.cost.hours_a_week.toPrecision(2) },
        { head: "best interval", right: true, of: (r) => r.cost.daly ?? 0, cell: (r) => r.cost.daly === null ? "–" : every(r.cost.daly) },
      ] : []),
    ], strategies)),
    strategies.some((row) => row.abort) ? aborted(strategies) : null,
    report.compared ? compared(report.compared) : null,
    reasons("Failed", report.failed, "error"), reasons("Skipped", report.skipped, "note"),
    machine(report), facts(limit),
  ];
}

const every = (value) => value < 60 ? `${Math.round(value)} s` : value < 600 ? `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s` : value < 3600 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;

function aborted(strategies) {
  const left = (names) => names.length ? h("span", { title: shown(names.join("\n")) }, `${count(names.length)} left`) : "none";
  return section("Killed in mid-save", "what was left", table([
    { head: "strategy", of: (r) => r.name, cell: (r) => shown(r.name) },
    { head: "the folder", cell: ({ abort }) => [chip(abort.folder, /NOT WHOLE/.test(abort.folder) ? "bad" : "good"), abort.finished ? " the save was over before the kill" : ""] },
    { head: "processes", right: true, cell: (r) => left(r.abort.processes) }, { head: "shared memory", right: true, cell: (r) => left(r.abort.shared) },
    { head: "temporary files", right: true, cell: (r) => left(r.abort.files) },
  ], strategies.filter((row) => row.abort)));
}

function chart({ strategies }, mark) {
  const longest = Math.max(...strategies.map((row) => row.durable.median)), part = (value) => `${((100 * value) / longest).toFixed(2)}%`;
  const rows = strategies.map((row) => {
    const durable = row.durable.median, blocked = Math.min(row.blocked.median, durable), written = Math.min(Math.max(row.written.median, blocked), durable);
    return h("div", { class: `bars ${row.consistency.verdict === "consistent" ? "" : "dim"}` }, h("span", { class: "who" }, shown(row.name), " ", mark(row)),
      h("span", { class: "track", title: `blocked ${seconds(blocked)}, written ${seconds(written)}, durable ${seconds(durable)}` },
        h("i", { class: "blocked", css: { width: part(blocked) } }), h("i", { class: "written", css: { width: part(written - blocked) } }), h("i", { class: "durable", css: { width: part(durable - written) } })),
      h("span", { class: "numbers" }, h("b", null, seconds(blocked)), ` / ${seconds(durable)}`));
  });
  return [h("p", { class: "legend" }, ["blocked", "written", "durable"].map((kind, at) => h("span", null, h("i", { class: kind }), ["training blocked", "until written", "until durable"][at]))), rows];
}

function compared(changes) {
  return section("Against the earlier run", null, table([
    { head: "strategy", of: (c) => c.name, cell: (c) => shown(c.name) }, { head: "value", cell: (c) => c.value },
    { head: "was", right: true, cell: (c) => c.old === null ? "–" : seconds(c.old) }, { head: "is", right: true, cell: (c) => c.new === null ? "–" : seconds(c.new) },
    { head: "", cell: (c) => [chip(c.regressed ? "regression" : "fine", c.regressed ? "bad" : "good"), " ", shown(c.why)] },
  ], changes));
}
