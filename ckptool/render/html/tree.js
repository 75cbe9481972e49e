"use strict";
// The modules of a checkpoint as a tree: a name's steps are its branches. Branches are drawn when opened.

const DEEPEST = 64, BRANCHES = 200;

/** Return the root of the tree of tensors; each node knows its bytes, elements and tensors. */
function growTree(tensors) {
  const root = makeNode("", "", null);
  for (const tensor of tensors) {
    let node = root, name = "";
    add(node, tensor);
    stepsOf(tensor.name).forEach((step, at) => {
      name = at ? `${name}.${step}` : step;
      if (node.children === NONE) node.children = new Map();
      if (!node.children.has(step)) node.children.set(step, makeNode(step, name, node));
      node = node.children.get(step);
      add(node, tensor);
    });
    node.tensor = tensor;
  }
  return root;
}

function stepsOf(name) {
  const steps = name.split(".");
  return steps.length < DEEPEST ? steps : [...steps.slice(0, DEEPEST - 1), steps.slice(DEEPEST - 1).join(".")];
}

const NONE = new Map();
const makeNode = (step, name, parent) => ({ step, name, parent, children: NONE, tensor: null, bytes: 0, tensors: 0 });

function add(node, tensor) {
  node.bytes += tensor.bytes;
  node.tensors += 1;
}

/** How many tensors below a node look alike, by their look. */
function looksOf(node) {
  if (!node.looks) {
    node.looks = new Map();
    for (const { look } of tensorsIn(node)) node.looks.set(look, (node.looks.get(look) || 0) + 1);
  }
  return node.looks;
}

/** The children of a node; a chain of single ones is one child, as `a.b.c`. */
function branches(node) {
  if (node.branches) return node.branches;
  const list = [...node.children.values()].map((child) => {
    let label = shown(child.step) || "(no name)", at = child;
    while (at.children.size === 1 && !at.tensor && label.length < LONGEST) {
      at = at.children.values().next().value;
      label += `.${shown(at.step)}`;
    }
    return { node: at, label };
  });
  return node.branches = list.sort((a, b) => natural(a.label, b.label));
}

/** All tensors below a node, in order. */
function* tensorsIn(node) {
  if (node.tensor) yield node.tensor;
  for (const { node: child } of branches(node)) yield* tensorsIn(child);
}

/** The part of a checkpoint that most bytes below a node are of. */
function partOf(node) {
  if (!node.part) {
    const bytes = new Map();
    for (const tensor of tensorsIn(node)) bytes.set(tensor.part, (bytes.get(tensor.part) || 0) + tensor.bytes);
    node.part = [...bytes].sort((a, b) => b[1] - a[1])[0]?.[0] || "other";
  }
  return node.part;
}

class TreeView {
  constructor(root, select) {
    this.root = root;
    this.select = select;
    this.items = new Map();
    this.list = h("ul", { role: "tree", "aria-label": "Modules and tensors", class: "tree", on: { keydown: (event) => this.key(event) } });
    this.results = h("div", { class: "results", hidden: true });
    const whole = this.item({ node: root, label: "everything" }, root.bytes, 1);
    this.list.append(whole);
    this.open(root, true);
    whole.firstChild.tabIndex = 0;
    this.element = h("div", null,
      searchBox("Search names: all words must match", (text) => this.search(text)), this.results, this.list);
  }
  item({ node, label }, whole, level) {
    const leaf = !node.children.size;
    const row = h("div", { class: "row", tabindex: "-1", on: { click: () => this.choose(node, true), dblclick: () => this.open(node) } },
      leaf ? h("i", { class: "twist" }) : h("i", { class: "twist branch", "aria-hidden": "true", on: { click: (event) => { event.stopPropagation(); this.open(node); } } }),
      h("i", { class: `dot ${partOf(node)}` }),
      h("span", { class: "label", title: label.length > 30 ? label : null }, label),
      node.tensors > 1 ? h("span", { class: "many" }, count(node.tensors)) : null,
      h("span", { class: "bytes" }, size(node.bytes)), bar(whole ? node.bytes / whole : 0, partOf(node)));
    const made = h("li", { role: "treeitem", "aria-level": level, "aria-expanded": leaf ? null : "false", css: { "--level": level } }, row);
    made.node = node;
    this.items.set(node, made);
    return made;
  }
  open(node, wanted) {
    const item = this.items.get(node);
    if (!item || !node.children.size) return;
    const open = wanted ?? item.getAttribute("aria-expanded") !== "true";
    item.setAttribute("aria-expanded", String(open));
    if (open && !item.group) this.fill(item, node);
    item.group.hidden = !open;
  }
  fill(item, node) {
    const list = branches(node), level = Number(item.getAttribute("aria-level")) + 1;
    item.group = h("ul", { role: "group" });
    item.append(item.group);
    const draw = (from) => {
      item.group.append(...list.slice(from, from + BRANCHES).map((each) => this.item(each, node.bytes, level)));
      const left = list.length - from - BRANCHES;
      if (left > 0) item.group.append(h("li", { role: "none", class: "more", css: { "--level": level } },
        h("button", { type: "button", on: { click: ({ target }) => { target.parentNode.remove(); draw(from + BRANCHES); } } },
          `${count(left)} more`)));
    };
    draw(0);
  }
  /** Open the way to a node and mark it. */
  reveal(node) {
    const way = [];
    for (let at = node; at; at = at.parent) way.unshift(at);
    for (const at of way.slice(0, -1)) this.open(at, true);
    this.list.querySelectorAll("[aria-selected=true]").forEach((old) => old.removeAttribute("aria-selected"));
    const item = this.items.get(node);
    if (!item) return;
    item.setAttribute("aria-selected", "true");
    this.focusable(item, false);
    const row = item.firstChild, box = this.list.getBoundingClientRect(), at = row.getBoundingClientRect();
    if (at.top < box.top || at.bottom > box.bottom) this.list.scrollTop += at.top - box.top - box.height / 2;
  }
  choose(node, open) {
    if (open && node.children.size) this.open(node, true);
    this.select(node);
  }
  focusable(item, now) {
    this.list.querySelectorAll(".row[tabindex='0']").forEach((old) => { old.tabIndex = -1; });
    item.firstChild.tabIndex = 0;
    if (now) item.firstChild.focus();
  }
  key(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item || event.target.tagName === "BUTTON") return;
    const rows = [...this.list.querySelectorAll("[role=treeitem]")].filter((each) => each.offsetParent);
    const at = rows.indexOf(item), open = item.getAttribute("aria-expanded");
    const to = { ArrowDown: rows[at + 1], ArrowUp: rows[at - 1], Home: rows[0], End: rows[rows.length - 1] }[event.key];
    if (to) this.focusable(to, true);
    else if (event.key === "ArrowRight" && open === "false") this.open(item.node, true);
    else if (event.key === "ArrowRight" && open === "true") { if (rows[at + 1]) this.focusable(rows[at + 1], true); }
    else if (event.key === "ArrowLeft" && open === "true") this.open(item.node, false);
    else if (event.key === "ArrowLeft") { const up = item.parentNode.closest("[role=treeitem]"); if (up) this.focusable(up, true); }
    else if (event.key === "Enter" || event.key === " ") this.choose(item.node, false);
    else return;
    event.preventDefault();
  }
  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.results.hidden = !words.length;
    this.list.hidden = Boolean(words.length);
    if (!words.length) return;
    this.names ??= [...tensorsIn(this.root)];
    const found = this.names.filter(({ name }) => { const low = name.toLowerCase(); return words.every((w) => low.includes(w)); });
    const shownNow = found.slice(0, BRANCHES);
    this.results.replaceChildren(
      h("p", { class: "remark", role: "status" }, found.length ? `${plural(found.length, "tensor")}, ${size(sum(found.map((t) => t.bytes)))}` : "no tensor has such a name"),
      ...shownNow.map((tensor) => h("button", { type: "button", class: "hit", on: { click: () => this.select(this.find(tensor)) } },
        h("i", { class: `dot ${tensor.part}` }), nameOf(tensor.name, words[0]), h("span", { class: "bytes" }, size(tensor.bytes)))),
      found.length > shownNow.length ? h("p", { class: "remark" }, `and ${count(found.length - shownNow.length)} more: type more of the name`) : "");
  }
  find(tensor) { return this.named(tensor.name); }
  /** The node of a name, if there is one. */
  named(name) { return name ? stepsOf(name).reduce((node, step) => node?.children.get(step), this.root) : null; }
  /** Open what fits, the largest branches first. */
  openSome(root, most = 16) {
    let drawn = branches(root).length + 1;
    const waiting = drawn < most ? [...branches(root)] : [];
    while (waiting.length) {
      waiting.sort((a, b) => b.node.bytes - a.node.bytes);
      const { node } = waiting.shift();
      if (!node.children.size || drawn + node.children.size > most) continue;
      this.open(node, true);
      drawn += node.children.size;
      waiting.push(...branches(node));
    }
  }
}
