// --- the head ------------------------------------------------------------------------------------------------------

function head() {
  const it = page.head;
  const levels = { high: 3, medium: 2, low: 1 };
  const sure = h("div", { class: "sure", id: "confidence" },
    h("p", {}, h("span", { class: "level", "aria-hidden": "true" },
      [1, 2, 3].map((n) => h("i", { class: n <= levels[it.confidence] ? "on" : null }))),
    it.sure,
    it.doubts.length ? "" : h("span", { class: "dim" }, it.confidence === "high" ? ": no conflicting evidence." : ".")),
    it.doubts.length ? h("ul", {}, it.doubts.map((text) => h("li", {}, text))) : null);
  const [why, next] = it.next;
  const todo = it.suggestions.length || it.now || next
    ? h("div", { class: "todo", id: "todo" }, h("h2", {}, "What to do"),
      h("ul", {}, [it.now, ...it.suggestions].filter(Boolean).map((text) => h("li", {}, marked(text)))),
      next ? [h("p", { class: "why" }, `${why}:`), pasted(next, "next command", "next")] : null) : null;
  const wrong = [...it.nodes_at_fault.map((text) => h("p", { class: "bad" }, capital(text))),
    ...it.wrong.map((text) => h("p", { class: "bad" }, `Wrong result: ${text}`))];
  const title = document.getElementById("summary");
  title.replaceChildren(...marked(title.textContent));
  if (it.healthy) document.getElementById("cause").className = "healthy";
  document.getElementById("head").append(
    it.more ? h("p", { class: "more" }, marked(it.more)) : "",
    h("div", { class: "lead" }, h("div", {}, sure, wrong), todo),
    live);
}
const pasted = (text, label, id) => h("div", { class: "command", id },
  h("code", { tabindex: "0", "aria-label": label }, text), copyButton("Copy command", text));

// What people ask about the run and its files: below the code, which has to be on the first screen.
function run() {
  const it = page.head;
  const files = ["verdict.json", "report.md", "launch.json", "timeline.perfetto.json"]
    .filter((name) => it.bundle && (name !== "launch.json" || it.command));
  const notes = [...it.notes.map((text) => `Noticed while it ran: ${text}`), ...it.early.map((text) => `Early look: ${text}`)];
  if (!it.facts.length && !it.command && !files.length && !notes.length) return;
  section("run", "The run", "",
    h("dl", { class: "facts" }, it.facts.map(([label, value]) => [h("dt", {}, capital(label)), h("dd", {}, value)])),
    notes.map((text) => h("p", { class: "dim" }, text)),
    it.command ? pasted(it.command, "command", "command") : "",
    files.length ? h("div", { class: "bar links" }, files.map((name) => h("span", {}, link(name)))) : "");
}

// --- the code ------------------------------------------------------------------------------------------------------

// A line of source that wraps below its own begin.
function wrapping(text) {
  const indent = text.length - text.trimStart().length;
  const node = h("span", { class: "t" }, text.slice(0, indent), h("u", {}, text.trimStart() || " "));
  const hang = Math.min(indent + 4, 24);
  node.style.paddingLeft = `${hang}ch`;
  node.style.textIndent = `-${hang}ch`;
  return node;
}
function sourceLine([number, text, mark, note, gap]) {
  return h("div", { class: [mark, gap ? "gap" : ""].join(" ").trim() || null },
    h("span", { class: "n" }, number), wrapping(text),
    mark === "here" ? h("span", { class: "skip" }, "this line") : null,
    note ? h("span", { class: "what" }, note) : null);
}
function code() {
  if (!page.code.length) return;
  section("code", page.head.outcome === "crash" ? "Where it failed" : "The code at each side", "",
    h("div", { class: "sides" }, page.code.map((side) => h("article", { class: `card side${side.c ? " culprit" : ""}` },
      h("header", {},
        h("h3", {}, capital(ranksWord(side.r, side.n)), side.c ? h("span", { class: "skip" }, " (at fault)") : ""),
        side.does ? h("p", { class: "dim" }, marked(side.does)) : ""),
      side.places.map((place, at) => [
        h("div", { class: "place", title: frameTitle(place.f) }, `${place.whose ? `${place.whose} at ` : at ? "called from " : ""}${frameText(place.f)}`),
        place.lines.length
          ? h("div", { class: "source", tabindex: "0", role: "group", "aria-label": frameText(place.f) }, place.lines.map(sourceLine))
          : h("p", { class: "none" }, "The source is not readable from here.")]),
      side.places.length ? "" : h("p", { class: "none" }, "Neither a stack nor a record shows a line."),
      side.callers.length ? h("div", { class: "place" }, "called from ", side.callers.map(frameText).join(", ")) : "",
      raisedBy(side)))));
}
function raisedBy(side) {
  const first = parseInt(side.r, 10);
  const rank = page.ranks.find((one) => one.r === first);
  if (!rank || !rank.trace || !rank.trace.length) return "";
  return h("details", { open: side.c ? true : null }, h("summary", { class: "place" }, `Traceback of ${ranksWord(first, 1)}`),
    h("div", { class: "source", tabindex: "0", role: "group", "aria-label": `traceback of ${ranksWord(rank.r, 1)}` }, rank.trace.map((line) => h("div", {}, h("span", { class: "n" }), h("span", { class: "t" }, line || " ")))));
}

// --- the timeline --------------------------------------------------------------------------------------------------

const ROW = 24, MOST_ROWS = 40;
const SHORT = { all_reduce: "AR", all_gather: "AG", reduce_scatter: "RS", broadcast: "B", barrier: "bar", all_to_all: "A2A",
  send: "snd", recv: "rcv", reduce: "R", gather: "G", scatter: "S", all_reduce_barrier: "bar", _all_gather_base: "AG",
  all_gather_into_tensor: "AG", _reduce_scatter_base: "RS", reduce_scatter_tensor: "RS", alltoall_base: "A2A" };

function timeline() {
  const data = page.timeline;
  if (!data.lanes.length) return;
  const own = data.lanes.map((lane, number) => ({ ...lane, number }));
  const single = data.groups.length <= 1;
  const state = { by: "number", group: single ? 0 : -1, all: false, from: 0, to: 1, lane: 0, call: -1 };
  if (!single && data.part && !data.mixed) state.group = data.part[0];
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-describedby": "timeline-said", "aria-label":
    `Timeline of the last calls of ${plural(data.recorded, "rank")} in ${plural(own.length, "lane")}. `
    + "Arrow keys choose a call, plus and minus zoom, 0 shows all, Home and End go to the first and last call." });
  const labels = h("div", { class: "labels", id: "lanes" });
  const said = h("p", { class: "said", id: "timeline-said", role: "status", "aria-live": "polite" });
  const tip = h("div", { class: "tip", hidden: true });
  document.body.append(tip);

  // A call as it is drawn: where it begins and ends on the axis.
  function cells(lane) {
    const found = [];
    for (let at = 0; at < lane.k.length; at += 1) {
      const kind = data.kinds[lane.k[at]];
      if (state.group >= 0 && kind[1] !== state.group) continue;
      const x = state.by === "time" ? lane.t[at] : state.group >= 0 ? lane.s[at] : lane.o[at];
      found.push({ at, kind, x, end: x + 1, number: lane.s[at], t: lane.t[at], lane });
    }
    for (let at = 0; at < found.length; at += 1) {
      const cell = found[at], next = found[at + 1];
      cell.lasts = cell.kind[5] === "done" ? (next ? next.t - cell.t : 0) : Math.max(0, data.end - cell.t);
      if (state.by === "time") cell.end = cell.kind[5] !== "done" ? Math.max(data.end, cell.t) : next ? next.t : cell.t;
      cell.part = isPart(cell);
    }
    return found;
  }
  const isPart = (cell) => data.part !== null && cell.kind[1] === data.part[0] && cell.number === data.part[1]
    && !["send", "recv"].includes(data.ops[cell.kind[0]]);
  let rows = [];
  function arrange() {
    // Lanes that differ in other groups alone are one where a single group is shown.
    const folded = new Map();
    for (const lane of own) {
      const mine = cells(lane), never = lane.a && data.part && state.group === data.part[0];
      if (!mine.length && lane.k.length && !never) continue;
      const key = state.group < 0 ? lane.number : JSON.stringify([lane.c, lane.a, lane.k.length > 0, mine.map((cell) => [lane.k[cell.at], cell.number])]);
      if (!folded.has(key)) folded.set(key, { lanes: [], cells: mine });
      folded.get(key).lanes.push(lane);
    }
    rows = [...folded.values()].map(({ lanes, cells: found }) => {
      if (lanes.length === 1) return { lane: lanes[0], cells: found };
      const lane = { ...lanes[0], r: united(lanes.map((one) => one.r)), n: lanes.reduce((sum, one) => sum + one.n, 0) };
      for (const cell of found) cell.lane = lane;
      return { lane, cells: found };
    });
    if (!state.all) rows = rows.slice(0, MOST_ROWS);
    labels.replaceChildren(...rows.map(({ lane }) => h("div", { class: lane.c ? "culprit" : null, "data-lane": lane.r,
      title: `${ranksWord(lane.r, lane.n)}${lane.n > 1 ? ` (${lane.n})` : ""}` }, ranksWord(lane.r, lane.n))));
    state.lane = Math.min(state.lane, Math.max(0, rows.length - 1));
    if (rows.length && !rows[state.lane].cells.length) state.lane = Math.max(0, rows.findIndex((row) => row.cells.length));
    state.call = -1;
  }
  const extent = () => {
    let low = Infinity, high = -Infinity;
    for (const row of rows) for (const cell of row.cells) { low = Math.min(low, cell.x); high = Math.max(high, state.by === "time" ? cell.t : cell.end); }
    if (data.part && state.by === "number" && state.group === data.part[0]) high = Math.max(high, data.part[1] + 1);
    return low < high ? [low, high] : [low === Infinity ? 0 : low, (low === Infinity ? 0 : low) + 1];
  };
  function reset(whole) {
    const [low, high] = extent();
    const room = Math.max(200, canvas.clientWidth || 900);
    if (state.by === "number") {
      const most = whole ? high - low : Math.min(high - low, Math.max(8, Math.floor(room / (state.group < 0 && data.groups.length > 1 ? 96 : 34))));
      state.from = high - most - .5; state.to = high + 1;
    } else {
      state.from = low - (high - low) * .02; state.to = high + (high - low) * .3 + 1;
    }
  }

  // Colours follow the theme.
  let paint = {};
  function colours(print) {
    const css = getComputedStyle(document.documentElement);
    const get = (name) => css.getPropertyValue(`--${name}`).trim();
    paint = { ops: data.ops.map((_, at) => get(`op${Math.min(at, 7)}`)), bad: get("bad"), soft: get("bad-soft"), ink: get("ink"), onOp: get("on-op"),
      dim: get("dim"), line: get("line"), card: get("card"), focus: get("focus"), hatch: new Map(), print };
  }
  function hatch(context, colour) {
    if (!paint.hatch.has(colour)) {
      const tile = h("canvas", { width: 8, height: 8 }), pen = tile.getContext("2d");
      pen.strokeStyle = colour; pen.lineWidth = 2.2;
      pen.beginPath(); pen.moveTo(-2, 10); pen.lineTo(10, -2); pen.moveTo(-2, 2); pen.lineTo(2, -2); pen.moveTo(6, 10); pen.lineTo(10, 6); pen.stroke();
      paint.hatch.set(colour, context.createPattern(tile, "repeat"));
    }
    return paint.hatch.get(colour);
  }
  const place = (x) => (x - state.from) / (state.to - state.from) * canvas.clientWidth;
  function draw() {
    const width = canvas.clientWidth, height = 24 + rows.length * ROW + 6, dense = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * dense); canvas.height = Math.round(height * dense);
    const pen = canvas.getContext("2d");
    pen.scale(dense, dense);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    ruler(pen, width, height);
    rows.forEach((row, at) => lane(pen, row, 24 + at * ROW, width));
  }
  function ruler(pen, width, height) {
    const span = state.to - state.from;
    const wanted = span / Math.max(2, width / 90);
    let step = 10 ** Math.floor(Math.log10(wanted));
    const power = step;
    for (const times of [1, 2, 5, 10]) if (step < wanted) step = power * times;
    if (state.by === "number") step = Math.max(1, Math.round(step));
    if (data.part && state.by === "number" && state.group === data.part[0]) {
      pen.fillStyle = paint.soft;
      pen.fillRect(place(data.part[1]), 0, place(data.part[1] + 1) - place(data.part[1]), height);
    }
    pen.lineWidth = 1;
    for (let x = Math.ceil(state.from / step) * step; x < state.to; x += step) {
      const at = Math.round(place(x)) + .5;
      pen.strokeStyle = paint.line; pen.beginPath(); pen.moveTo(at, 20); pen.lineTo(at, height); pen.stroke();
      pen.fillStyle = paint.dim;
      pen.fillText(state.by === "time" ? (x < 0 ? "" : duration(Math.round(x))) : x < 0 ? "" : `#${x}`, at + 3, 11);
    }
  }
  function lane(pen, row, top, width) {
    if (!row.lane.k.length) { pen.fillStyle = paint.dim; pen.fillText("no record of its calls", 10, top + ROW / 2 + .5); }
    for (const cell of row.cells) {
      const waits = cell.kind[5] !== "done";
      let left = place(cell.x), right = place(cell.end);
      if (right < 0 || left > width) continue;
      if (state.by === "number") right -= Math.min(2, (right - left) * .2);
      right = Math.max(right - (state.by === "time" && !waits ? 1 : 0), left + 2);
      left = Math.max(left, -10); right = Math.min(right, width + 10);
      const colour = paint.ops[cell.kind[0]];
      pen.fillStyle = colour;
      if (waits) {
        pen.globalAlpha = .25; pen.fillRect(left, top + 3, right - left, ROW - 6); pen.globalAlpha = 1;
        pen.fillStyle = hatch(pen, colour);
      }
      pen.fillRect(left, top + 3, right - left, ROW - 6);
      if (cell.part || (data.mixed && waits && row.lane.c)) { pen.strokeStyle = paint.bad; pen.lineWidth = 2; pen.strokeRect(left + 1, top + 3, right - left - 2, ROW - 6); }
      const text = data.ops[cell.kind[0]];
      const group = state.group < 0 && data.groups.length > 1 && cell.kind[1] >= 0 ? ` · ${data.groups[cell.kind[1]][0]}` : "";
      const shown = [text + group, (SHORT[text] || text) + group, text, SHORT[text] || text.slice(0, 3)].find((word) => pen.measureText(word).width < right - left - 8);
      if (shown) {
        const wide = pen.measureText(shown).width;
        if (waits) { pen.fillStyle = paint.card; pen.globalAlpha = .93; pen.fillRect(left + 3, top + 5, wide + 4, ROW - 10); pen.globalAlpha = 1; }
        pen.fillStyle = waits ? paint.ink : paint.onOp; pen.fillText(shown, left + 5, top + ROW / 2 + .5);
      }
      if (rows[state.lane] === row && state.call === cell.at) { pen.strokeStyle = paint.focus; pen.lineWidth = 2; pen.strokeRect(left - 1, top + 1, right - left + 2, ROW - 2); }
    }
    if (row.lane.a && data.part && state.by === "number" && state.group === data.part[0]) {
      const left = place(data.part[1]), right = place(data.part[1] + 1);
      pen.strokeStyle = paint.bad; pen.lineWidth = 1.5; pen.setLineDash([4, 3]);
      pen.strokeRect(left + 1, top + 4, Math.max(4, right - left - 3), ROW - 8); pen.setLineDash([]);
      if (right - left > 90) { pen.fillStyle = paint.bad; pen.fillText("never entered", left + 6, top + ROW / 2 + .5); }
    }
  }

  function words(cell) {
    const [op, group, sizes, dtypes, frame, what] = cell.kind;
    const of = sizes || dtypes ? ` of ${[dtypes, sizes].filter(Boolean).join(" ")}` : "";
    const [label, count] = group >= 0 ? data.groups[group] : ["", 1];
    const lasts = what === "done" ? (cell.lasts ? `the next call of the rank came ${duration(cell.lasts)} later` : "completed")
      : what === "queued" ? "queued, not begun" : `pending for ${duration(cell.lasts)} when the evidence was taken`;
    return [[`${data.ops[op]}${of}`, `#${cell.number}${label ? `, ${label}${count > 1 ? " (one of several)" : ""}` : ""}`],
      [ranksWord(cell.lane.r, cell.lane.n), frameText(frame)], [lasts, cell.part ? "here the ranks diverge" : ""]];
  }
  const text = (cell) => words(cell).map((line) => line.filter(Boolean).join(" · ")).join(" · ");
  function at(event) {
    const box = canvas.getBoundingClientRect(), x = state.from + (event.clientX - box.left) / box.width * (state.to - state.from);
    const row = rows[Math.floor((event.clientY - box.top - 24) / ROW)];
    return row && (row.cells.find((cell) => cell.x <= x && x < Math.max(cell.end, cell.x + (state.to - state.from) * .004)) || null);
  }
  function hover(event) {
    const cell = at(event);
    tip.hidden = !cell;
    if (!cell) return;
    tip.replaceChildren(...words(cell).map((line, number) => h("div", {}, number ? line.filter(Boolean).join(" · ")
      : [h("b", {}, line[0]), ` ${line[1]}`])));
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${event.clientY + 18 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
  }
  function choose(lane, call, follow) {
    state.lane = lane; state.call = call;
    const row = rows[lane], cell = row && row.cells.find((one) => one.at === call);
    if (cell) {
      said.textContent = text(cell);
      if (follow) {
        const span = state.to - state.from;
        if (cell.x < state.from) { state.from = cell.x - span * .1; state.to = state.from + span; }
        if (cell.x + Math.min(cell.end - cell.x, span) > state.to) { state.to = cell.x + Math.min(cell.end - cell.x, span) + span * .05; state.from = state.to - span; }
      }
    }
    draw();
  }
  function zoom(times, around) {
    const [low, high] = extent(), span = state.to - state.from;
    const next = Math.min(Math.max(span * times, state.by === "time" ? 20 : 3), (high - low) * 1.6 + 4);
    const share = (around - state.from) / span;
    state.from = around - next * share; state.to = state.from + next;
    draw();
  }
  const middle = () => { const cell = rows[state.lane] && rows[state.lane].cells.find((one) => one.at === state.call); return cell ? cell.x : (state.from + state.to) / 2; };
  function pan(share) { const by = (state.to - state.from) * share; state.from += by; state.to += by; draw(); }
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const row = rows[state.lane];
    const now = row ? row.cells.findIndex((cell) => cell.at === state.call) : -1;
    const go = (lane, index) => { const target = rows[lane]; if (target && target.cells.length) choose(lane, target.cells[Math.max(0, Math.min(index, target.cells.length - 1))].at, true); };
    const nearest = (lane) => { const target = rows[lane], x = now >= 0 ? row.cells[now].x : Infinity; if (!target || !target.cells.length) return; let best = 0; target.cells.forEach((cell, index) => { if (Math.abs(cell.x - x) <= Math.abs(target.cells[best].x - x)) best = index; }); go(lane, x === Infinity ? 1e9 : best); };
    const step = (by) => { let lane = state.lane + by; while (rows[lane] && !rows[lane].cells.length) lane += by; nearest(lane); };
    const keys = {
      ArrowLeft: () => go(state.lane, now < 0 ? 1e9 : now - 1), ArrowRight: () => go(state.lane, now < 0 ? 1e9 : now + 1),
      ArrowUp: () => step(-1), ArrowDown: () => step(1),
      Home: () => go(state.lane, 0), End: () => go(state.lane, 1e9), "+": () => zoom(.6, middle()), "=": () => zoom(.6, middle()),
      "-": () => zoom(1 / .6, middle()), "0": () => { reset(true); draw(); }, PageUp: () => pan(-.5), PageDown: () => pan(.5),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  canvas.addEventListener("wheel", (event) => {
    const box = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, state.from + (event.clientX - box.left) / box.width * (state.to - state.from)); }
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan((event.deltaX || event.deltaY) / box.width); }
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: state.from, to: state.to, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) { hover(event); return; }
    const by = (drag.x - event.clientX) / canvas.clientWidth * (drag.to - drag.from);
    if (Math.abs(event.clientX - drag.x) > 3) { drag.moved = true; tip.hidden = true; }
    if (drag.moved) { state.from = drag.from + by; state.to = drag.to + by; draw(); }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) { const cell = at(event); if (cell) choose(rows.findIndex((row) => row.lane === cell.lane), cell.at, false); }
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });

  const again = () => { arrange(); reset(false); draw(); more.hidden = state.all || own.length <= MOST_ROWS; };
  const toggle = (name, label) => h("button", { type: "button", "aria-pressed": state.by === name, "data-by": name, onclick: (event) => {
    state.by = name;
    for (const one of event.target.parentNode.children) one.setAttribute("aria-pressed", String(one === event.target));
    again();
  } }, label);
  const groups = single ? "" : h("select", { "aria-label": "Process group", onchange: (event) => { state.group = Number(event.target.value); again(); } },
    h("option", { value: -1 }, "all process groups"), data.groups.map(([label], at) => h("option", { value: at, selected: at === state.group }, label)));
  const press = (label, title, act) => h("button", { type: "button", "aria-label": title, title, onclick: act }, label);
  const more = h("button", { type: "button", onclick: () => { state.all = true; again(); } }, `Show all ${own.length} lanes`);
  section("timeline", "Timeline of collectives", [
    h("span", { role: "group", "aria-label": "Horizontal axis", class: "bar" }, toggle("number", "by sequence"), toggle("time", "by time")), groups,
    h("span", { class: "grow" }),
    press("−", "Zoom out", () => zoom(1 / .6, middle())), press("+", "Zoom in", () => zoom(.6, middle())),
    press("‹", "Earlier", () => pan(-.4)), press("›", "Later", () => pan(.4)), press("End", "Show the end", () => { reset(false); draw(); })],
  h("div", { class: "card lanes" }, labels, canvas), said,
  h("div", { class: "legend" }, data.ops.map((op, at) => { const box = h("i", {}); box.style.background = `var(--op${Math.min(at, 7)})`; return h("span", {}, box, op); }),
    data.kinds.some((kind) => kind[5] !== "done") ? h("span", {}, "hatched: pending") : "", data.part ? h("span", { class: "bad" }, "red: where the ranks diverge") : ""), more,
  data.left_out[0] ? h("p", { class: "dim" }, `${plural(data.left_out[0], "more lane")} (${plural(data.left_out[1], "rank")})${page.head.bundle ? " in timeline.perfetto.json" : ""}`) : "");
  colours(); again();
  new ResizeObserver(() => draw()).observe(canvas);
  const theme = () => { colours(); draw(); };
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
  window.addEventListener("beforeprint", theme); window.addEventListener("afterprint", theme);
}

// --- the steps -----------------------------------------------------------------------------------------------------

function steps() {
  const data = page.steps;
  if (!data) return;
  const box = h("div", { class: "card chart" });
  const rates = data.lines.map((line) => line.rate).filter(Boolean);
  section("steps", "Steps over time", rates.length ? h("span", { class: "dim" }, `${Math.max(...rates).toPrecision(3)} steps a second ${page.head.outcome === "dump" ? "lately" : "before it stopped"}`) : "", box);
  if (new Set(data.lines.flatMap((line) => line.p.map(([, step]) => step))).size < 2) {
    box.append(...data.lines.map((line) => h("p", {}, `${capital(ranksWord(line.r, line.n))}: step ${line.step}, ${duration(Math.max(0, -line.p[line.p.length - 1][0]) * 1e6)} before the evidence was taken. The steps before it were too fast to be seen.`)));
    return;
  }
  const draw = () => box.replaceChildren(drawSteps(data, Math.max(280, box.clientWidth - 26)));
  draw();
  let drawn = box.clientWidth;
  new ResizeObserver(() => { if (box.clientWidth !== drawn) { drawn = box.clientWidth; draw(); } }).observe(box);
}
function drawSteps(data, width) {
  const height = 210, left = 52, right = width > 560 ? 150 : 12, top = 12, bottom = 28;
  const points = data.lines.flatMap((line) => line.p);
  const begin = Math.min(...points.map((p) => p[0])), low = Math.min(...points.map((p) => p[1])), high = Math.max(...points.map((p) => p[1]), low + 1);
  const last = Math.max(...points.map((p) => p[0]));
  const end = Math.max(0, last), span = Math.max(end - begin, .001);
  // The steps keep half of the width, however long nothing has moved since.
  const room = width - left - right, share = last <= begin ? 0 : end <= last ? 1 : Math.max((last - begin) / span, .5);
  const x = (at) => left + room * (at <= last ? (last > begin ? (at - begin) / (last - begin) : 1) * share : share + (at - last) / (end - last) * (1 - share));
  const y = (step) => height - bottom - (step - low) / (high - low) * (height - top - bottom);
  const clock = (seconds) => (Math.abs(seconds) < 120 ? `${Math.abs(seconds).toFixed(span < 20 ? 1 : 0)} s` : `${(Math.abs(seconds) / 60).toFixed(1)} min`);
  const drawing = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": data.lines.map((line) =>
    `${ranksWord(line.r, line.n)}: last step ${line.step}${line.rate ? `, ${line.rate.toPrecision(3)} steps a second` : ""}`).join("; ") });
  if (end > last) drawing.append(s("rect", { class: "quiet", x: x(last), y: top, width: x(end) - x(last), height: height - top - bottom }));
  const stride = Math.max(1, Math.ceil((high - low) / (width > 560 ? 4 : 2)));
  for (let step = low; step <= high; step += stride) {
    drawing.append(s("line", { class: "axis", x1: left, x2: width - right, y1: y(step), y2: y(step) }),
      s("text", { x: left - 8, y: y(step) + 4, "text-anchor": "end" }, step.toLocaleString("en")));
  }
  const below = (at, words, anchor) => drawing.append(s("text", { x: x(at), y: height - 9, "text-anchor": anchor }, words));
  below(begin, `${clock(begin)} before`, "start");
  if (share > .35 && begin < last && width > 560) below(begin + (last - begin) / 2, `${clock(begin + (last - begin) / 2)} before`, "middle");
  below(end, "evidence taken", "end");
  const mark = (at, words, anchor, up) => drawing.append(s("line", { class: "mark", x1: x(at), x2: x(at), y1: top, y2: height - bottom }),
    s("text", { x: x(at) + (anchor === "end" ? -5 : 5), y: height - bottom - 7 - up, "text-anchor": anchor }, words));
  const close = last + (data.threshold_s || 0);
  // The scale changes at the last step: a break in the axis, and by how much.
  const times = last > begin && end > last ? share / (last - begin) / ((1 - share) / (end - last)) : 1;
  if (times > 1.05) drawing.append(s("path", { class: "break", d: `M${x(last) - 5} ${height - bottom + 5}l4 -10m3 10l4 -10` }),
    s("text", { x: x(last) + 5, y: height - bottom - 37, "text-anchor": "start" }, `from here on, time is drawn ${times.toFixed(times < 9.95 ? 1 : 0)} times denser`));
  mark(last, `last step, ${clock(last)} before`, share >= .5 && x(last) > 190 ? "end" : "start", 0);
  if (data.threshold_s && close < end) mark(close, `suspected after ${clock(data.threshold_s)}`, x(close) + 140 > width ? "end" : "start", 15);
  let lowest = -1e9;
  [...data.lines].sort((one, other) => other.step - one.step).forEach((line) => {
    const kind = line.c ? " culprit" : "";
    const path = line.p.map(([at, step], n) => `${n ? "L" : "M"}${x(at).toFixed(1)} ${y(step).toFixed(1)}`).join("");
    const tail = line.p[line.p.length - 1];
    drawing.append(s("path", { class: `ln${kind}`, d: path }), end > tail[0] ? s("line", { class: `ln still${kind}`, x1: x(tail[0]), x2: x(end), y1: y(tail[1]), y2: y(tail[1]) }) : "",
      s("circle", { class: `dot${kind}`, cx: x(tail[0]), cy: y(tail[1]), r: line.c ? 3.5 : 2.5 }));
    const at = Math.max(y(tail[1]) + 4, lowest + 13);
    lowest = at;
    if (at < height - 4 && right > 100) drawing.append(s("text", { x: width - right + 8, y: at }, `${ranksWord(line.r, line.n)}: ${line.step}`.slice(0, 26)));
  });
  return drawing;
}

// --- tables whose rows unfold --------------------------------------------------------------------------------------

// A row, and the one below it that its button shows. `cells`: [label, content, class].
let unfolding = 0;
function foldingRows(name, count, culprit, cells, unfold) {
  const id = `fold${unfolding += 1}`;
  const detail = h("tr", { class: "detail", hidden: true, id }, h("td", { colspan: cells.length + 1 }));
  const button = h("button", { type: "button", class: "plain who", "aria-expanded": "false", "aria-controls": id, onclick: () => {
    const open = detail.hidden;
    detail.hidden = !open; button.setAttribute("aria-expanded", String(open));
    if (open && !detail.firstChild.childNodes.length) unfold(detail.firstChild);
  } }, name);
  return [h("tr", { class: culprit ? "culprit" : null }, h("td", {}, button, culprit ? h("span", { class: "skip" }, " (at fault)") : "", count > 1 ? h("span", { class: "dim" }, ` ${count}`) : ""),
    cells.map(([label, content, kind]) => h("td", { "data-label": label, class: kind }, content))), detail];
}

// One of `items` at a time, each behind a button with its name.
function chooser(target, items, title, name, panel) {
  const place = h("div", {}, panel(items[0]));
  if (items.length > 1) {
    const chips = h("div", { class: "chips", role: "group", "aria-label": title });
    const add = (from) => {
      chips.append(...items.slice(from, from + 128).map((item, at) => h("button", { type: "button", "aria-pressed": from + at === 0, onclick: (event) => {
        for (const one of chips.children) if (one.hasAttribute("aria-pressed")) one.setAttribute("aria-pressed", String(one === event.target));
        place.replaceChildren(panel(item));
      } }, name(item))));
      if (items.length > from + 128) { const more = h("button", { type: "button", onclick: () => { more.remove(); add(from + 128); } }, `… ${items.length - from - 128} more`); chips.append(more); }
    };
    add(0);
    target.append(chips);
  }
  target.append(place);
}
// The columns [name, value of a row, class] of which any row has something, and the cells of a row in them. Words that
// say what they are need no name where the table stands as a list, on a phone.
const filled = (rows, fields) => fields.filter(([, value]) => rows.some((row) => value(row) !== ""));
const PLAIN = ["doing", "stands out"];
const cellsOf = (fields, row) => fields.map(([name, value, kind]) => [PLAIN.includes(name) ? "" : name, value(row), kind]);
const columns = (names) => h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));

// --- the ranks -----------------------------------------------------------------------------------------------------

function rankPanel(rank) {
  const part = (title, ...content) => h("div", {}, h("h3", {}, title), content);
  const facts = [rank.host && `on ${rank.host}`, rank.pid && `pid ${rank.pid}`, rank.local >= 0 && `local rank ${rank.local}`, rank.phase && `phase ${rank.phase}`, rank.mb && `${rank.mb} MB resident`];
  const panel = h("div", { class: "panel", "data-rank": rank.r },
    h("div", {}, h("h3", {}, capital(ranksWord(rank.r, 1))), h("p", { class: "dim" }, facts.filter(Boolean).join(", ")),
      rank.raised ? h("p", { class: "bad" }, rank.raised) : "",
      (rank.handles || []).map((text) => h("p", {}, `handling ${text}`)), (rank.caught || []).map((text) => h("p", { class: "dim" }, `caught earlier: ${text}`)),
      page.head.bundle ? h("p", {}, page.files.ranks.filter(([, , of]) => inRanges(rank.r, of)).map(([name]) => [link(`ranks/${rank.r}/${name}`, name), " "])) : ""),
    rank.st !== undefined ? part(rank.raised ? "Raised at" : "Stack, innermost first", frameList(page.stacks[rank.st])) : "",
    rank.trace && rank.trace.length ? part("Traceback", h("pre", { tabindex: "0" }, rank.trace.join("\n"))) : "",
    rank.fr !== undefined ? part("Last calls, newest first", h("ul", { class: "list mono" }, page.calls[rank.fr].map((text) => h("li", {}, text)))) : "",
    rank.th ? part("Other threads", rank.th.map(([name, stack]) => h("details", {}, h("summary", {}, name || "thread", h("span", { class: "dim" }, ` ${frameText(topOf(stack))}`)), frameList(page.stacks[stack])))) : "",
    rank.ch ? part("Child processes", rank.ch.map(([role, pid, doing, stack]) => h("details", {}, h("summary", {}, `${role} ${pid} `, h("span", { class: "dim" }, doing)), stack >= 0 ? frameList(page.stacks[stack]) : "no stack")), rank.more_children ? h("p", { class: "dim" }, `and ${rank.more_children} more`) : "") : "",
    rank.log !== undefined ? part("The end of its output", rank.raw ? h("p", { class: "dim" }, `ranks/${rank.r}/log_tail.txt holds its terminal sequences raw, which cat would send on`) : "", h("pre", { tabindex: "0" }, page.logs[rank.log].join("\n"))) : "");
  return panel;
}
const topOf = (stack) => { const numbers = page.stacks[stack]; const own = numbers.find((number) => !page.frames[number][3]); return own === undefined ? numbers[0] : own; };
function inRanges(rank, ranges) {
  return ranges.split(",").some((part) => { const [first, last] = part.split("-").map(Number); return rank >= first && rank <= (last === undefined ? first : last); });
}
function wantedRanks(text) {
  if (!/^(ranks? *)?\d+(-\d+)?( *, *\d+(-\d+)?)*$/i.test(text)) return null;
  return text.replace(/^ranks? */i, "").replace(/ /g, "");
}

function ranks() {
  if (!page.ranks.length) return;
  const members = page.rows.map(() => []);
  for (const rank of page.ranks) members[rank.row].push(rank);
  const order = page.rows.map((_, at) => at).sort((one, other) => page.rows[other].c - page.rows[one].c || members[one].length - members[other].length || members[one][0].r - members[other][0].r);
  const search = h("input", { type: "search", placeholder: "rank, function, file, host, output", "aria-label": "Search the ranks", id: "search" });
  const only = h("select", { "aria-label": "Which ranks", id: "only" }, ["all ranks", "at fault", "waiting", "not waiting"].map((word) => h("option", {}, word)));
  const count = h("span", { class: "dim", role: "status", "aria-live": "polite", id: "count" });
  const body = h("tbody", {});
  const texts = page.rows.map((row) => [row.state, row.doing, frameText(row.at), row.step && `step ${row.step}`].join(" ").toLowerCase());
  const said = (rank) => [rank.host, rank.raised || "", rank.log === undefined ? "" : page.logs[rank.log].join(" "), rank.st === undefined ? "" : page.stacks[rank.st].map((number) => page.frames[number].slice(0, 3).join(" ")).join(" ")].join(" ").toLowerCase();
  function found(row, text, numbers) {
    if (numbers !== null) return members[row].filter((rank) => inRanges(rank.r, numbers));
    if (!text || texts[row].includes(text)) return members[row];
    return members[row].filter((rank) => said(rank).includes(text));
  }
  const fields = filled(page.rows, [["step", (it) => it.step, "num"], ["state", (it) => it.state], ["doing", (it) => it.doing],
    ["at", (it) => (it.at < 0 ? "" : h("span", { title: frameTitle(it.at) }, frameText(it.at))), "mono"], ["host", (it) => it.hosts]]);
  function entry(row, shown) {
    const it = page.rows[row], all = shown.length === members[row].length;
    const name = all ? ranksWord(it.r, it.n) : ranksWord(shown.slice(0, 6).map((rank) => rank.r).join(",") + (shown.length > 6 ? ",…" : ""), shown.length);
    return foldingRows(name, shown.length, it.c, cellsOf(fields, it),
    (target) => chooser(target, shown, "Ranks of this row", (rank) => (page.labels || {})[rank.r] || rank.r, rankPanel));
  }
  const MOST = 60;
  function show(most) {
    const text = search.value.trim().toLowerCase(), numbers = wantedRanks(text);
    const keep = { "all ranks": () => true, "at fault": (row) => row.c, waiting: (row) => row.doing.startsWith("waits in"), "not waiting": (row) => !row.doing.startsWith("waits in") }[only.value];
    const rows = order.filter((row) => keep(page.rows[row])).map((row) => [row, found(row, text, numbers)]).filter(([, shown]) => shown.length);
    const sum = rows.reduce((total, [, shown]) => total + shown.length, 0);
    count.textContent = `${plural(sum, "rank")} in ${plural(rows.length, "row")}`;
    body.replaceChildren(...rows.slice(0, most).flatMap(([row, shown]) => entry(row, shown)));
    if (rows.length > most) body.append(h("tr", {}, h("td", { colspan: fields.length + 1 }, h("button", { type: "button", onclick: () => show(most * 4) }, `Show more of ${plural(rows.length, "row")}`))));
  }
  search.addEventListener("input", () => show(MOST)); only.addEventListener("change", () => show(MOST));
  section("ranks", "Ranks", [search, only, count],
    h("div", { class: "card scroll" }, h("table", { class: "stack" }, columns(["ranks", ...fields.map(([name]) => name)]), body)));
  show(MOST);
}

// --- groups, nodes, evidence ---------------------------------------------------------------------------------------

function groups() {
  const { rows, left_out: more } = page.groups;
  if (!rows.length) return;
  section("groups", "Process groups", "", h("div", { class: "card scroll" }, h("table", { class: "stack" },
    columns(["group", "members", "who is where", "last entered", "last completed"]),
    h("tbody", {}, rows.map((row) => row.at.map(([ranges, count, last, completed, state], at) => h("tr", {},
      at ? h("td", {}) : h("td", {}, h("b", {}, row.name || "default"), row.what ? h("span", { class: "dim" }, ` ${row.what}`) : "", row.waited ? h("span", { class: "dim" }, " · waited in") : ""),
      at ? h("td", {}) : h("td", { "data-label": "members" }, `${row.n === 1 ? "rank" : "ranks"} ${row.r}${row.known ? "" : " (as far as seen)"}`),
      h("td", { "data-label": "where" }, ranksWord(ranges, count), h("span", { class: "dim" }, state ? ` ${state}` : last < 0 ? " have not entered it" : "")),
      h("td", { class: "num", "data-label": "entered" }, last < 0 ? "none" : `#${last}`), h("td", { class: "num", "data-label": "completed" }, completed < 0 ? "" : `#${completed}`))))))),
  more ? h("p", { class: "dim" }, `${plural(more, "more group")} without a rank that waits`) : "");
}

function meter(share, label) {
  const fillNode = h("i", {});
  fillNode.style.width = `${Math.round(Math.min(1, Math.max(0, share)) * 100)}%`;
  return [h("span", { class: `meter${share > .95 ? " full" : ""}`, role: "img", "aria-label": label }, fillNode), h("span", {}, ` ${label}`)];
}
function span([low, high], unit) {
  if (low === undefined) return "";
  const [from, to] = [low, high].map((value) => (value < 10 ? value : Math.round(value)));
  return `${from === to ? from : `${from}–${to}`}${unit}`;
}
function nodes() {
  const { rows, every, names, versions, environments, logs } = page.nodes;
  if (!every.length) return;
  const cell = (label, content, kind) => h("td", { "data-label": label, class: kind }, content);
  const gpu = ([index, name, busy, used, total, celsius, watts, ecc, error]) => h("tr", {}, cell("GPU", index, "num"), cell("", names[name] || ""),
    error ? h("td", { class: "bad", colspan: 3 }, error) : [cell("busy", busy === null ? "" : meter(busy / 100, `${busy}\u00a0%`)),
      cell("memory", total ? meter((used || 0) / total, `${bytes(used || 0)} of ${bytes(total)}`) : ""),
      cell("", [celsius !== null && `${celsius} °C`, watts !== null && `${watts} W`].filter(Boolean).join(", "), "dim"),
      cell("", ecc ? `${ecc} ECC errors` : "", "bad")]);
  const list = (pairs) => h("dl", { class: "facts" }, pairs.map(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]));
  const more = (title, pairs) => (pairs && pairs.length ? h("details", {}, h("summary", {}, title), list(pairs)) : "");
  const panel = (one) => h("div", { class: "panel node", "data-host": one.host },
    h("div", {}, h("h3", {}, one.host), list([one.r && ["Ranks", one.r], one.state && ["State", one.state],
      one.cpus && ["CPUs", `${one.cpus}, load ${one.load.join(" ")}`],
      one.memory && one.memory[0] && ["Memory", meter(1 - one.memory[1] / one.memory[0], `${bytes(one.memory[0] - one.memory[1])} of ${bytes(one.memory[0])} in use`)],
      ...(one.disks || []).map(([place, share]) => [place, meter(share, `${Math.round(share * 100)} % in use`)]),
      ...(one.links || []).map(([name, state, speed, errors]) => [name, [state, speed && `, ${speed}`, errors && h("span", { class: "bad" }, `, ${errors}`)]]),
      one.no_gpus && ["GPUs", one.no_gpus]].filter(Boolean)),
    more("Versions", versions[one.v]), more("Variables", environments[one.e])),
    one.gpus && one.gpus.length ? h("div", { class: "scroll" }, h("h3", {}, "GPUs"), h("table", { class: "stack" }, columns(["GPU", "name", "busy", "memory", "heat, power", "errors"]), h("tbody", {}, one.gpus.map(gpu)))) : "",
    one.log !== undefined ? h("div", {}, h("h3", {}, "The end of the kernel log"), h("pre", { tabindex: "0" }, logs[one.log].join("\n"))) : "");
  const members = rows.map(() => []);
  for (const one of every) members[one.row].push(one);
  const gpus = (it) => (it.gpus && [it.gpus, [it.busy.length && `${span(it.busy, " %")} busy`, it.gpu_memory.length && `${span(it.gpu_memory, " %")} of memory`].filter(Boolean).map((text) => h("span", { class: "dim" }, ` · ${text}`))]);
  const fields = filled(rows, [["ranks", (it) => it.r], ["state", (it) => it.state], ["GPUs", gpus], ["memory", (it) => span(it.memory, " %"), "num"],
    ["load", (it) => span(it.load, ""), "num"], ["network", (it) => it.network], ["stands out", (it) => it.notes.join("; ")]]);
  const row = (it, at) => foldingRows(it.hosts, it.n, it.c, cellsOf(fields, it), (target) => chooser(target, members[at], "Nodes of this row", (one) => one.host, panel));
  section("nodes", every.length > 1 ? `${every.length} nodes` : "Node", "",
    every.length > 1
      ? h("div", { class: "card scroll" }, h("table", { class: "stack" }, columns(["nodes", ...fields.map(([name]) => name)]), h("tbody", {}, rows.map(row))))
      : h("div", { class: "card tree" }, panel(every[0])),
    page.nccl.length ? h("div", { class: "note" }, h("h3", {}, "What NCCL says"), h("ul", { class: "list" }, page.nccl.map((line) => h("li", {}, line)))) : "");
}

function evidence() {
  const list = (title, items) => (items.length ? h("div", {}, h("h3", {}, title), h("ul", { class: "list" }, items.map((item) => h("li", {}, item)))) : "");
  section("evidence", "Evidence", "", h("div", { class: "two" },
    list("What the verdict rests on", [...(page.head.proof ? [capital(page.head.proof)] : []),
      ...page.claims.map(([claim, ...files]) => [marked(claim), files.map((file) => [" ", link(file)])])]),
    list("Ruled out", page.ruled_out), list("Not seen", page.missing)));
  const { own, ranks: ofRanks, missing } = page.files;
  if (!own.length && !ofRanks.length && !missing.length) return;
  section("files", "Files of the bundle", "", h("div", { class: "two" },
    list("About the job and its nodes", own.map(([path, how, size, note]) => [link(path), h("span", { class: "dim" }, ` ${bytes(size)}, ${how}${note ? `; ${note}` : ""}`)])),
    list("Of each rank", ofRanks.map(([name, how, of, size]) => [h("code", {}, `ranks/${of}/${name}`), h("span", { class: "dim" }, ` ${bytes(size)}, ${how}`)])),
    list("Missing", missing.map(([path, why, how]) => [h("code", {}, path), ` ${why} `, h("span", { class: "dim" }, `(${how})`)]))));
}

head(); code(); run(); timeline(); steps(); stacks(); ranks(); groups(); nodes(); evidence();
main.prepend(h("nav", { "aria-label": "Sections" }, h("div", { class: "bar" }, sections.map(([id, title]) => h("a", { href: `#${id}` }, title)))));
document.documentElement.setAttribute("data-drawn", "yes");
})();
