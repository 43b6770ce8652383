"use strict";
// Draws the page from its data. Every text comes from a job that may be a stranger's: it is set as text, never parsed.
(() => {
const page = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

// --- elements ------------------------------------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("aria-")) { node.setAttribute(name, String(value)); continue; }
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const ranksWord = (ranges, count) => (page.labels ? namesOf(ranges) : `${count === 1 ? "rank" : "ranks"} ${ranges}`);
// What processes are called whose rank is not known: "ranks 0-1, process 7".
function namesOf(ranges) {
  const numbers = String(ranges).split(",").map((part) => part.split("-").map(Number)).filter(([first]) => !isNaN(first))
    .flatMap(([first, last]) => Array.from({ length: (last === undefined ? first : last) - first + 1 }, (_, at) => first + at));
  const known = numbers.filter((number) => !page.labels[number]), others = numbers.filter((number) => page.labels[number]).map((number) => page.labels[number]);
  return [...(known.length ? [`${known.length === 1 ? "rank" : "ranks"} ${united(known.map(String))}`] : []), ...(others.length > 3 ? [`${others.length} processes`] : others)].join(", ");
}
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
// One text of ranges for several: "0-3", "4,9" → "0-4,9".
function united(texts) {
  const parts = texts.join(",").split(",").map((part) => part.split("-").map(Number)).map(([first, last]) => [first, last === undefined ? first : last]).sort((one, other) => one[0] - other[0]);
  const found = [];
  for (const [first, last] of parts) {
    const before = found[found.length - 1];
    if (before && first <= before[1] + 1) before[1] = Math.max(before[1], last); else found.push([first, last]);
  }
  return found.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(",");
}
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function duration(us) {
  if (us < 1000) return `${us} µs`;
  if (us < 1e6) return `${(us / 1e3).toFixed(us < 1e4 ? 1 : 0)} ms`;
  if (us < 12e7) return `${(us / 1e6).toFixed(us < 1e7 ? 2 : 1)} s`;
  return `${(us / 6e7).toFixed(1)} min`;
}
function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (count >= 1000 && at < units.length - 1) { count /= 1000; at += 1; }
  return `${count.toFixed(count < 10 && at ? 1 : 0)} ${units[at]}`;
}

// A link to a file of the bundle. Only a name below this page's folder is one.
function link(path, text) {
  const parts = String(path).split("/");
  if (!page.head.bundle || parts.some((part) => part === "" || part === "." || part === "..") || /[,\s]/.test(path))
    return h("code", {}, text || path);
  return h("a", { class: "mono", href: "./" + parts.map(encodeURIComponent).join("/") }, text || path);
}

function frameText(number) {
  if (number < 0) return "";
  const [file, line, name] = page.frames[number];
  return `${file}:${line}${name && name !== "<module>" ? ` (${name})` : ""}`;
}
const frameTitle = (number) => (number < 0 ? "" : page.frames[number][4] || page.frames[number][0]);

// Frames as a list. Runs of library frames are folded into a button that shows them.
function frameList(numbers, outermostFirst) {
  const order = outermostFirst ? numbers : [...numbers];
  const list = h("ol", { class: "frames" });
  const item = (number) => {
    const [file, line, name, library] = page.frames[number];
    const place = `${file}:${line}`;
    return h("li", { class: library ? "lib" : null, title: frameTitle(number) },
      library ? `${place} ${name}` : [h("b", {}, place), ` ${name}`]);
  };
  let at = 0;
  while (at < order.length) {
    let end = at;
    while (end < order.length && page.frames[order[end]][3]) end += 1;
    if (end - at > 2) {
      const hidden = order.slice(at + 1, end);
      const more = h("li", {}, h("button", { class: "plain", onclick: () => more.replaceWith(...hidden.map(item)) },
        `… ${plural(hidden.length, "library frame")}`));
      list.append(item(order[at]), more);
      at = end;
    } else {
      list.append(item(order[at]));
      at += 1;
    }
  }
  return list;
}

// Text in which `code` stands in backticks, as the verdict's sentences have it.
const marked = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));

function copyButton(label, text) {
  const button = h("button", { type: "button" }, label);
  const done = (word) => {
    button.textContent = word;
    announce(word);
    setTimeout(() => { button.textContent = label; }, 1600);
  };
  const byHand = () => {
    const area = h("textarea", { "aria-hidden": "true" });
    area.value = text;
    area.style.position = "fixed";
    area.style.opacity = "0";
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    button.focus();
    done(worked ? "Copied" : "Copying failed");
  };
  button.addEventListener("click", () => {
    if (!navigator.clipboard) byHand();
    else navigator.clipboard.writeText(text).then(() => done("Copied"), byHand);
  });
  return button;
}

const live = h("p", { class: "skip", role: "status", "aria-live": "polite", id: "live" });
const announce = (text) => { live.textContent = text; };
const main = document.getElementById("main");
const sections = [];

function section(id, title, bar, ...content) {
  const node = h("section", { id, "aria-labelledby": `${id}-title` },
    h("div", { class: "bar" }, h("h2", { id: `${id}-title` }, title), bar), content);
  sections.push([id, title]);
  main.append(node);
  return node;
}

// --- the stacks ----------------------------------------------------------------------------------------------------

// A branch is as wide as `n`: ranks, or with a text `t` their time; then `k` counts its ranks.
const ranksOf = (branch) => `${ranksWord(branch.r, branch.k === undefined ? branch.n : branch.k)}${branch.t ? `: ${branch.t}` : ""}`;
function stacks(name = "Where stacks diverge", hint = "Width = number of ranks. Click to zoom.") {
  const total = page.tree.reduce((sum, branch) => sum + branch.n, 0);
  if (!total) return;
  const culprits = new Set(page.rows.filter((row) => row.c).map((row) => row.r).join(",").split(","));
  const state = { libraries: false, zoom: null };
  const flame = h("div", { class: "flame", role: "group", "aria-label": `Flame graph: ${hint}` });
  function visible(branch) {
    const last = branch.f.length - 1;
    return branch.f.filter((number, at) => state.libraries || !page.frames[number][3] || (at === last && !branch.b.length));
  }
  const atFault = (branch) => branch.r.split(",").every((part) => culprits.has(part));
  function layout() {
    const boxes = [];
    const put = (branch, begin, depth, width) => {
      let level = depth;
      for (const number of visible(branch)) boxes.push({ number, branch, begin, width, depth: level++ });
      share(branch.b, branch.n, begin, width, level);
    };
    // Ranks at fault stay readable beside thousands of others: they are never narrower than this.
    const share = (branches, count, begin, width, level) => {
      const wide = branches.map((one) => Math.max(one.n / count, atFault(one) && !one.t ? Math.min(.12, .5 / branches.length) : 0));
      const sum = Math.max(1, wide.reduce((total, one) => total + one, 0));
      let at = begin;
      branches.forEach((one, number) => { put(one, at, level, width * wide[number] / sum); at += width * wide[number] / sum; });
    };
    const roots = state.zoom ? [state.zoom] : page.tree;
    share(roots, roots.reduce((count, branch) => count + branch.n, 0), 0, 1, 0);
    return boxes.filter((box) => box.width > .0012).slice(0, 1500);
  }
  function drawFlame() {
    const boxes = layout();
    flame.style.height = `${(Math.max(0, ...boxes.map((box) => box.depth)) + 1) * 21}px`;
    flame.replaceChildren(...boxes.map((box) => {
      const [file, line, name, library] = page.frames[box.number];
      const kind = atFault(box.branch) ? "culprit" : library ? null : "user";
      const node = h("button", { type: "button", class: kind, title: `${frameText(box.number)}\n${ranksOf(box.branch)}`,
        onclick: () => { state.zoom = state.zoom === box.branch ? null : box.branch; drawFlame(); announce(state.zoom ? `only ${ranksOf(box.branch)}` : "all ranks"); } },
      name === "<module>" ? `${file}:${line}` : `${name}${library ? "" : ` ${file}:${line}`}`);
      node.style.left = `${box.begin * 100}%`; node.style.width = `${box.width * 100}%`; node.style.top = `${box.depth * 21}px`;
      return node;
    }));
  }
  function tree(branch, open) {
    return h("details", { open: open > 0 ? true : null },
      h("summary", { class: atFault(branch) ? "bad" : null }, capital(ranksOf(branch)), branch.f.length ? "" : ": here",
        h("span", { class: "dim" }, `${branch.n > 1 && !branch.t ? ` · ${branch.n}` : ""}${branch.m ? ` · missing ${branch.m}` : ""}`)),
      branch.f.length ? frameList(branch.f, true) : "", branch.b.map((below) => tree(below, open - (branch.b.length > 6 ? 2 : 1))));
  }
  const libraries = h("button", { type: "button", "aria-pressed": false, onclick: (event) => {
    state.libraries = !state.libraries; event.target.setAttribute("aria-pressed", String(state.libraries)); drawFlame();
  } }, "library frames");
  section("stacks", name, [libraries, h("button", { type: "button", onclick: () => { state.zoom = null; drawFlame(); } }, "all ranks"),
    h("span", { class: "dim" }, hint)],
  flame, h("div", { class: "card tree" }, page.tree.map((branch) => tree(branch, 4))));
  drawFlame();
}

