"use strict";
// Elements, text and numbers. All that comes from a report is set as text, never as markup.

/** The name of SVG, which is never fetched; in parts, so that no address is in the page. */
const SVG = ["http", "//www.w3.org/2000/svg"].join(":");

/** Make an element; props are attributes, `on` its listeners, `css` its style. */
function h(tag, props, ...children) {
  const [name, ns] = tag.startsWith("svg:") ? [tag.slice(4), SVG] : [tag, null];
  const made = ns ? document.createElementNS(ns, name) : document.createElement(name);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (key === "css") for (const [rule, to] of Object.entries(value)) made.style.setProperty(rule, to);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(9).filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

/** Spell out control, direction and other invisible characters of untrusted text. */
function shown(text) {
  return String(text).replace(/[\p{C}\p{Z}]/gu, (c) =>
    c === " " ? c : c.codePointAt(0) > 0xffff ? `\\u{${c.codePointAt(0).toString(16)}}`
      : `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
}

const count = (n) => Number(n).toLocaleString("en-US");
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const most = (numbers, least = 0) => numbers.reduce((a, b) => Math.max(a, b), least);
const digits = (value) => value >= 99.95 ? count(Math.round(value)) : value.toFixed(value >= 9.995 ? 1 : 2);

function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = bytes / 1024;
  while (value >= 999.5 && units.length > 1) { value /= 1024; units.shift(); }
  return `${digits(value)} ${units[0]}`;
}

function magnitude(n) {
  for (const [limit, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]])
    if (n >= limit) return `${digits(n / (unit === "K" ? 1e3 : limit))} ${unit}`;
  return count(n);
}

const percent = (share) => share >= 0.0995 ? `${Math.round(share * 100)} %` : `${(share * 100).toFixed(1)} %`;
const seconds = (s) => s < 0.0995 ? `${(s * 1000).toPrecision(2)} ms` : `${s < 99.5 ? s.toFixed(2) : count(Math.round(s))} s`;
const number = (x) => x === null || x === undefined ? "–"
  : typeof x === "string" ? x : Number.isInteger(x) ? count(x) : String(Number(x.toPrecision(4)));

const SHORT = { float32: "fp32", float16: "fp16", bfloat16: "bf16", float64: "fp64" };
const dtype = (name) => SHORT[name] || name;
const shape = (dims) => dims.length ? `[${dims.join(", ")}]` : "scalar";

/** The numbers of a text such as `0..3,8`. */
function ranksOf(text) {
  const numbers = [];
  for (const part of text ? text.split(",") : []) {
    const [first, last] = part.split("..").map(Number);
    for (let n = first; n <= (last === undefined ? first : last); n++) numbers.push(n);
  }
  return numbers;
}

/** Rows that differ in one key alone, as the page holds them. */
const unpack = ({ key, looks, rows }) => rows.map(([name, look]) => ({ ...looks[look], [key]: name, look }));

const natural = new Intl.Collator("en", { numeric: true }).compare;

const LONGEST = 180;

/** A name, its steps parted so that it can break after a dot; what matches is marked, much of a very long one cut. */
function nameOf(text, found = "") {
  const whole = shown(text) || "(no name)";
  const name = whole.length > LONGEST ? `${whole.slice(0, LONGEST / 2)}…${whole.slice(-LONGEST / 2)}` : whole, at = found ? name.toLowerCase().indexOf(found.toLowerCase()) : -1;
  const parts = at < 0 ? [[name, false]]
    : [[name.slice(0, at), false], [name.slice(at, at + found.length), true], [name.slice(at + found.length), false]];
  const pieces = (part) => part.split(/(?<=[._/])/).flatMap((step, i) => i ? [h("wbr"), step] : [step]);
  return h("span", { class: "name", title: whole.length > 60 ? whole.slice(0, 2000) : null },
    parts.map(([part, marked]) => marked ? h("mark", null, pieces(part)) : pieces(part)));
}

const section = (title, remark, ...children) => h("section", { class: "panel" },
  h("header", null, h("h2", null, title), remark ? h("span", { class: "remark" }, remark) : null), children);

const chip = (text, kind = "") => h("span", { class: `chip ${kind}` }, text);

function facts(rows) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, known.map(([label, value]) =>
    h("div", null, h("dt", null, label), h("dd", null, value))));
}

const tiles = (rows) => h("div", { class: "tiles" }, rows.map(([value, label]) =>
  h("div", { class: "tile" }, h("b", null, value), h("span", null, label))));

/** The head of a page: what it is of, and its answer. */
function masthead(kind, path, ...more) {
  return h("header", { class: "masthead" },
    h("p", { class: "kind" }, kind), h("h1", null, nameOf(path)), more);
}

/** A path without the folder that it is in. */
const within = (path, folder) => path.startsWith(`${folder}/`) ? path.slice(folder.length + 1) : path;

function answer(summary, ok, partly = false) {
  const [head, ...rest] = shown(summary).split(":");
  return h("p", { class: `answer ${!ok ? "bad" : partly ? "partly" : "good"}` },
    h("b", null, head), rest.length ? `:${rest.join(":")}` : "");
}
