// The live page: it folds the stream of events into a picture of the crew, and draws that at most four times a second.
// Nothing that comes from events is ever used as markup. To move in time is to fold anew.
"use strict";

const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const METRICS = ["loss", "consensus", "bytes", "waited"];
const PAUSE = 250, SLOWER = 1000;  // milliseconds between two drawings, and between two of the chart
const KEPT = 500;  // points of a sparkline
const WINDOW = 12;  // seconds over which waiting is measured
const DAY = 86_400;  // seconds after which a run that says nothing is one that was recorded
const LATEST = 8.64e12;  // seconds; there are no later dates
const MOST = 250_000;  // events that are kept for a replay
const SHOWN = 200;  // events in the list
const BROKEN = ["lost", "away", "left", "dropped"], OFF = [...BROKEN, "ended"];  // states of those who do not train
const ALARMS = ["lost", "away", "dropped", "skipped"];

// --- small things ----------------------------------------------------------------------------------------------------

function make(tag, parent, attributes = {}, text = "") {
  const svg = ["svg", "g", "path", "circle", "text", "title", "tspan"].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function put(node, text) { if (node.textContent !== text) node.textContent = text; }
function set(node, name, value) { if (node.getAttribute(name) !== value) node.setAttribute(name, value); }
function number(value) { return typeof value === "number" ? value : NaN; }
function whole(value) { return Math.round(value).toLocaleString("en"); }
function short(value) {
  if (typeof value !== "number") return value === undefined ? "" : value === null ? "not finite" : String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toLocaleString("en", {minimumSignificantDigits: 4, maximumSignificantDigits: 4, useGrouping: false});
}
function bytes(count) {
  const step = Math.max(0, Math.min(5, Math.floor(Math.log10(Math.max(count, 1)) / 3)));
  return `${(count / 1000 ** step).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB", "PB"][step]}`;
}
function seconds(value) {
  if (value < 100) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}
function percent(share) { return `${Math.round(100 * share)} %`; }
function clockText(time) { return new Date(1000 * time).toLocaleTimeString("en-GB"); }
function count(n, word) { return `${whole(n)} ${word}${n === 1 ? "" : "s"}`; }
function mean(values) { return values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN; }
function level(share) { return share < 0.05 ? 0 : share < 0.2 ? 1 : share < 0.5 ? 2 : 3; }
function lagLevel(lag) { return lag < 1 ? 0 : lag < 4 ? 1 : lag < 16 ? 2 : 3; }

// --- what is known at a moment ----------------------------------------------------------------------------------------

class Member {
  constructor(id) { this.id = id; this.row = null; this.forget(); }
  forget() {
    this.known = false; this.state = "training"; this.since = 0; this.last = 0; this.host = "";
    this.round = 0; this.told = NaN; this.lag = 0; this.now = {}; this.neighbours = []; this.crew = []; this.off = new Set();
    this.series = Object.fromEntries(METRICS.map(name => [name, []]));  // [time, round, value]
    this.recent = [];  // [time, waits, waited, bytes, round], over the window
    this.waits = {}; this.changed = true;
  }
  hear(event) {
    const time = event.time, before = this.recent.at(-1);
    this.round = number(event.round) || 0;
    this.told = number(event.lag);
    for (const name of ["loss", "consensus", "bytes", "waited"]) if (name in event) this.now[name] = event[name];
    if (event.waits && typeof event.waits === "object") this.waits = event.waits;
    this.recent.push([time, this.waits, number(this.now.waited), number(this.now.bytes), this.round]);
    while (this.recent.length > 2 && this.recent[1][0] < time - WINDOW) this.recent.shift();
    this.add("loss", time, number(event.loss));
    this.add("consensus", time, number(event.consensus));
    if (before && time > before[0]) {
      this.add("bytes", time, (number(this.now.bytes) - before[3]) / (time - before[0]));
      this.add("waited", time, Math.min(1, (number(this.now.waited) - before[2]) / (time - before[0])));
    }
  }
  add(name, time, value) {
    if (!Number.isFinite(value)) return;
    const points = this.series[name];
    points.push([time, this.round, value]);
    if (points.length > KEPT) this.series[name] = points.filter((_, k) => k % 2 === 0 || k === points.length - 1);
  }
  over(pick) {  // how much a number that grows has grown per second, over the window
    const first = this.recent[0], last = this.recent.at(-1);
    return first && last[0] > first[0] ? Math.max(0, (pick(last) - pick(first)) / (last[0] - first[0])) : 0;
  }
  waitsFor(other) { return Math.min(1, this.over(entry => number(entry[1][other]) || 0)); }
  get isOff() { return OFF.includes(this.state); }
  get isBroken() { return BROKEN.includes(this.state); }
}

const members = new Map(), studies = new Map();
let order = [], crew = [], epoch = 0, facts = {}, log = [], front = 0;
const fronts = new Map();  // rounds of the foremost member of each crew, by its first member

function member(id) {
  id = String(id);
  if (!members.has(id)) members.set(id, new Member(id));
  const known = members.get(id);
  if (!known.known) { known.known = true; if (!order.includes(id)) order.push(id); }
  return known;
}

function reset() {
  for (const known of members.values()) known.forget();
  for (const study of studies.values()) study.forget();
  order = []; crew = []; epoch = 0; facts = {}; log = []; front = 0; fronts.clear(); marked = 0;
}

let marked = 0;  // entries of the log that the page has, from the first
function note(event, who, text) { log.push({time: event.time, alarm: ALARMS.includes(event.event), who, text}); }

function fold(event) {
  const kind = event.event;
  if (kind === "study" || kind === "run") return foldStudy(event);
  if (event.member === undefined || typeof event.time !== "number") return;
  const one = member(event.member), at = "round" in event ? ` in round ${whole(number(event.round))}` : "";
  // Who was lost speaks again; who has ended begins anew.
  if ((["lost", "away"].includes(one.state) && kind === "round" && event.time > one.since) || kind === "start") one.state = "training";
  one.last = Math.max(one.last, event.time); one.changed = true;
  if (kind === "round") {
    one.hear(event);
    front = Math.max(front, one.round);
    fronts.set(one.crew[0], Math.max(fronts.get(one.crew[0]) ?? 0, one.round));
  } else if (kind === "start") {
    one.host = String(event.host ?? "");
    one.off.clear();
    for (const name of ["rule", "topology", "wire", "every", "late", "parameters"]) if (name in event) facts[name] = event[name];
  } else if (kind === "epoch") {
    one.neighbours = (Array.isArray(event.neighbours) ? event.neighbours : []).map(String);
    foldEpoch(event);
  } else if (kind === "lost" && event.neighbour !== undefined) {
    const other = member(event.neighbour);
    one.off.add(other.id);
    if (other.last <= event.time + 0.5 && !other.isOff) { other.state = "lost"; other.since = event.time; other.changed = true; }
    note(event, one.id, `lost ${other.id}${at}${event.why ? `: ${event.why}` : ""}`);
  } else if (kind === "back") {
    if (event.neighbour !== undefined) one.off.delete(String(event.neighbour));
    one.state = "training";
    note(event, one.id, event.neighbour === undefined ? "is back" : `hears ${event.neighbour} again`);
  } else if (["away", "left", "dropped"].includes(kind)) {
    one.state = kind; one.since = event.time;
    note(event, one.id, `${{away: "is away", left: "left", dropped: "was dropped"}[kind]}${at}${event.why ? `: ${event.why}` : ""}`);
  } else if (kind === "end") {
    if (!one.isOff) { one.state = "ended"; one.since = event.time; }
    note(event, one.id, `ended${at}`);
  } else {
    const words = {late: `waits for ${event.neighbour}, which is late,`, skipped: "skipped its gradient", checkpoint: "wrote a checkpoint"};
    const more = event.why ?? event.path;
    note(event, one.id, `${words[kind] ?? kind}${at}${more ? `: ${more}` : ""}`);
  }
}

function foldEpoch(event) {
  if (!Array.isArray(event.members) || number(event.epoch) < epoch) return;
  const now = event.members.map(String), before = order;
  member(event.member).crew = now;
  // A second optimizer of the same processes has members of its own, beside which those of the first one stay.
  const isApart = ({crew}) => crew.length && !crew.some(id => now.includes(id));
  const apart = number(event.epoch) > epoch ? [] : before.filter(id => isApart(members.get(id)));
  for (const id of now) members.get(id)?.off.forEach(gone => { if (!now.includes(gone)) members.get(id).off.delete(gone); });
  if (number(event.epoch) > epoch) {
    const first = epoch === 0;
    epoch = number(event.epoch);
    const come = now.filter(id => !crew.includes(id)), gone = crew.filter(id => !now.includes(id));
    crew = now;  // not those who have only spoken
    if (first) note(event, "crew", `epoch ${epoch}: ${count(now.length, "member")}`);
    else note(event, "crew", `epoch ${epoch} from round ${whole(number(event.round))}: ${count(now.length, "member")}` +
      (come.length ? `; ${come.join(", ")} joined` : "") + (gone.length ? `; ${gone.join(", ")} left` : ""));
    for (const id of gone) { const one = members.get(id); if (one && !one.isOff) one.state = "left"; }
  }
  order = now[0] < apart[0] ? [...now, ...apart] : [...apart, ...now];
  for (const id of now) { member(id); if (members.get(id).state === "left") members.get(id).state = "training"; }
}

// --- the graph ---------------------------------------------------------------------------------------------------------

const narrow = matchMedia("(max-width: 34rem)");  // as in watch.css
const graph = {nodes: new Map(), halves: new Map(), shares: new Map(), shape: ""};
graph.base = make("path", $("graph"), {class: "base"});
graph.lines = make("g", $("graph")); graph.dots = make("g", $("graph")); graph.words = make("g", $("graph"));

function links() {  // [a, b] of all links, each once
  const found = new Map(), here = new Set(order);
  for (const id of order) for (const other of members.get(id).neighbours) if (here.has(other) && other !== id) {
    const pair = order.indexOf(id) < order.indexOf(other) ? [id, other] : [other, id];
    found.set(pair.join("\n"), pair);
  }
  return [...found.values()];
}

function place() {  // anew, where members or links have changed
  const pairs = links(), shape = JSON.stringify([order, pairs, narrow.matches]);
  if (shape === graph.shape) return;
  graph.shape = shape; graph.pairs = pairs;
  const n = order.length, radius = n < 2 ? 0 : narrow.matches ? 145 : 158, dot = Math.max(4.5, Math.min(13, 300 / n));
  graph.where = new Map(order.map((id, k) => [id, [radius * Math.sin(2 * Math.PI * k / n), -radius * Math.cos(2 * Math.PI * k / n)]]));
  set($("graph"), "class", n > 24 ? "many" : "");
  set(graph.base, "d", pairs.map(([a, b]) => `M${graph.where.get(a)}L${graph.where.get(b)}`).join(""));
  for (const [id, node] of graph.nodes) if (!graph.where.has(id)) { node.group.remove(); graph.nodes.delete(id); }
  for (const half of graph.halves.values()) half.remove();
  graph.halves.clear();
  for (const id of order) {
    if (!graph.nodes.has(id)) {
      const group = make("g", graph.dots);
      const node = {group, circle: make("circle", group), cross: make("path", group, {class: "gone"}), title: make("title", group)};
      node.label = make("text", group); node.name = make("tspan", node.label); node.behind = make("tspan", node.label, {class: "behind"});
      group.addEventListener("click", () => choose(id));
      graph.nodes.set(id, node);
    }
    const node = graph.nodes.get(id), [x, y] = graph.where.get(id), far = radius ? (radius + dot + 6) / radius : 1, c = 0.55 * dot;
    for (const [name, value] of [["cx", x], ["cy", y], ["r", dot]]) set(node.circle, name, String(value));
    set(node.cross, "d", `M${x - c} ${y - c}L${x + c} ${y + c}M${x + c} ${y - c}L${x - c} ${y + c}`);
    set(node.label, "x", String(x * far)); set(node.label, "y", String(y * far + (radius ? 0 : dot + 14)));
    set(node.label, "text-anchor", Math.abs(x) < 12 ? "middle" : x > 0 ? "start" : "end");
    set(node.label, "dominant-baseline", Math.abs(x) < 12 ? (y > 0 ? "hanging" : "auto") : "central");
    put(node.name, id.length > 8 ? `${id.slice(0, 7)}…` : id);
  }
}

function lagOf(one) {
  // Rounds are told some times a second: what others have done since then does not count.
  const speed = one.recent.length > 1 ? one.over(entry => entry[4]) : 0;
  const seen = one.isOff || !one.recent.length ? 0 : Math.floor((fronts.get(one.crew[0]) ?? 0) - one.round - Math.max(speed, 0.5));
  return Math.max(0, Number.isFinite(one.told) ? one.told : 0, seen);
}

function drawGraph() {
  place();
  const shown = new Set(), ranked = [];
  for (const [a, b] of graph.pairs) {
    const [one, other] = [members.get(a), members.get(b)], shares = [one.waitsFor(b), other.waitsFor(a)];
    const parted = one.state === "left" && other.state === "left";  // at the end of a crew nobody has lost anybody
    const lost = !parted && (one.off.has(b) || other.off.has(a) || one.isBroken || other.isBroken);
    const total = (number(one.waits[b]) || 0) + (number(other.waits[a]) || 0);
    ranked.push({a, b, shares, sum: shares[0] + shares[1], total, lost});
    [[a, b], [b, a]].forEach(([from, to], side) => {
      const kind = lost ? "lost" : `wait${level(shares[side])}`, key = `${from}\n${to}`;
      if (kind === "wait0") return;
      shown.add(key);
      if (!graph.halves.has(key)) {
        const [[x, y], [u, v]] = [graph.where.get(from), graph.where.get(to)];
        graph.halves.set(key, make("path", graph.lines, {d: `M${x} ${y}L${(x + u) / 2} ${(y + v) / 2}`, "data-link": `${from} ${to}`}));
      }
      set(graph.halves.get(key), "class", `half ${kind}`);
    });
  }
  for (const [key, half] of graph.halves) if (!shown.has(key)) { half.remove(); graph.halves.delete(key); }
  ranked.sort((p, q) => p.lost - q.lost || q.sum - p.sum);
  const named = ranked.filter(link => !link.lost && link.sum >= 0.2).slice(0, order.length > 24 ? 1 : 3), texts = [...graph.words.children];
  for (const [k, link] of named.entries()) {
    const text = texts[k] ?? make("text", graph.words, {class: "share"});
    const [[x, y], [u, v]] = [graph.where.get(link.a), graph.where.get(link.b)], far = Math.hypot(x + u, y + v) / 2;
    // Beside the link: outside, but not where there are so many members that their names are there.
    const aside = (order.length > 24 ? -1 : 1) * (14 + 14 * Math.abs(x + u) / (2 * far)), out = far > 30 ? 1 + aside / far : 1;
    set(text, "x", String(out * (x + u) / 2)); set(text, "y", String(out * (y + v) / 2));
    put(text, percent(Math.max(...link.shares)));
  }
  texts.slice(named.length).forEach(text => text.remove());
  for (const id of order) {
    const one = members.get(id), node = graph.nodes.get(id), lag = one.lag;
    set(node.circle, "class", `node ${one.isBroken ? "off" : `lag${lagLevel(lag)}`}`);
    set(node.cross, "visibility", ["lost", "away", "dropped"].includes(one.state) ? "visible" : "hidden");
    set(node.group, "class", id === chosen ? "chosen" : "");
    put(node.behind, one.isBroken ? ` ${one.state}` : lag >= 1 ? ` −${whole(lag)}` : "");
    put(node.title, `${id}: ${stateOf(one)}, round ${whole(one.round)}${lag >= 1 ? `, ${count(lag, "round")} behind` : ""}`);
  }
  const worst = ranked.find(link => !link.lost && link.sum >= 0.05);
  const gone = order.filter(id => members.get(id).isBroken).length;
  set($("graph"), "aria-label", `The graph of the crew: ${count(order.length, "member")}, ${count(graph.pairs.length, "link")}` +
    (gone ? `, ${gone} not training` : "") + (worst ? `. The slowest link is ${worst.a} to ${worst.b}` : "") + ". The tables tell the same.");
  drawLinks([...ranked.filter(link => !link.lost && link.total > 0).slice(0, 6), ...ranked.filter(link => link.lost).slice(0, 3)]);
}

function drawLinks(ranked) {
  const body = $("links");
  $("no-links").hidden = ranked.length > 0;
  body.closest("table").hidden = !ranked.length;
  while (body.children.length > ranked.length) body.lastChild.remove();
  ranked.forEach((link, k) => {
    if (!body.children[k]) {
      const row = make("tr", body), name = make("th", row, {scope: "row"}), meter = make("div", make("td", row), {class: "meter"});
      make("i", meter); make("span", meter); make("td", row, {class: "number"}); name.className = "name";
    }
    const [name, share, total] = body.children[k].children, [bar, text] = share.firstChild.children;
    put(name, `${link.a} – ${link.b}`);
    bar.style.width = `${Math.min(60, 30 * link.sum)}%`;
    bar.className = `wait${level(Math.max(...link.shares))}`;
    bar.hidden = link.lost;
    put(text, link.lost ? "lost" : `${percent(link.shares[0])} + ${percent(link.shares[1])}`);
    put(total, link.total ? link.total.toFixed(1) : "");
    set(body.children[k], "title", link.lost ? "" : `${link.a} waits for ${link.b} ${percent(link.shares[0])} of the time, ${link.b} for ${link.a} ${percent(link.shares[1])}`);
  });
}

// --- members as a table --------------------------------------------------------------------------------------------------

let chosen = "", sorted = ["order", 1], visible = new WeakSet();
const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) { visible.add(entry.target); wake(); } else visible.delete(entry.target);
}, {rootMargin: "100px"});

function stateOf(one) {
  const quiet = (hasStopped() ? last : mode.now()) - one.last;
  if (one.isOff || !one.recent.length) return one.isOff ? one.state : "waiting to begin";
  const usual = one.recent.length > 1 ? (one.recent.at(-1)[0] - one.recent[0][0]) / (one.recent.length - 1) : 1;
  return quiet > Math.max(5, 10 * usual) ? `silent for ${seconds(quiet)}` : hasStopped() ? "stopped" : "training";
}

function rowOf(one) {
  if (one.row) return one.row;
  const row = make("tr", $("rows")), head = make("th", row, {scope: "row"}), button = make("button", head, {"aria-pressed": "false"}, one.id);
  button.addEventListener("click", () => choose(one.id));
  const host = make("span", head, {class: "host"}), cells = {};
  for (const name of ["state", "round", "lag"]) cells[name] = make("td", row, {class: name === "state" ? "" : "number"});
  for (const name of METRICS) {
    const cell = make("td", row, {class: "number spark"}), svg = make("svg", cell, {viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true"});
    cells[name] = {path: make("path", svg), text: make("span", cell)};
  }
  watcher.observe(row);
  return one.row = {row, button, host, cells};
}

function drawRows() {
  const scales = Object.fromEntries(METRICS.map(name => [name, scaleOf(name)]));
  for (const one of members.values()) {
    if (!one.known) { if (one.row) one.row.row.hidden = true; continue; }
    const {row, button, host, cells} = rowOf(one), state = stateOf(one);
    row.hidden = false;
    set(row, "class", one.id === chosen ? "chosen" : "");
    set(button, "aria-pressed", String(one.id === chosen));
    put(host, one.host);
    put(cells.state, state);
    set(cells.state, "class", ["lost", "away", "dropped"].includes(state) || state.startsWith("silent") ? "bad" : "");
    put(cells.round, whole(one.round));
    put(cells.lag, one.lag >= 1 ? whole(one.lag) : "–");
    set(cells.lag, "class", lagLevel(one.lag) > 1 ? "number bad" : "number");
    put(cells.loss.text, short(one.now.loss));
    put(cells.consensus.text, short(one.now.consensus));
    put(cells.bytes.text, Number.isFinite(number(one.now.bytes)) ? bytes(one.now.bytes) : "");
    put(cells.waited.text, Number.isFinite(number(one.now.waited)) ? seconds(one.now.waited) : "");
    if (visible.has(row)) for (const name of METRICS) set(cells[name].path, "d", spark(one.series[name], ...scales[name]));
  }
}

function scaleOf(name) {  // one for all members, so that they can be compared
  let low = Infinity, high = -Infinity, from = Infinity, to = -Infinity;
  for (const one of members.values()) for (const [time, , value] of one.series[name]) {
    if (value < low) low = value; if (value > high) high = value;
    if (time < from) from = time; if (time > to) to = time;
  }
  if (name === "waited" || name === "bytes") low = 0;
  if (name === "waited") high = 1;
  return [from, to, low, high];
}

function spark(points, from, to, low, high) {
  if (points.length < 2) return "";
  const bins = [];
  for (const [time, , value] of points) {
    const k = Math.round(100 * (time - from) / (to - from || 1));
    const bin = bins[k] ??= [0, 0];
    bin[0] += value; bin[1]++;
  }
  let path = "";
  bins.forEach(([sum, n], k) => { path += `${path ? "L" : "M"}${k} ${(19 - 18 * (sum / n - low) / (high - low || 1)).toFixed(1)}`; });
  return path;
}

function sortRows() {
  const [by, sign] = sorted, texts = by === "state";
  const key = one => by === "order" ? order.indexOf(one.id) + 1 || 1e9 : texts ? stateOf(one) : by === "round" || by === "lag" ? one[by] : number(one.now[by]);
  const rows = [...members.values()].filter(one => one.row).sort((p, q) => {
    const [a, b] = [key(p), key(q)];
    return sign * (texts ? a.localeCompare(b) : (Number.isNaN(a) ? 1e300 : a) - (Number.isNaN(b) ? 1e300 : b));
  });
  $("rows").append(...rows.map(one => one.row.row));
}
for (const button of document.querySelectorAll("[data-sort]")) button.addEventListener("click", () => {
  const by = button.dataset.sort;
  sorted = [by, sorted[0] === by ? -sorted[1] : by === "order" || by === "state" ? 1 : -1];
  for (const other of document.querySelectorAll("[data-sort]")) other.parentNode.removeAttribute("aria-sort");
  button.parentNode.setAttribute("aria-sort", sorted[1] > 0 ? "ascending" : "descending");
  sortRows();
});

function choose(id) { chosen = chosen === id ? "" : id; chart.stale = true; chart.drawn = 0; wake(); }

// --- the chart -----------------------------------------------------------------------------------------------------------

const chart = {plot: null, drawn: 0, stale: true, shape: ""};

function drawChart(now) {
  if (now - chart.drawn < SLOWER || !chart.stale || !visible.has($("chart"))) return;
  chart.drawn = now; chart.stale = false;
  const name = $("metric").value, shown = [...members.values()].filter(one => one.series[name].length);
  const most = Math.max(1, ...shown.map(one => one.series[name].at(-1)[1])), width = Math.max(1, Math.ceil(most / 300));
  const length = Math.floor(most / width) + 1, table = [Array.from({length}, (_, k) => k * width)];
  for (const one of shown) {
    const sums = new Float64Array(length), counts = new Uint32Array(length);
    for (const [, round, value] of one.series[name]) { const k = Math.floor(round / width); sums[k] += value; counts[k]++; }
    table.push(Array.from(sums, (sum, k) => counts[k] ? sum / counts[k] : null));
  }
  const rows = table.slice(1), some = rows.length > 0;
  table.push(some ? table[0].map((_, k) => { const there = rows.map(row => row[k]).filter(v => v !== null); return there.length ? mean(there) : null; }) : [null]);
  const shape = JSON.stringify([name, $("log").checked, chosen, shown.map(one => one.id), dark.matches]);
  if (shape !== chart.shape) { chart.shape = shape; chart.plot?.destroy(); chart.plot = plotOf(name, shown); }
  chart.plot.setData(table);
}

function plotOf(name, shown) {
  const style = getComputedStyle(document.documentElement), colour = key => style.getPropertyValue(key).trim();
  const size = name === "bytes" ? v => v === null ? "" : `${bytes(v)}/s` : name === "waited" ? v => v === null ? "" : percent(v) : v => v === null ? "" : short(v);
  const axis = {stroke: colour("--dim"), grid: {stroke: colour("--line"), width: 1}, ticks: {show: false}, font: "12px system-ui, sans-serif"};
  const thin = {stroke: colour("--calm"), width: 1, alpha: 0.45, points: {show: false}, spanGaps: true};
  const series = shown.map(one => one.id === chosen ? {...thin, stroke: colour("--hot"), width: 2, alpha: 1} : {...thin});
  const options = {
    width: $("chart").clientWidth, height: $("chart").clientHeight, legend: {show: false},
    scales: {x: {time: false}, y: {distr: $("log").checked ? 3 : 1}},
    axes: [{...axis, size: 30}, {...axis, size: 68, values: (_, ticks) => ticks.map(v => v === null ? "" : name === "loss" || name === "consensus" ? String(+v.toPrecision(6)) : size(v))}],
    cursor: {points: {show: false}, drag: {x: true, y: false}},
    series: [{}, ...series, {stroke: colour("--accent"), width: 2, points: {show: false}, spanGaps: true}],
    hooks: {setCursor: [plot => {
      const k = plot.cursor.idx, last = plot.data.length - 1;
      if (k === null || k === undefined) return put($("readout"), "blue: mean of all" + (chosen ? `, orange: ${chosen}` : ""));
      const mine = chosen ? shown.findIndex(one => one.id === chosen) + 1 : 0;
      put($("readout"), `round ${whole(plot.data[0][k])}: mean ${size(plot.data[last][k])}` + (mine ? `, ${chosen} ${size(plot.data[mine][k])}` : ""));
    }]},
  };
  return new uPlot(options, [[0], ...shown.map(() => [null]), [null]], $("chart"));
}
const dark = matchMedia("(prefers-color-scheme: dark)");
for (const name of ["metric", "log"]) $(name).addEventListener("change", () => { chart.stale = true; chart.drawn = 0; wake(); });
dark.addEventListener("change", () => { chart.stale = true; chart.drawn = 0; wake(); });
new ResizeObserver(() => { if (chart.plot) chart.plot.setSize({width: $("chart").clientWidth, height: $("chart").clientHeight}); }).observe($("chart"));
watcher.observe($("chart"));

// --- tiles and the list of events ----------------------------------------------------------------------------------------

function tile(name, text, more = "") {
  const place = $(`tile-${name}`);
  if (!place.firstChild) { place.append(""); make("small", place); }
  if (place.firstChild.data !== text) place.firstChild.data = text;
  put(place.lastChild, more);
}

function drawTiles() {
  const all = order.map(id => members.get(id)), heard = all.filter(one => one.recent.length), stayed = heard.filter(one => !one.isBroken);
  const on = stayed.length ? stayed : heard.filter(one => one.state === "left");  // a crew ends when its last members leave
  const ended = on.filter(one => one.isOff).length;
  const of = name => mean(on.map(one => number(one.now[name])).filter(Number.isFinite)), last = on.length ? Math.min(...on.map(one => one.round)) : front;
  const over = ended && ended === on.length;
  tile("members", `${over ? ended : on.length - ended}`, `of ${all.length} ${over ? "ended" : hasStopped() ? "stopped" : "training"}${epoch > 1 ? `, epoch ${epoch}` : ""}`);
  tile("round", whole(front), last < front - 1 ? `last ${whole(last)}` : "");
  const told = value => Number.isFinite(value) ? short(value) : "–";
  tile("loss", told(of("loss")), "mean");
  tile("consensus", told(of("consensus")), "");
  const sent = [...members.values()].reduce((sum, one) => sum + (number(one.now.bytes) || 0), 0), speed = on.reduce((sum, one) => sum + (one.over(entry => entry[3]) || 0), 0);
  tile("bytes", bytes(sent), speed && !over && !hasStopped() ? `${bytes(speed)}/s` : "");
  const timed = on.filter(one => one.recent.length > 1 && Number.isFinite(number(one.now.waited)));  // one round says nothing yet
  tile("waited", timed.length ? percent(Math.min(1, mean(timed.map(one => one.over(entry => entry[2]))))) : "–", "of the time");
  const {rule, topology, wire, every, late, parameters} = facts;
  put($("facts"), [rule, topology, every > 1 ? `every ${every} rounds` : "", late ? `late ${late}` : "", wire, parameters ? `${whole(parameters)} parameters` : ""].filter(Boolean).join(" · "));
}

function drawEvents() {
  const list = $("events");
  if (marked === 0) list.replaceChildren();
  const alarms = [];
  for (const entry of log.slice(Math.max(marked, log.length - SHOWN))) {
    const item = make("li", null, {class: entry.alarm ? "alarm" : ""});
    make("time", item, {datetime: new Date(1000 * entry.time).toISOString()}, clockText(entry.time));
    make("span", item, {}, `${entry.who}: ${entry.text}`);
    list.prepend(item);
    if (entry.alarm || entry.who === "crew") alarms.push(`${entry.who}: ${entry.text}`);
  }
  while (list.children.length > SHOWN) list.lastChild.remove();
  if (marked && alarms.length) put($("announcer"), alarms.slice(-3).join(". "));
  marked = log.length;
}

// --- studies ---------------------------------------------------------------------------------------------------------------

class Study {
  constructor(name) { this.name = name; this.forget(); }
  forget() { this.of = 0; this.done = 0; this.runs = []; this.drawn = 0; this.spent = 0; this.bad = 0; this.body?.replaceChildren(); }
}
function foldStudy(event) {
  const name = String(event.name ?? event.study);
  if (!studies.has(name)) studies.set(name, new Study(name));
  const study = studies.get(name);
  study.of = number(event.rows ?? event.of) || study.of;
  study.done = number(event.done) || study.done;
  if (event.event === "run") {
    study.runs.push(event);
    study.spent += number(event.seconds) || 0;
    study.bad += event.state !== "done";
  }
}
function drawStudies() {
  for (const study of studies.values()) {
    if (!study.body) {
      const card = make("section", $("studies"), {class: "card study", "aria-label": study.name}), bar = make("div", card, {class: "bar"});
      make("h2", bar, {}, study.name);
      study.text = make("p", bar, {class: "dim small"});
      study.bar = make("progress", card, {"aria-label": `Runs of ${study.name} that are done`});
      const table = make("table", make("div", card, {class: "wide", tabindex: "0", role: "region", "aria-label": `Runs of ${study.name}, newest first`}));
      const head = make("tr", make("thead", table));
      for (const [k, text] of ["Rule", "Problem", "Topology", "Nodes", "lr", "Seed", "Final value", "Seconds", "Finished"].entries()) make("th", head, {scope: "col", class: k > 2 ? "number" : ""}, text);
      study.body = make("tbody", table);
    }
    study.bar.max = Math.max(1, study.of); study.bar.value = study.done;
    const first = study.runs[0]?.time, last = study.runs.at(-1)?.time, pace = (last - first) / (study.runs.length - 1);
    const left = study.of - study.done, soon = left > 0 && study.runs.length > 5 && mode.live && mode.now() - last < 60 + 10 * pace ? ` · about ${seconds(left * pace)} left` : "";
    put(study.text, `${whole(study.done)} of ${count(study.of, "run")}${study.bad ? ` · ${study.bad} diverged` : ""} · ${seconds(study.spent)} of simulation${soon}`);
    for (const run of study.runs.slice(Math.max(study.drawn, study.runs.length - SHOWN))) {
      const row = make("tr", null), value = Object.entries(run.metrics ?? {})[0];
      make("th", row, {scope: "row"}, String(run.label ?? run.key ?? ""));
      for (const text of [run.setting, run.topology]) make("td", row, {}, String(text ?? ""));
      const cells = [run.nodes, run.lr, run.seed, run.state !== "done" ? run.state : value ? short(value[1]) : "", number(run.seconds).toFixed(2), clockText(run.time)];
      for (const cell of cells) make("td", row, {class: "number"}, String(cell ?? ""));
      if (run.state !== "done") row.children[6].classList.add("bad");
      study.body.prepend(row);
    }
    while (study.body.children.length > SHOWN) study.body.lastChild.remove();
    study.drawn = study.runs.length;
  }
}

// --- time: what comes, and replays of what has come --------------------------------------------------------------------------

let all = [], inOrder = true, first = Infinity, last = 0;
const mode = {
  live: true, playing: false, at: 0, cursor: 0, skew: 0, heard: 0,
  now() { return this.live ? Math.max(last, Date.now() / 1000 + this.skew) : this.at; },
};

function hasStopped() { return mode.now() - last > DAY; }

function arrive(events) {
  for (const event of events) {
    if (typeof event.time !== "number" || Math.abs(event.time) > LATEST) continue;
    if (event.time < last) inOrder = false;
    first = Math.min(first, event.time); last = Math.max(last, event.time);
    all.push(event);
    if (mode.live) fold(event);
  }
  if (all.length > MOST) {  // fewer rounds of the first half, so that days fit
    const half = all.length / 2;
    all = all.filter((event, k) => k > half || k % 2 || event.event !== "round");
    if (!mode.live) seek(mode.at);
  }
  if (mode.live) mode.cursor = all.length;
  chart.stale = true;
  wake();
}

function seek(time) {
  if (!inOrder) { all.sort((p, q) => p.time - q.time); inOrder = true; mode.cursor = all.length + 1; }
  if (time < mode.at || mode.cursor > all.length || mode.live) { reset(); mode.cursor = 0; }
  mode.live = false; mode.at = time;
  while (mode.cursor < all.length && all[mode.cursor].time <= time) fold(all[mode.cursor++]);
  chart.stale = true;
  wake();
}

function goLive() { if (!mode.live) { mode.playing = false; seek(Infinity); mode.live = true; mode.at = last; } wake(); }
function play() {
  if (mode.playing) { mode.playing = false; return wake(); }
  if (mode.live || mode.at >= last) seek(first);
  mode.playing = true; mode.heard = performance.now();
  wake();
}
$("play").addEventListener("click", play);
$("live").addEventListener("click", goLive);
let wanted = null;  // where the slider was moved to
$("when").addEventListener("input", () => { mode.playing = false; wanted = first + (last - first) * $("when").value / 1000; wake(); });

function drawReplay() {
  const span = last - first, at = mode.live ? last : Math.min(mode.at, last);
  $("replay").hidden = !(span > 0);
  put($("play"), mode.playing ? "❚❚" : "▶");
  set($("play"), "aria-label", mode.playing ? "Pause" : "Play");
  set($("live"), "aria-pressed", String(mode.live));
  if (document.activeElement !== $("when") || mode.playing || mode.live) $("when").value = String(1000 * (at - first) / (span || 1));
  const text = `${seconds(at - first)} of ${seconds(span)}`;
  put($("moment"), text);
  set($("when"), "aria-valuetext", `${text}${front ? `, round ${front}` : ""}`);
  const quiet = mode.now() - last, over = order.length > 0 && order.every(id => members.get(id).isOff);
  const done = studies.size > 0 && [...studies.values()].every(study => study.done >= study.of);
  const words = !connected ? "no connection" : !mode.live ? (mode.playing ? "replaying" : "paused") : !all.length ? "waiting" : over || done ? "ended" : hasStopped() ? "stopped" : quiet > 15 ? `quiet for ${seconds(quiet)}` : "live";
  put($("status"), words);
  set($("status"), "class", words === "live" ? "pill live" : "pill");
}

// --- drawing, when something has changed, and not too often --------------------------------------------------------------

let due = false, drawn = -PAUSE, sortedFor = "";
function wake() { if (!due) { due = true; requestAnimationFrame(draw); } }

function draw(now) {
  if (now - drawn < PAUSE) return void requestAnimationFrame(draw);
  due = false; drawn = now;
  if (wanted !== null) { seek(wanted); wanted = null; due = false; }
  if (mode.playing) {
    const time = mode.at + (now - mode.heard) / 1000 * Number($("speed").value);
    mode.heard = now;
    seek(Math.min(time, last));
    due = false;
    if (time >= last) mode.playing = false;
  }
  $("empty").hidden = members.size > 0 || studies.size > 0;
  $("crew").hidden = members.size === 0;
  $("studies").hidden = studies.size === 0;
  if (members.size) {
    for (const one of members.values()) one.lag = lagOf(one);
    drawTiles(); drawGraph(); drawRows(); drawEvents(); drawChart(now);
    if (sortedFor !== order.join()) { sortedFor = order.join(); sortRows(); }
  }
  drawStudies(); drawReplay();
  if (mode.playing || (chart.stale && visible.has($("chart")))) wake();
}

// --- the stream --------------------------------------------------------------------------------------------------------------

let connected = false;
const stream = new EventSource("events");
stream.addEventListener("open", () => { connected = true; wake(); });
stream.addEventListener("error", () => { connected = false; wake(); });
stream.addEventListener("hello", message => {
  const told = JSON.parse(message.data);
  mode.skew = told.now - Date.now() / 1000;
  document.title = `${told.title} – klatsch watch`;
  put($("title"), told.title);
  all = []; inOrder = true; first = Infinity; last = 0;
  mode.live = true; mode.playing = false;
  reset();
  wake();
});
stream.addEventListener("events", message => arrive(JSON.parse(message.data)));
stream.addEventListener("now", message => { mode.skew = JSON.parse(message.data) - Date.now() / 1000; wake(); });
stream.addEventListener("trouble", message => {
  const text = JSON.parse(message.data);
  $("trouble").hidden = !text;
  put($("trouble"), text);
});
