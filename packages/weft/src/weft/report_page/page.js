"use strict";
// ---- small tools

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const summary = read("summary");
const view = document.getElementById("view");
const tip = document.getElementById("tip");

const NAMES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const esc = (text) => String(text).replace(/[&<>"]/g, (c) => NAMES[c]);

/** A new element: `h("div", {class: "x", onclick: f}, child, "text")`; `html` is raw markup. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "html") element.innerHTML = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null && child !== false));
  return element;
}

const count = (n, word) => `<b>${n}</b> ${n === 1 && word.endsWith("s") ? (word === "misses" ? "miss" : word.slice(0, -1)) : word}`;
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const base = (path) => path.slice(path.lastIndexOf("/") + 1);
const short = (line) => base(line);
function time(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${(seconds * 1e6).toFixed(1)} µs`;
}
function bytes(n) {
  if (n == null) return "varies";
  for (const unit of ["B", "KB", "MB"]) {
    if (n < 1000) return `${n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} GB`;
}

const KEYWORDS = {
  python: "and as assert async await break class continue def del elif else except finally for from global if import in is lambda None nonlocal not or pass raise return True False try while with yield",
  c: "const char double else float for goto if int int32_t int64_t long NULL return restrict sizeof static struct uint8_t uint32_t unsigned void while inline _Bool",
};
const words = (text) => new Set(text.split(" "));
const KEYWORD_SETS = { python: words(KEYWORDS.python), c: words(KEYWORDS.c) };
const TOKEN = {
  python: /(#.*)|("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|\b(\d[\w.]*)|([A-Za-z_]\w*)/g,
  c: /(\/\*.*?\*\/|\/\/.*|^\s*\*.*|^#.*)|("(?:\\.|[^"\\])*")|\b(\d[\w.]*)|([A-Za-z_]\w*)/g,
};

/** One line of code as markup. */
function colour(line, language) {
  let out = "", end = 0;
  for (const found of line.matchAll(TOKEN[language])) {
    const [text, comment, string, number, word] = found;
    out += esc(line.slice(end, found.index));
    end = found.index + text.length;
    const kind = comment ? "m" : string ? "s" : number ? "d" : KEYWORD_SETS[language].has(word) ? "k" : "";
    out += kind ? `<span class="${kind}">${esc(text)}</span>` : esc(text);
  }
  return out + esc(line.slice(end));
}

// ---- tabs

const TABS = { Frames: showFrames, "Compile time": showTime, Recompiles: showRecompiles, Notices: showNotices };
function openTab(name) {
  for (const button of document.querySelectorAll("#tabs button")) {
    button.classList.toggle("on", button.dataset.name === name);
  }
  view.replaceChildren();
  TABS[name]();
}

const FRAME = ["name", "file", "line", "graphs", "ops", "breaks", "recompiles", "eager", "hits", "misses"];
const frames = summary.frames.map((row, number) => {
  const frame = { number };
  FRAME.forEach((field, position) => { frame[field] = row[position]; });
  return frame;
});
if (summary.other) {
  const row = { name: "graphs of no frame", file: "", line: 0, graphs: summary.other, number: "other" };
  frames.push({ ops: 0, breaks: 0, recompiles: 0, eager: 0, hits: 0, misses: 0, ...row });
}
const total = (field) => frames.reduce((sum, frame) => sum + frame[field], 0);

function start() {
  const spent = summary.stages.reduce((sum, stage) => sum + stage[1], 0);
  const codegen = summary.counters.codegen || {};
  const facts = [
    [frames.length, "frames"], [total("graphs"), "graphs"], [total("ops"), "operations"],
    [codegen.kernels || 0, "kernels"], [codegen.externs || 0, "library calls"],
    [total("breaks"), "breaks", "warn"], [total("recompiles"), "recompiles", "warn"],
    [frames.filter((frame) => frame.eager).length, "partly eager", "bad"], [time(spent), "compiling"],
  ];
  for (const [value, label, kind] of facts) {
    document.getElementById("totals").append(
      h("span", { class: kind && value ? kind : "", html: count(value, label) }));
  }
  const counts = { Recompiles: total("recompiles"), Notices: summary.told.length };
  for (const name of Object.keys(TABS)) {
    const label = counts[name] ? `${name} (${counts[name]})` : name;
    document.getElementById("tabs").append(
      h("button", { "data-name": name, onclick: () => openTab(name) }, label));
  }
  openTab("Frames");
}

// ---- the tree of frames: only the rows in sight are elements

const ROW = 24;
const closed = new Set();
const filters = new Set();
let pattern = "", chosen = null;

function showFrames() {
  const list = h("div", { class: "list" });
  const search = h("input", { type: "search", placeholder: "filter by name or file", value: pattern,
    oninput: (event) => { pattern = event.target.value; list.scrollTop = 0; layout(); } });
  const toggles = h("div", { class: "toggles" }, ...["breaks", "recompiles", "eager"].map((name) =>
    h("button", { class: filters.has(name) ? "on" : "", onclick: (event) => {
      filters[filters.has(name) ? "delete" : "add"](name);
      event.target.classList.toggle("on");
      layout();
    } }, name)));
  const detail = h("div", { class: "detail" });
  view.append(h("aside", {}, h("div", { class: "search" }, search, toggles), list), detail);

  let rows = [];
  const spacer = h("div");
  list.append(spacer);

  function layout() {
    const wanted = pattern.toLowerCase();
    const groups = new Map();
    for (const frame of frames) {
      if (wanted && !`${frame.name} ${frame.file}`.toLowerCase().includes(wanted)) continue;
      if ([...filters].some((name) => !frame[name])) continue;
      if (!groups.has(frame.file)) groups.set(frame.file, []);
      groups.get(frame.file).push(frame);
    }
    rows = [];
    for (const [file, group] of groups) {
      rows.push({ file, group });
      if (!closed.has(file)) for (const frame of group) rows.push({ frame });
    }
    spacer.style.height = `${rows.length * ROW}px`;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const last = Math.min(rows.length, first + Math.ceil((list.clientHeight || 900) / ROW) + 10);
    const shown = [spacer];
    for (let position = first; position < last; position++) {
      const element = rows[position].frame ? frameRow(rows[position].frame) : fileRow(rows[position]);
      element.style.top = `${position * ROW}px`;
      shown.push(element);
    }
    list.replaceChildren(...shown);
  }

  function fileRow({ file, group }) {
    const flip = () => { closed[closed.has(file) ? "delete" : "add"](file); layout(); };
    return h("div", { class: "row file", title: file, onclick: flip },
      closed.has(file) ? "▸" : "▾", h("span", { class: "name" }, base(file) || "other"),
      h("span", { class: "marks" }, h("span", { class: "mark" }, group.length)));
  }

  function frameRow(frame) {
    const marks = h("span", { class: "marks" });
    if (frame.breaks) marks.append(h("span", { class: "mark breaks", title: "graph breaks" }, frame.breaks));
    if (frame.recompiles) marks.append(h("span", { class: "mark", title: "recompiles" }, `↻${frame.recompiles}`));
    if (frame.eager) marks.append(h("span", { class: "mark eager" }, "eager"));
    marks.append(h("span", { class: "mark", title: "graphs" }, frame.graphs));
    const open = () => { chosen = frame; draw(); showFrame(frame, detail); };
    return h("div", { class: `row frame${frame === chosen ? " on" : ""}`, title: `${frame.name} (${frame.file}:${frame.line})`, onclick: open },
      h("span", { class: "name" }, frame.name), marks);
  }

  list.addEventListener("scroll", draw);
  layout();
  requestAnimationFrame(draw);
  if (!chosen && frames.length) chosen = frames.find((frame) => frame.graphs) || frames[0];
  if (chosen) { draw(); showFrame(chosen, detail); } else {
    detail.append(h("div", { class: "empty" }, "Nothing was captured yet: call a compiled function, then weft.report()."));
  }
}

// ---- one frame: source beside its graphs

const NOT_KEPT = `The graphs and their code were not kept. To see them, set
  <code>weft.config.record = True</code> before the first call, or run
  <code>python -m weft report script.py -o report.html</code>.`;

function showFrame(frame, box) {
  const data = read(frame.number === "other" ? "other" : `f${frame.number}`);
  const title = h("div", { class: "title" },
    h("h2", {}, frame.name),
    frame.file && h("div", { class: "where" }, `${frame.file}:${frame.line}`),
    h("div", { class: "chips" }, ...["graphs", "ops", "breaks", "recompiles", "hits", "misses"].map((name) =>
      h("span", { html: count(frame[name], name) }))));
  const linked = new Links();
  const notes = h("div", { class: "notes" });
  for (const row of data.lost || []) notes.append(note(row, "runs eagerly", linked, true));
  for (const [text, count] of data.uncompiled || []) {
    notes.append(h("div", { class: "note error" }, h("span", { class: "code" }, "a graph runs op by op"),
      h("span", {}, `${text}${count > 1 ? ` (${count} graphs)` : ""}`)));
  }
  for (const row of data.breaks || []) notes.append(note(row, "graph break", linked, false));
  for (const text of data.not_kept || []) {
    notes.append(h("div", { class: "note" }, h("span", { class: "code" }, "captured again by other processes"), text));
  }
  box.replaceChildren(title, notes, h("div", { class: "panes" },
    sourcePane(data, linked), graphPane(frame, data, linked)));
}

function note(row, label, linked, isError) {
  const where = row.file ? `${row.file}:${row.line}` : "";
  return h("div", { class: `note${isError ? " error" : ""}`, onclick: () => linked.pick([where], "source") },
    h("span", { class: "code" }, `${label}: ${row.code}${row.count > 1 ? ` ×${row.count}` : ""}`),
    h("span", {}, `${row.why}${row.detail ? ` (${row.detail})` : ""}. `,
      h("span", { class: "fix" }, `What to do: ${row.remedy}.`), " ", h("small", {}, short(where))));
}

/** The lines that are picked, and what of the page shows them. */
class Links {
  constructor() { this.picked = new Set(); this.targets = []; }
  /** Tell that `element` stands for user lines; clicking it picks them. */
  add(element, lines, pane) {
    this.targets.push({ element, lines, pane });
    if (lines.length) element.addEventListener("click", (event) => {
      event.stopPropagation();
      this.pick(lines, pane);
    });
    element.classList.toggle("on", lines.some((line) => this.picked.has(line)));
  }
  drop(pane) { this.targets = this.targets.filter((target) => target.pane !== pane); }
  pick(lines, from) {
    this.picked = new Set(lines);
    const seen = new Set();
    for (const { element, lines: own, pane } of this.targets) {
      const on = own.some((line) => this.picked.has(line));
      element.classList.toggle("on", on);
      if (on && pane !== from && !seen.has(pane)) {
        seen.add(pane);
        element.scrollIntoView({ block: "center", inline: "nearest" });
      }
    }
  }
  /** Bring the first picked element of a pane into sight. */
  reveal(pane) {
    const found = this.targets.find((t) => t.pane === pane && t.element.classList.contains("on"));
    if (found) found.element.scrollIntoView({ block: "center", inline: "nearest" });
  }
}

function sourcePane(data, linked) {
  const counts = new Map();
  for (const graph of data.graphs) for (const [text, line] of graph.rows || []) {
    if (line && text.includes(" = ")) counts.set(line, (counts.get(line) || 0) + 1);
  }
  const stops = new Map();
  for (const row of [...(data.breaks || []), ...(data.lost || [])]) {
    const line = `${row.file}:${row.line}`;
    stops.set(line, [...(stops.get(line) || []), row]);
  }
  const box = h("div", { class: "scroll code" });
  let file = null;
  for (const block of data.sources) {
    box.append(block.file === file ? h("div", { class: "l m" }, "        ⋮") : h("div", { class: "filename" }, block.file));
    file = block.file;
    block.lines.forEach((text, offset) => {
      const line = `${block.file}:${block.first + offset}`;
      const count = counts.get(line), stop = stops.get(line);
      const element = h("div", { class: `l${count || stop ? " link" : ""}${stop ? " stop" : ""}`,
        title: count ? plural(count, "operation") : "",
        html: `<span class="n">${block.first + offset}</span><span class="c">${count || ""}</span>${colour(text, "python")}` });
      linked.add(element, count || stop ? [line] : [], "source");
      box.append(element);
      for (const row of stop || []) box.append(h("div", { class: "stopped" },
        `✂ ${row.code}${row.count > 1 ? ` ×${row.count}` : ""}: ${row.detail || row.why}. `, h("span", { class: "fix" }, row.remedy)));
    });
  }
  if (!data.sources.length) box.append(h("div", { class: "empty" }, "The source cannot be read any more."));
  return h("div", { class: "pane source" },
    h("div", { class: "bar" }, h("span", { class: "label" }, "source; a number counts a line's operations, click to see them")), box);
}

function graphPane(frame, data, linked) {
  const body = h("div", { class: "scroll" });
  const bar = h("div", { class: "bar" });
  const pane = h("div", { class: "pane" }, bar, body);
  const guards = data.guards || [];
  const entries = data.graphs.map((graph, number) => [graphLabel(graph, number), () => openGraph(graph)]);
  if (guards.length) {
    const count = guards.reduce((sum, entry) => sum + entry.length, 0);
    entries.push([`guards (${count})`, () => openGuards(guards, fresh(), linked)]);
  }
  if (data.code) entries.push(["rewritten code", () => fresh().append(h("pre", { class: "code", style: "margin: 0; padding: 6px 14px" }, data.code))]);
  if ((data.recompiles || []).length) entries.push([`recompiles (${data.recompiles.length})`, () => openRecompiles(frame, data, fresh())]);
  const stages = h("div", { class: "pills" }), views = h("div", { class: "pills" });
  const choice = h("select", { onchange: () => { stages.replaceChildren(); views.replaceChildren(); entries[choice.value][1](); } },
    ...entries.map(([label], value) => h("option", { value }, label)));
  bar.append(choice, stages, views);
  const fresh = () => { linked.drop("graph"); body.replaceChildren(); body.scrollTop = 0; return body; };
  let lastStage = 0, lastView = "graph";

  function pills(box, options, current, open) {
    box.replaceChildren(...options.map(([label, value]) => h("button", { class: value === current ? "on" : "",
      onclick: (event) => {
        for (const other of box.children) other.classList.remove("on");
        event.target.classList.add("on");
        open(value);
      } }, label)));
  }

  function openGraph(graph) {
    const parts = flatten(graph);
    const open = (position) => { lastStage = position; openStage(parts[position]); };
    const position = Math.min(lastStage, parts.length - 1);
    pills(stages, parts.map((part, number) => [part.label, number]), position, open);
    open(position);
  }

  function openStage(part) {
    const offered = VIEWS.filter(([, , has]) => has(part));
    const shown = offered.some(([name]) => name === lastView) ? lastView : offered[0][0];
    const open = (name) => {
      lastView = name;
      offered.find(([other]) => other === name)[1](part, fresh(), linked);
      linked.reveal("graph");
    };
    if (offered.length > 1) pills(views, offered.map(([name]) => [name, name]), shown, open);
    else views.replaceChildren();
    open(shown);
  }

  if (entries.length) entries[0][1]();
  if (!summary.recorded && !data.graphs.length) {
    const text = h("div", { class: "empty", html: NOT_KEPT });
    if (entries.length) body.prepend(text); else body.append(text);
  } else if (!entries.length) body.append(h("div", { class: "empty" }, "Nothing of this frame is in a graph."));
  return pane;
}

function graphLabel(graph, number) {
  const resumed = (graph.piece || "").match(/<resume at (\d+)>/);
  const what = graph.ops == null ? graph.title || graph.kind : plural(graph.ops, "operation");
  return `graph ${graph.number ?? number}${resumed ? ` from line ${resumed[1]}` : ""}: ${what}`;
}

/** The graphs below a captured one, with what the code generator made of each. */
function flatten(graph) {
  const parts = [{ label: graph.title || (graph.kind === "graph" ? "captured" : graph.kind), ...graph }];
  (function below(node) {
    for (const child of node.children) {
      if (child.kind === "aten" || child.kind === "graph") {
        const label = (child.title || "graph").replace(" graph", "");
        parts.push({ label, ...child });
      }
      below(child);
    }
  })(graph);
  for (const part of parts) {
    for (const child of part.children) if (!["aten", "graph"].includes(child.kind)) part[child.kind] = child;
  }
  return parts;
}

const VIEWS = [
  ["graph", showRows, (part) => part.rows],
  ["loops", (part, box) => showText(part.program.loops, box), (part) => part.program],
  ["schedule", showSchedule, (part) => part.program],
  ["code", showCode, (part) => part.source],
  ["kernels", showKernels, (part) => part.program],
  ["diagram", showDiagram, (part) => part.program],
  ["memory", showMemory, (part) => part.program],
];

function showRows(part, box, linked) {
  const code = h("div", { class: "code" });
  const isInput = ([text]) => !text.includes(" = ") && !text.startsWith("return ");
  const inputs = part.rows.filter(isInput);
  if (inputs.length) {
    code.append(h("details", inputs.length > 12 ? {} : { open: "" }, h("summary", { class: "l m" }, plural(inputs.length, "input")),
      ...inputs.map(([text]) => h("div", { class: "l", html: colour(text, "python") }))));
  }
  for (const [text, line] of part.rows.filter((row) => !isInput(row))) {
    const comment = line ? `<span class="m">  # ${esc(short(line))}</span>` : "";
    const element = h("div", { class: `l${line ? " link" : ""}`, title: line, html: colour(text, "python") + comment });
    linked.add(element, line ? [line] : [], "graph");
    code.append(element);
  }
  box.append(code);
}

function showText(text, box, language = "python") {
  box.append(h("div", { class: "code", html: text.split("\n").map((line) => `<div class="l">${colour(line, language)}</div>`).join("") }));
}

function showSchedule(part, box, linked) {
  const code = h("div", { class: "code" });
  const steps = new Map(part.program.steps.map((step) => [step.text, step.lines]));
  for (const text of part.program.schedule.split("\n")) {
    const lines = steps.get(text.split("  # ")[0].trim()) || [];
    const element = h("div", { class: `l${lines.length ? " link" : ""}`, html: colour(text, "python") });
    linked.add(element, lines, "graph");
    code.append(element);
  }
  box.append(code);
}

function showCode(part, box, linked) {
  const language = part.source.language === "C" ? "c" : "python";
  const users = new Map();
  for (const step of (part.program || { steps: [] }).steps) {
    if (step.kind === "kernel") users.set(step.name, [...(users.get(step.name) || []), ...step.lines]);
  }
  const every = [...new Set([...users.values()].flat())];
  /** The code; a comment that names a user's line is linked to it. */
  function lines(text, kind, own) {
    const box = h("div", { class: "code" });
    let inside = false;
    for (const line of text.split("\n")) {
      const opens = kind === "c" && line.startsWith("/*") && !line.includes("*/");
      const comment = inside || opens;
      inside = comment && !line.includes("*/");
      const named = line.match(/(?:\/\*|#) (\S+:\d+): /);
      const found = named ? own.filter((place) => short(place) === named[1]) : [];
      const element = h("div", { class: `l${found.length ? " link" : ""}${comment ? " m" : ""}`, html: comment ? esc(line) : colour(line, kind) });
      if (found.length) linked.add(element, found, "graph");
      box.append(element);
    }
    return box;
  }
  for (const [name, [symbol, text]] of Object.entries(part.source.kernels)) {
    const own = [...new Set(users.get(name) || [])];
    const head = h("div", { class: "head" }, h("b", {}, name), " ", h("span", { class: "where" }, symbol === name ? "" : symbol), " ",
      h("span", { class: "where" }, own.map(short).join(", ")));
    linked.add(head, own, "graph");
    box.append(h("div", { class: "kernel" }, head, lines(text, language, own)));
  }
  const head = h("div", { class: "head" }, h("b", {}, "host"), " ", h("span", { class: "where" }, "the whole graph as one C function"));
  box.append(h("div", { class: "kernel" }, head, lines(part.source.host, "c", every)));
}

function showKernels(part, box, linked) {
  const timed = part.timed && part.timed.seconds.some((time) => time) ? part.timed : null, limit = summary.bandwidth;
  const heads = ["#", "kernel or operator", "bytes moved"];
  if (timed) heads.push("time", "GB/s", `of ${(limit / 1e9).toFixed(1)} GB/s`);
  heads.push("user lines");
  const table = h("table", {}, h("tr", {}, ...heads.map((text, k) =>
    h("th", { class: k === 1 || k === heads.length - 1 ? "" : "num" }, text))));
  part.program.steps.forEach((step, position) => {
    if (step.kind === "view") return;
    const row = h("tr", { class: step.lines.length ? "link" : "", title: step.text },
      h("td", { class: "num" }, position), h("td", { class: "mono name" }, step.name.replace(/\.default$/, "")),
      h("td", { class: "num" }, bytes(step.bytes)));
    if (timed) {
      const seconds = timed.seconds[position], rate = seconds && step.bytes ? step.bytes / seconds : 0;
      const share = Math.round(100 * rate / limit);
      row.append(h("td", { class: "num" }, seconds ? time(seconds) : ""), h("td", { class: "num" }, rate ? (rate / 1e9).toFixed(1) : ""),
        h("td", { class: "num", html: rate ? `${share} %<span class="meter"><i style="width:${Math.min(100, share)}%"></i></span>` : "" }));
    }
    row.append(h("td", { class: "where" }, step.lines.map(short).join(", ")));
    linked.add(row, step.lines, "graph");
    table.append(row);
  });
  const measured = part.measured;
  if (measured) box.append(h("div", { class: "empty" },
    `Measured whole: ${time(measured.compiled)} compiled, ${time(measured.eager)} eager; ${measured.pays ? "the compiled code runs" : "eager is faster, so eager runs"}.`));
  box.append(table);
  if (timed) box.append(h("div", { class: "empty" },
    "Times are the shortest of all calls. The limit is what a copy of large tensors moves here; small tensors stay in caches, so their kernels may be above it, and products are bound by arithmetic."));
  else box.append(h("div", { class: "empty" }, "Bytes are what each step has to move at least. No times were taken: the graph ran in no call."));
}

function showDiagram(part, box, linked) {
  let scale = 1;
  const frame = h("div", { class: "diagram-box", html: part.program.diagram });
  const svg = frame.querySelector("svg");
  svg.classList.add("diagram");
  const width = +svg.getAttribute("width"), height = +svg.getAttribute("height");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const set = (value) => { scale = value; svg.setAttribute("width", width * scale); svg.setAttribute("height", height * scale); };
  const zoom = h("div", { class: "bar pills", style: "position:sticky;top:0;left:0;z-index:1" },
    h("button", { onclick: () => set(scale * 1.25) }, "+"), h("button", { onclick: () => set(scale / 1.25) }, "−"),
    h("button", { onclick: () => set(Math.min(1, (box.clientWidth - 40) / width)) }, "fit"), h("span", { class: "label" }, "blue: kernels; orange: operators; an arrow is a buffer"));
  box.append(zoom, frame);
  for (const group of frame.querySelectorAll("g[data-step]")) {
    linked.add(group, part.program.steps[+group.dataset.step].lines, "graph");
  }
}

const COLOURS = { scratch: "#5b8def", owned: "#e0894a", input: "#9aa0a8", constant: "#9aa0a8" };
function showMemory(part, box) {
  const { steps, buffers, scratch } = part.program;
  const own = buffers.filter((buffer) => !["input", "constant"].includes(buffer.memory) && buffer.first >= 0);
  own.sort((a, b) => a.first - b.first || a.last - b.last);
  const large = own.filter((buffer) => buffer.memory === "owned");
  const sum = (list) => list.reduce((total, buffer) => total + (buffer.bytes || 0), 0);
  box.append(h("div", { class: "empty" },
    `${plural(own.length, "buffer")} in ${plural(steps.length, "step")}: ${bytes(scratch)} of scratch memory for ${own.length - large.length} small ones ` +
    `(${bytes(sum(own.filter((b) => b.memory === "scratch")))} without reuse), ${plural(large.length, "tensor")} of ${bytes(sum(large))} allocated. ` +
    `A bar is the steps during which a buffer lives.`));
  const high = 16, left = 190, room = Math.max(300, box.clientWidth - left - 30);
  const unit = Math.max(4, Math.min(26, room / (steps.length + 1)));
  let out = "";
  own.forEach((buffer, row) => {
    const last = Math.min(buffer.last, steps.length), x = left + buffer.first * unit, y = row * high;
    const place = buffer.memory === "scratch" ? ` at ${buffer.offset}` : "";
    const over = buffer.over ? `, takes the memory of ${buffer.over}` : "";
    out += `<text x="4" y="${y + 12}" font-size="10.5" fill="currentColor">${esc(buffer.text.split(" strides")[0].slice(0, 29))}</text>` +
      `<rect x="${x}" y="${y + 2}" width="${Math.max(unit, (last - buffer.first + 1) * unit)}" height="${high - 4}" rx="2" fill="${COLOURS[buffer.memory]}"><title>${esc(`${buffer.text}: ${bytes(buffer.bytes)} ${buffer.memory}${place}, steps ${buffer.first} to ${last}${over}`)}</title></rect>`;
  });
  box.append(h("div", { html: `<svg width="${left + (steps.length + 2) * unit}" height="${own.length * high + 8}">${out}</svg>`, style: "padding:0 8px 12px" }));
}

function openGuards(entries, box, linked) {
  entries.forEach((entry, number) => {
    box.append(h("div", { class: "filename" }, `entry ${number}: ${plural(entry.length, "guard")} that all hold before its code runs`));
    const code = h("div", { class: "code" });
    for (const [kind, text, line] of entry) {
      const element = h("div", { class: `l${line ? " link" : ""}`, title: line,
        html: `<span class="k">${esc(kind.padEnd(14))}</span>${esc(text)}<span class="m">${line ? `  # ${esc(short(line))}` : ""}</span>` });
      linked.add(element, line ? [line] : [], "graph");
      code.append(element);
    }
    box.append(code);
  });
}

// ---- recompiles

const isOf = (event, frame) => event.frame[0] === frame.name && event.frame[1] === frame.file;
function openRecompiles(frame, data, box) {
  const events = summary.recompiles.filter((event) => isOf(event, frame));
  const inner = h("div", { style: "padding: 6px 14px" });
  if (events.length) for (const event of events) inner.append(recompile(event));
  else for (const text of data.recompiles) inner.append(h("div", { class: "event" }, h("span"), h("span", { class: "change" }, text)));
  box.append(inner);
}

function recompile(event) {
  const box = h("div");
  for (const miss of event.misses) {
    box.append(h("div", { class: "change" }, `${miss.what}: `, h("del", {}, miss.old), " → ", h("ins", {}, miss.new)),
      h("div", {}, `${miss.remedy}. `, miss.fix ? h("code", {}, miss.fix) : ""),
      h("div", { class: "where" }, `guard ${miss.guard}${miss.line ? `, used at ${short(miss.line)}` : ""}`));
  }
  return h("div", { class: "event" }, h("span", { class: "time" }, time(event.seconds)),
    h("div", {}, h("b", {}, event.frame[0]), event.limit ? h("span", { class: "bad" }, " at the limit") : "", box));
}

function showRecompiles() {
  const page = h("div", { class: "page" });
  view.append(page);
  const events = summary.recompiles;
  if (!events.length) {
    const some = frames.filter((frame) => frame.recompiles);
    const text = some.length ? `${plural(total("recompiles"), "recompile")} in ${plural(some.length, "frame")}; open a frame to see why. For times and remedies, set weft.config.record = True.`
      : "No frame was compiled twice.";
    page.append(h("div", { class: "empty" }, text), ...some.slice(0, 500).map((frame) => h("div", {}, h("code", {}, frame.name), ` ${frame.recompiles}`)));
    return;
  }
  const end = Math.max(...events.map((event) => event.seconds)) * 1.05 || 1, width = 1000;
  const names = [...new Set(events.map((event) => event.frame[0]))].slice(0, 40);
  let out = "";
  names.forEach((name, row) => {
    out += `<text x="0" y="${row * 22 + 15}" font-size="11" fill="currentColor">${esc(name.slice(-34))}</text><line x1="250" x2="${250 + width}" y1="${row * 22 + 11}" y2="${row * 22 + 11}" stroke="var(--line)"/>`;
  });
  events.forEach((event) => {
    const row = names.indexOf(event.frame[0]);
    if (row < 0) return;
    const text = event.misses.map((miss) => `${miss.what}: ${miss.old} → ${miss.new}`).join("; ");
    out += `<circle cx="${250 + width * event.seconds / end}" cy="${row * 22 + 11}" r="5" fill="${event.limit ? "#b3261e" : "#2457c5"}"><title>${esc(`${time(event.seconds)} ${text}`)}</title></circle>`;
  });
  page.append(h("div", { class: "card" }, h("h3", {}, `${plural(events.length, "recompile")} in ${time(end / 1.05)}`),
    h("div", { html: `<svg width="${270 + width}" height="${names.length * 22 + 6}">${out}</svg>`, style: "overflow-x:auto" })));
  page.append(h("div", { class: "card" }, ...events.slice(0, 1000).map(recompile)));
}

// ---- compile time

function showTime() {
  const page = h("div", { class: "page" });
  view.append(page);
  const most = Math.max(...summary.stages.map((stage) => stage[1]), 1e-9);
  const sum = summary.stages.reduce((total, stage) => total + stage[1], 0);
  const grid = h("div", { class: "stages" });
  for (const [name, seconds, count] of summary.stages) {
    grid.append(h("span", {}, name), h("div", { class: "fill", style: `width:${100 * seconds / most}%` }), h("span", {}, time(seconds)), h("span", { class: "where" }, `${count}×`));
  }
  page.append(h("div", { class: "card" }, h("h3", {}, `${time(sum)} by stage, each without the stages inside of it`), grid));
  page.append(h("div", { class: "card" }, h("h3", {}, "When"), flames()));
}

const HUES = { capture: 215, backend: 40, aot: 265, codegen: 18, guards: 150, precompiled: 190, compiled_autograd: 320 };
function flames() {
  if (!summary.spans.length) return h("div", { class: "empty", html: NOT_KEPT });
  const spans = [...summary.spans].sort((a, b) => a[3] - b[3] || b[4] - a[4]);
  const begin = spans[0][3], end = Math.max(...spans.map((span) => span[3] + span[4]));
  const lanes = new Map();
  const placed = [];
  for (const span of spans) {
    if (!lanes.has(span[2])) lanes.set(span[2], []);
    const open = lanes.get(span[2]);
    while (open.length && span[3] >= open[open.length - 1] - 1e-9) open.pop();
    placed.push([span, open.length]);
    open.push(span[3] + span[4]);
  }
  const tops = new Map();
  let top = 0;
  for (const thread of lanes.keys()) {
    tops.set(thread, top);
    top += (1 + Math.max(...placed.filter(([span]) => span[2] === thread).map(([, depth]) => depth))) * 20 + 8;
  }
  const canvas = h("canvas", { style: `width:100%;height:${top}px;cursor:grab` });
  let from = begin, to = end;
  const box = h("div", {}, h("div", { class: "where" }, "wheel: zoom; drag: move; double click: all"), canvas);
  function draw() {
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = top * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px monospace";
    for (const [span, depth] of placed) {
      const x = (span[3] - from) / (to - from) * width, w = span[4] / (to - from) * width;
      if (x + w < 0 || x > width || w < 0.3) continue;
      const y = tops.get(span[2]) + depth * 20;
      pen.fillStyle = `hsl(${HUES[span[0].split(".")[0]] ?? 90} 60% 72%)`;
      pen.fillRect(x, y, Math.max(1, w - 1), 18);
      if (w > 40) {
        pen.fillStyle = "#1c1e21";
        pen.fillText(`${span[0]} ${span[1]}`.slice(0, Math.floor((w + Math.min(0, x) - 8) / 6.7)), Math.max(x, 0) + 4, y + 13);
      }
    }
  }
  const at = (event) => from + (to - from) * event.offsetX / canvas.clientWidth;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const middle = at(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
    from = Math.max(begin, middle - (middle - from) * factor);
    to = Math.min(end, middle + (to - middle) * factor);
    draw();
  }, { passive: false });
  canvas.addEventListener("dblclick", () => { from = begin; to = end; draw(); });
  canvas.addEventListener("mousemove", (event) => {
    if (event.buttons) {
      const shift = Math.max(begin - from, Math.min(end - to, -event.movementX / canvas.clientWidth * (to - from)));
      from += shift; to += shift;
      draw();
      return;
    }
    const moment = at(event);
    const hit = placed.find(([span, depth]) => moment >= span[3] && moment <= span[3] + span[4]
      && event.offsetY >= tops.get(span[2]) + depth * 20 && event.offsetY < tops.get(span[2]) + depth * 20 + 18);
    tip.hidden = !hit;
    if (hit) {
      tip.textContent = `${hit[0][0]} ${hit[0][1]}: ${time(hit[0][4])}`;
      tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 300)}px`;
      tip.style.top = `${event.clientY + 14}px`;
    }
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  requestAnimationFrame(draw);
  addEventListener("resize", draw);
  return box;
}

// ---- notices and counters

function showNotices() {
  const page = h("div", { class: "page" });
  view.append(page);
  page.append(h("div", { class: "card" }, h("h3", {}, "Told to the user"),
    ...(summary.told.length ? summary.told.map((text) => h("pre", { style: "white-space:pre-wrap" }, text)) : ["Nothing."])));
  for (const [group, counts] of Object.entries(summary.counters)) {
    const rows = Object.entries(counts).sort((a, b) => b[1] - a[1]);
    if (!rows.length) continue;
    page.append(h("div", { class: "card" }, h("h3", {}, group), h("table", {}, ...rows.map(([name, count]) =>
      h("tr", {}, h("td", { class: "num" }, count), h("td", { class: "mono" }, name))))));
  }
}

start();
