"use strict";
// Rows of tensors that differ only in the numbers of their names, as one row.

const NUMBER = /(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])/g;

/** Rows of tensors that look alike and differ only in the numbers of their names. */
function alike(tensors, named = "name", cut = 0) {
  const groups = new Map();
  for (const tensor of tensors) {
    const key = `${tensor.look} ${tensor[named].slice(cut).replace(NUMBER, "\0")}`, group = groups.get(key);
    if (group) group.members.push(tensor);
    else groups.set(key, { ...tensor, named, cut, members: [tensor] });
  }
  for (const group of groups.values()) group.bytes *= group.members.length;
  return [...groups.values()];
}

/** The name of such a row: `layers.{0..31}.weight`. */
function labelOf(group) {
  if (group.label === undefined) {
    const names = group.members.map((tensor) => tensor[group.named].slice(group.cut) || tensor[group.named]);
    const found = names.map((name) => name.match(NUMBER));
    let at = 0;
    group.possible = 1;
    group.label = names.length === 1 ? names[0] : names[0].replace(NUMBER, () => {
      const set = new Set(found.map((each) => Number(each[at])));
      at += 1;
      group.possible *= set.size;
      return numbers(set);
    });
  }
  return group.label;
}

/** Write `7`, or `{0..31}`. */
function numbers(set) {
  const list = [...set].sort((a, b) => a - b), runs = [];
  for (const n of list) {
    const last = runs[runs.length - 1];
    if (last && n === last[1] + 1) last[1] = n; else runs.push([n, n]);
  }
  const text = runs.map(([a, b]) => a === b ? a : b === a + 1 ? `${a},${b}` : `${a}..${b}`).join(",");
  return list.length > 1 ? `{${text}}` : text;
}

const namesOf = (group) => group.members.map((each) => each[group.named]).join(" ");

/** The name of a row, drawn by `draw(tensor, name)`; of several tensors, these on demand. */
function foldedName(group, text, draw) {
  const label = nameOf(labelOf(group), text.split(" ")[0]);
  if (group.members.length === 1) return draw(group.members[0], label);
  const others = group.possible > group.members.length ? ` of ${count(group.possible)}` : "";
  return h("details", { on: { toggle: ({ target }) => {
    if (target.children.length === 1) target.append(...[some(group.members, (each) => h("li", null, draw(each, nameOf(each[group.named]))), 50)].flat());
  } } }, h("summary", null, label, h("span", { class: "times" }, ` ×${count(group.members.length)}${others}`)));
}
