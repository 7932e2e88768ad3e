"use strict";
// Everything that came out of a log reaches the page through textContent only, never as markup.

const MARKS = { PASS: "✔", FAIL: "✘", INCONCLUSIVE: "?", NOT_APPLICABLE: "–" };
const CONTESTANTS = { upstream_eager: "upstream eager", same_cache_eager: "same cache eager", compiled: "compiled" };
const EVENT_TITLES = {
  recompile: "Recompiles", graph_break: "Graph breaks", recompile_limit: "Recompile limit hit",
  cudagraph_skip: "CUDA graphs skipped", cudagraph_partition: "CUDA graph partitions",
  dynamic_shape: "Dynamic shapes", compile_setting: "Compile settings",
  bucket_compile: "Buckets compiled", bucket_drop: "Buckets dropped",
};
const SVG = "http://www.w3.org/2000/svg";

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function shape(tag, options) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(options)) made.setAttribute(name, value);
  return made;
}

const unpacked = new Map();

function stored(id) {
  if (!unpacked.has(id)) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (character) => character.charCodeAt(0));
    unpacked.set(id, new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json());
  }
  return unpacked.get(id);
}

// --- an answer past its review date ---------------------------------------------------------------------------------

const stale = document.getElementById("stale");
stale.hidden = !stale.dataset.reviewBy || new Date().toISOString().slice(0, 10) <= stale.dataset.reviewBy;

// --- theme -----------------------------------------------------------------------------------------------------------

const themeButton = document.getElementById("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
try { chosenTheme = localStorage.getItem("toto-compat-theme"); } catch { /* storage is off: follow the system */ }

function showTheme() {
  const dark = chosenTheme ? chosenTheme === "dark" : prefersDark.matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  themeButton.textContent = dark ? "Light theme" : "Dark theme";
}
themeButton.addEventListener("click", () => {
  chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("toto-compat-theme", chosenTheme); } catch { /* the choice lasts for this page */ }
  showTheme();
});
prefersDark.addEventListener("change", showTheme);
addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; });
addEventListener("afterprint", showTheme);
showTheme();

// --- copying ---------------------------------------------------------------------------------------------------------

async function copy(button) {
  const text = button.closest(".copyable").querySelector("pre");
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch { // pages opened from disk may not use the clipboard: select the text, so that one key copies it
    const range = document.createRange();
    range.selectNodeContents(text);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}
document.addEventListener("click", (event) => {
  if (event.target.classList.contains("copy")) copy(event.target);
});

function copyable(title, text) {
  const head = element("div", { class: "copyhead" }, element("span", {}, title), element("button", { type: "button", class: "copy" }, "Copy"));
  return element("div", { class: "copyable" }, head, element("pre", { tabindex: "0" }, text));
}

// --- filters ---------------------------------------------------------------------------------------------------------

const filters = document.getElementById("filters");
const grid = document.getElementById("grid");
const gridRows = [...grid.tBodies[0].rows];
const headers = [...grid.tHead.rows[0].cells];
const columns = [...grid.querySelectorAll("col")];

function applyFilters() {
  const wanted = Object.fromEntries(new FormData(filters));
  const active = Object.values(wanted).some(Boolean);
  const seen = headers.map(() => false);
  let shown = 0, total = 0;
  for (const row of gridRows) {
    const rowFits = (!wanted.cache || row.dataset.cache === wanted.cache) && (!wanted.mode || row.dataset.mode === wanted.mode);
    let any = false;
    for (let column = 1; column < row.cells.length; column += 1) {
      const cell = row.cells[column];
      if (!cell.dataset.verdict) continue;
      total += 1;
      const fits = rowFits && (!wanted.device || cell.dataset.device === wanted.device) && (!wanted.verdict || cell.dataset.verdict === wanted.verdict);
      cell.firstElementChild.hidden = !fits;
      if (fits) { shown += 1; any = true; seen[column] = true; }
    }
    row.hidden = !any;
  }
  for (let column = 1; column < headers.length; column += 1) {
    const hide = active && !seen[column];
    if (headers[column].hidden === hide) continue;
    headers[column].hidden = hide;
    columns[column].hidden = hide; // a column of fixed width would keep its place
    for (const row of gridRows) row.cells[column].hidden = hide;
  }
  document.getElementById("shown").textContent = `${shown} of ${total} cells`;
  document.getElementById("nothing").hidden = shown > 0;
  grid.parentElement.hidden = shown === 0;
}
filters.addEventListener("change", applyFilters);
filters.addEventListener("submit", (event) => event.preventDefault());
// the fields change after this event: a microtask would still see the old ones
filters.addEventListener("reset", () => setTimeout(applyFilters));

// --- the grid by keyboard --------------------------------------------------------------------------------------------

const STEPS = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
grid.addEventListener("keydown", (event) => {
  const step = STEPS[event.key];
  const here = event.target.closest("td");
  if (!step || !here) return;
  event.preventDefault();
  let row = gridRows.indexOf(here.parentElement), column = here.cellIndex;
  for (;;) {
    row += step[0];
    column += step[1];
    const next = gridRows[row] && column > 0 ? gridRows[row].cells[column] : null;
    if (!next) return;
    const button = next.querySelector("button:not([hidden])");
    if (button && !gridRows[row].hidden && !next.hidden) { button.focus(); return; }
  }
});

// --- details ---------------------------------------------------------------------------------------------------------

const dialog = document.getElementById("details");
const body = document.getElementById("details-body");

function table(titles, rows, longColumns = []) {
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const lines = rows.map((row) => element("tr", {}, ...row.map((content, column) =>
    element("td", longColumns.includes(column) ? { class: "long" } : {}, content instanceof Node ? content : String(content ?? "")))));
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": titles.join(", ") },
    element("table", { class: "data" }, element("thead", {}, head), element("tbody", {}, ...lines)));
}

function chip(status) {
  return element("span", { class: `chip tone-${status}` }, `${MARKS[status] ?? ""} ${status.replace("_", " ")}`);
}

function section(title, ...content) { return [element("h3", {}, title), ...content]; }

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10].map((step) => step * power).find((top) => top >= value) ?? 10 * power;
}

function tickText(value) { return String(Number(value.toPrecision(3))); }

function frame(name, ticks) {
  const template = document.getElementById(`frame-${name}`);
  const svg = template.content.firstElementChild.cloneNode(true);
  for (const text of svg.querySelectorAll("text")) {
    const wanted = ticks[text.textContent.trim()];
    if (wanted !== undefined) text.textContent = wanted;
  }
  const box = Object.fromEntries(["left", "right", "top", "bottom"].map((side) => [side, Number(template.dataset[side])]));
  return { svg, box };
}

function axisTicks(axis, top) {
  return Object.fromEntries([0, 1, 2, 3, 4].map((number) => [`${axis}${number}`, tickText((top * number) / 4)]));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function distributionPlot(timings) {
  const top = niceTop(Math.max(...Object.values(timings).map((values) => Math.max(...values))));
  const { svg, box } = frame("distribution", axisTicks("x", top));
  const x = (ms) => box.left + (ms / top) * (box.right - box.left);
  Object.keys(CONTESTANTS).forEach((name, row) => {
    const values = timings[name];
    if (!values?.length) return;
    const y = box.top + ((row + 0.6) / 3.2) * (box.bottom - box.top);
    // spread by the golden ratio: no two neighbours in time lie on each other, and the picture is the same every time
    const dots = values.map((ms, number) => `M${x(ms).toFixed(1)} ${(y + (((number * 0.618) % 1) - 0.5) * 18).toFixed(1)}h0`);
    svg.append(shape("path", { d: dots.join(""), class: `dots series-${name}` }));
    const middle = median(values);
    svg.append(shape("path", { d: `M${x(middle).toFixed(1)} ${y - 13}v26`, class: `median series-${name}` }));
    const label = shape("text", { x: Math.min(x(middle) + 4, box.right - 40), y: y - 11, class: "value" });
    label.textContent = `median ${tickText(middle)}`;
    svg.append(label);
  });
  return svg;
}

function latencyPlot(timings) {
  // up to a multiple of four, so that the ticks are whole forecasts
  const last = Math.ceil(Math.max(...Object.values(timings).map((values) => values.length)) / 4) * 4;
  const top = niceTop(Math.max(...Object.values(timings).map((values) => Math.max(...values))));
  const { svg, box } = frame("latency", { ...axisTicks("x", last), ...axisTicks("y", top) });
  for (const name of Object.keys(CONTESTANTS)) {
    const values = timings[name];
    if (!values?.length) continue;
    const points = values.map((ms, number) => {
      const x = box.left + ((number + 1) / last) * (box.right - box.left);
      return `${x.toFixed(1)} ${(box.bottom - (ms / top) * (box.bottom - box.top)).toFixed(1)}`;
    });
    svg.append(shape("path", { d: `M${points.join("L")}`, class: `line series-${name}` }));
  }
  return svg;
}

function keyOf(timings) {
  return element("ul", { class: "keys" }, ...Object.keys(CONTESTANTS).filter((name) => timings[name]?.length).map((name) => {
    const sample = shape("svg", { viewBox: "0 0 16 6", "aria-hidden": "true" });
    sample.append(shape("path", { d: "M0 3h16", class: `median series-${name}` }));
    return element("li", {}, sample, ` ${CONTESTANTS[name]}`);
  }));
}

function failureText(failure) { return [`${failure.kind}: ${failure.message}`, ...failure.lastLines].join("\n"); }

function eventSections(events) {
  const made = [];
  for (const [kind, title] of Object.entries(EVENT_TITLES)) {
    const groups = events.filter((group) => group.kind === kind);
    if (!groups.length) continue;
    const total = groups.reduce((sum, group) => sum + group.count, 0);
    made.push(...section(`${title}: ${total}`, table(["count", "function", "source line", "reason"], groups.map((group) => {
      const reason = element("div", {}, element("code", {}, group.reason || "(torch gave no reason)"));
      if (group.limit !== null) reason.append(element("div", {}, `limit ${group.limit}`));
      if (group.example) reason.append(element("div", { class: "note" }, "for example ", element("code", {}, group.example)));
      if (group.stack.length) reason.append(element("details", {}, element("summary", {}, "stack"), element("pre", {}, group.stack.join("\n"))));
      return [group.count, group.function, element("code", {}, group.where), reason];
    }), [3])));
  }
  return made;
}

function provenanceSection(cell, held) {
  const facts = element("dl", {});
  for (const [name, value] of [...Object.entries(held.facts), ["started", cell.started]]) {
    if (value) facts.append(element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, String(value)));
  }
  if (cell.reusedFrom) facts.append(element("dt", {}, "measured in run"), element("dd", {}, cell.reusedFrom));
  const lists = [["packages", held.packages], ["system packages", held.system]].filter(([, list]) => Object.keys(list).length);
  return section("Provenance", facts, ...lists.map(([title, list]) => element("details", {},
    element("summary", {}, `${Object.keys(list).length} ${title}`),
    element("pre", { tabindex: "0" }, Object.entries(list).map(([name, version]) => `${name}==${version}`).join("\n")))));
}

function bundleOf(cell) {
  if (cell.bundleFile) {
    const link = element("a", { href: encodeURIComponent(cell.bundleFile) }, cell.bundleFile);
    return [element("p", {}, "All of it in one file, for an issue or another machine: ", link)];
  }
  return cell.bundle ? [copyable("Put all of it into one file, for an issue or another machine", cell.bundle)] : [];
}

function fillDetails(cell, provenance) {
  document.getElementById("details-name").textContent = cell.name;
  const lead = element("p", { class: "lead" }, chip(cell.verdict), ` on ${cell.device}, ${cell.forecast}. `,
    cell.verdict === "PASS" ? "Every demanded gate was measured and passed." : `${cell.decidedBy ? `${cell.decidedBy}: ` : ""}${cell.reason}`);
  const gates = table(["gate", "status", "figure", "limit", "kind", "what was found"], cell.gates.map((gate) => [
    gate.gate, chip(gate.status), `${gate.value} ${gate.unit}${gate.interval ? ` (${gate.interval})` : ""}`.trim(), gate.limit,
    gate.kind && gate.kind !== "measured" ? element("span", { class: "predicted" }, `≈ ${gate.kind}`) : gate.kind,
    element("div", { title: gate.method }, gate.reason, gate.next ? element("div", { class: "note" }, "get it with ", element("code", {}, gate.next)) : ""),
  ]), [5]);
  const parts = [lead, copyable("Run this cell again", cell.rerun),
    ...bundleOf(cell), ...section("Gates", gates)];
  if (cell.failure) parts.push(...section("The cell did not finish", element("pre", { tabindex: "0" }, failureText(cell.failure))));
  if (cell.lowered) parts.push(...section("Compiled for CUDA without a GPU", element("p", {}, element("span", { class: "predicted" }, "≈ decides nothing"), ` ${cell.lowered.told}.`), table(
    ["GPU", "graphs lowered", "whole in CUDA graphs", "partitions captured", "kernels", "most registers", "spilling", "library calls", "values on the CPU", "seconds", "torch said"], cell.lowered.rows, [7, 10])));
  if (cell.symbols.length) parts.push(...section("Your series, compiled against upstream eager", table(
    ["symbol", "MAE eager", "MAE compiled", "difference", "speedup", "recompiles", "notes"], cell.symbols, [6])));
  if (Object.values(cell.timings).some((values) => values.length)) {
    parts.push(...section("Timings, warm", keyOf(cell.timings), element("div", { class: "plots" },
      element("figure", {}, element("figcaption", {}, "Distribution"), distributionPlot(cell.timings)),
      element("figure", {}, element("figcaption", {}, "Over iterations: a recompile shows as a spike"), latencyPlot(cell.timings)))));
  }
  if (cell.eventsNotKept) parts.push(element("p", { class: "note" }, `${cell.eventsNotKept} more compiler events were counted than are kept: the full counts are under Suites.`));
  parts.push(...eventSections(cell.events));
  for (const [suite, title] of [["memory", "Memory"], ["speed", "Speed and compile time"], [null, "Other figures"]]) {
    const rows = cell.figures.filter((figure) => (suite ? figure[0] === suite : !["memory", "speed"].includes(figure[0])));
    if (rows.length) parts.push(...section(title, table(["figure", "value", "kind", "how"], rows.map((figure) => [figure[1].replaceAll("_", " "), figure[2], figure[3], figure[4]]), [3])));
  }
  parts.push(...section("Suites", table(["suite", "outcome", "seconds", "method"], cell.suites.map((suite) => [
    suite.suite, suite.outcome, suite.seconds,
    element("div", {}, suite.method, suite.details ? element("details", {}, element("summary", {}, `what ${suite.suite} recorded`), element("pre", { tabindex: "0" }, suite.details)) : "", suite.failure ? element("pre", { tabindex: "0" }, failureText(suite.failure)) : ""),
  ]), [3])));
  if (cell.history.length > 1) {
    parts.push(...section("History over runs", table(["run", "date", "verdict", "speedup", "recompiles in total"],
      cell.history.map(([run, date, verdict, speedup, recompiles]) => [run, date, chip(verdict), speedup === null ? "" : `${typeof speedup === "number" ? speedup.toFixed(2) : speedup}x`, recompiles ?? ""]))));
  }
  parts.push(...provenanceSection(cell, provenance));
  parts.push(...section("Files in the run folder", element("ul", {}, ...cell.files.map((file) => element("li", {}, element("code", {}, file))))));
  body.replaceChildren(...parts);
}

const cellsPerPack = Number(dialog.dataset.cellsPerPack);
let wantedCell = null;

async function openCell(number) {
  wantedCell = number;
  if (!globalThis.DecompressionStream) { // browsers from before 2023
    alert("This browser can not unpack the details of a cell. A newer one can.");
    return;
  }
  const [pack, provenances] = await Promise.all([stored(`pack-${Math.floor(number / cellsPerPack)}`), stored("provenances")]);
  if (wantedCell !== number) return; // another cell was selected meanwhile
  const cell = pack[number % cellsPerPack];
  fillDetails(cell, provenances[cell.provenance]);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", `#cell-${number}`);
}
grid.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-cell]");
  if (button) openCell(Number(button.dataset.cell));
});
document.getElementById("close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => { body.replaceChildren(); history.replaceState(null, "", " "); });
const linked = /^#cell-(\d+)$/.exec(location.hash);
if (linked && grid.querySelector(`button[data-cell="${linked[1]}"]`)) openCell(Number(linked[1]));
