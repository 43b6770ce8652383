// --- the head ------------------------------------------------------------------------------------------------------

const share = (value) => `${Math.round(100 * value)}%`;
const bar = (value) => { const fill = h("i", {}); fill.style.width = `${Math.min(100, 100 * value)}%`; return [h("span", { class: "meter", "aria-hidden": "true" }, fill), ` ${share(value)}`]; };

function head() {
  const it = page.head;
  const more = it.findings.map(([text, advice]) => h("li", {}, text, advice ? h("span", { class: "dim" }, ` ${advice}`) : ""));
  document.getElementById("head").append(
    h("div", { class: "lead" },
      h("div", {}, it.advice ? h("p", {}, it.advice) : "",
        more.length ? h("div", { class: "todo" }, h("h2", {}, "Besides"), h("ul", {}, more)) : "",
        it.notes.map((text) => h("p", { class: "dim" }, capital(text)))),
      h("dl", { class: "facts" }, it.facts.map(([label, value]) => [h("dt", {}, capital(label)), h("dd", {}, value)]))),
    it.command ? h("div", { class: "command" }, h("code", { tabindex: "0" }, it.command), copyButton("Copy command", it.command)) : "",
    h("div", { class: "bar links" }, ["recording.json", "report.md", "stacks.speedscope.json"].map((name) => h("span", {}, link(name)))),
    live);
}

// --- the tables ----------------------------------------------------------------------------------------------------

const table = (names, rows) => h("div", { class: "card scroll" }, h("table", { class: "stack" },
  h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)));
const cell = (label, content, kind) => h("td", { class: kind, "data-label": label }, content);

function ranks() {
  if (!page.times.length) return;
  const names = page.kinds.filter((_, at) => page.times.some((one) => one.kinds[at] >= .005));
  const rows = page.times.map((one) => h("tr", { class: one.c ? "culprit" : null },
    h("td", {}, capital(ranksWord(one.r, one.n))), cell("waits", bar(one.waits), "num"),
    names.map((name) => cell(name, bar(one.kinds[page.kinds.indexOf(name)]), "num")),
    cell("steps", one.steps, "num")));
  section("ranks", "The ranks", h("span", { class: "dim" }, "shares of the main thread's time; waits: for peers or the device"),
    table(["ranks", "waits", ...names, "steps"], rows));
}

function lines(id, title, hint, rows) {
  if (!rows.length) return;
  section(id, title, h("span", { class: "dim" }, hint), table(["place", "what", "of the time", "ranks"], rows.map((one) => h("tr", {},
    cell("", h("b", { class: "mono", title: frameTitle(one.f) }, one.f < 0 ? "?" : frameText(one.f)), "mono"), cell("what", one.what),
    cell("of the time", bar(one.share), "num"), cell("ranks", one.ranks)))));
}

function compared() {
  if (!page.compared.length) return;
  section("compared", "Against the earlier recording", h("span", { class: "dim" }, page.head.compared), table(["place", "what", "before", "now", "more"],
    page.compared.map((one) => h("tr", {}, cell("", h("b", { class: "mono" }, one.f < 0 ? "?" : frameText(one.f)), "mono"), cell("what", one.what),
      cell("before", one.before, "num"), cell("now", one.now, "num"), cell("more", one.more, "num")))));
}

head();
ranks();
lines("waits", "Waits by line", "for collectives, sends and receives, and inside backward; the mean of all ranks", page.waits);
lines("work", "Everything else by line", "the mean of all ranks", page.work);
compared();
stacks("Flame graph of all ranks", "Width = time, as a mean over all ranks. Click to zoom.");
if (page.missing.length) section("missing", "Not seen", "", h("ul", { class: "list" }, page.missing.map((text) => h("li", {}, text))));
main.prepend(h("nav", { "aria-label": "Sections" }, h("div", { class: "bar" }, sections.map(([id, title]) => h("a", { href: `#${id}` }, title)))));
document.documentElement.setAttribute("data-drawn", "yes");
})();
