"use strict";
// What was measured of ways to save, or of ckptool's own commands: a chart and a table.

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
      { head: "first", right: true, of: (r) => r.blocked.first, cell: (r) => seconds(r.blocked.first) },
      { head: "written", right: true, of: (r) => r.written.median, cell: (r) => seconds(r.written.median) },
      { head: "durable", right: true, of: (r) => r.durable.median, cell: (r) => seconds(r.durable.median) },
      { head: "steps", right: true, of: (r) => r.steps.slowdown ?? 0, cell: (r) => r.steps.slowdown === null ? "–" : `${r.steps.slowdown > 0 ? "+" : ""}${Math.round(100 * r.steps.slowdown)} %` },
      { head: "memory", right: true, of: (r) => r.host_memory.extra, cell: (r) => `+ ${size(r.host_memory.extra)}` },
      { head: "saved state", cell: (r) => chip(r.consistency.verdict, clean(r) ? "good" : "bad") },
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

// A row beside what it is compared with, on a scale of their own; rows without peers are in the table.
function besidePeers(rows) {
  const named = new Map(rows.map((row) => [row.name, row]));
  return rows.filter((row) => row.ratios.length).map((row) => {
    const group = [row, ...row.ratios.map((ratio) => named.get(ratio.peer)).filter(Boolean)], longest = Math.max(...group.map((each) => each.median));
    return h("div", { class: "group" }, group.map((each) => h("div", { class: "bars" }, h("span", { class: "who" }, each === row ? h("b", null, shown(each.name)) : shown(each.name)),
      h("span", { class: "track" }, h("i", { class: each === row ? "written" : "durable", css: { width: `${((100 * each.median) / longest).toFixed(2)}%` } })),
      h("span", { class: "numbers" }, h("b", null, seconds(each.median)), each.measure === "cpu" ? " CPU" : ""))));
  });
}

const ratio = ({ value, peer, lowest, highest }) => `${value.toFixed(2)} × ${shown(peer)}${lowest < highest ? ` (${lowest.toFixed(2)} to ${highest.toFixed(2)})` : ""}`;

function transferPage(report) {
  const { settings, rows } = report;
  return [
    h("header", { class: "masthead" }, h("p", { class: "kind" }, "bench: ckptool's commands, on a checkpoint"), h("h1", null, nameOf(settings.source))),
    tiles([[size(settings.nbytes), "in the checkpoint"], [count(settings.files), "files"], [count(settings.repeat), settings.repeat > 1 ? "rounds, interleaved" : "round"]]),
    section("Beside their peers", shown(`median, ${settings.conditions}`), besidePeers(rows)),
    section("Measured", null, table([
      { head: "command", of: (r) => r.name, cell: (r) => h("span", { title: shown(String(r.command)) }, shown(r.name)) },
      { head: "median", right: true, of: (r) => r.median, cell: (r) => `${seconds(r.median)}${r.measure === "cpu" ? " CPU" : ""}` },
      { head: "speed", right: true, cell: (r) => r.nbytes ? `${size(Math.floor(r.nbytes / r.median))}/s` : "–" },
      { head: "peak memory", right: true, of: (r) => r.peak_bytes, cell: (r) => size(r.peak_bytes) },
      { head: "against its peers", cell: (r) => h("ul", { class: "reasons" }, r.ratios.map((each) => h("li", null, ratio(each)))) },
    ], rows)), reasons("Skipped", report.skipped, "note"), machine(report),
  ];
}
