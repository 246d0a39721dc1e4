// Figures that one can ask. They take the place of the pictures, which stay for paper and where no scripts run.
// Names come from a store, which anybody may have written: they become text, never markup.
"use strict";

const DASHES = [[], [7, 4], [2, 3], [8, 3, 2, 3], [8, 3, 2, 3, 2, 3], [2, 6]];
const NEAR = 40;  // pixels between the pointer and the point that it asks
const NARROW = 46, LOW = 20;  // pixels between two labels of an axis
const DARK = matchMedia("(prefers-color-scheme: dark)");

function make(tag, parent, attributes = {}, text = "") {
  const node = ["svg", "path"].includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

function short(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential().replace(/(\.\d\d)\d+/, "$1").replace("+", "") : String(+value.toPrecision(4));
}

function save(rows, name) {  // as CSV; a cell that a spreadsheet would take for a formula begins with its mark of a text
  const cell = value => {
    const text = String(value), safe = /^[=+\-@]/.test(text) && text !== "-" && Number.isNaN(Number(text)) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const address = URL.createObjectURL(new Blob([rows.map(row => row.map(cell).join(",") + "\n").join("")], {type: "text/csv"}));
  const link = make("a", document.body, {href: address, download: `${name}.csv`, hidden: ""});
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function seen(colour) {  // a dark colour, as light as it takes on a dark page
  if (!DARK.matches) return colour;
  let parts = [1, 3, 5].map(k => parseInt(colour.slice(k, k + 2), 16));
  while (0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] < 115) parts = parts.map(part => part + 0.15 * (255 - part));
  return `rgb(${parts.map(Math.round)})`;
}

// --- axes --------------------------------------------------------------------------------------------------------------

function padded(low, high, log) {
  if (!(low <= high) || (log && low <= 0)) return log ? [0.1, 1] : [0, 1];  // nothing is shown
  if (low === high) return log ? [low / 1.5, low * 1.5] : [low - (Math.abs(low) || 1) / 10, low + (Math.abs(low) || 1) / 10];
  const more = log ? (high / low) ** 0.04 : 0.04 * (high - low);
  return log ? [low / more, high * more] : [low - more, high + more];
}

function logTicks(low, high, room) {  // as many as there is room for
  const decades = Math.log10(high / low), first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  for (const [factors, every, count] of [[[1, 2, 3, 4, 6, 8], 1, 8], [[1, 2, 5], 1, 4], [[1, 3], 1, 2], [[1], 1, 1], [[1], 2, 0.5], [[1], 4, 0.25]]) {
    if (decades * count > room && every < 4) continue;
    const ticks = [];
    for (let k = Math.ceil(first / every) * every; k <= last; k += every) for (const factor of factors) ticks.push(Number(`${factor}e${k}`));
    return ticks.filter(tick => tick >= low && tick <= high);
  }
}

// --- a figure ----------------------------------------------------------------------------------------------------------

class Figure {
  constructor(place, told, name) {
    Object.assign(this, told);
    this.lines = new Map(told.panels.flatMap(panel => panel.lines.map(line => [line.name, line])));
    this.shown = new Set(this.lines.keys());
    this.stale = new Set();
    place.classList.add("asked");
    this.box = make("div", place, {class: "ask"});
    const bar = make("div", this.box, {class: "bar"});
    make("p", bar, {}, `${told.y}, against ${told.x}`);
    for (const [k, text] of ["log x", "log y"].entries()) {
      const box = this.check(bar, this.log[k], on => { this.log[k] = on; });
      make("span", box.parentNode, {}, text);
    }
    make("button", bar, {type: "button"}, "Values as CSV").addEventListener("click", () => save(this.rows(), name));
    this.addNames();
    this.panels = told.panels.map(panel => this.addPanel(panel));
    this.addTable();
    this.redraw();
  }

  check(parent, checked, change) {
    const box = make("input", make("label", parent), {type: "checkbox"});
    box.checked = checked;
    box.addEventListener("change", () => { change(box.checked); this.redraw(); });
    return box;
  }

  addNames() {
    const set = make("fieldset", this.box, {class: "names"}), boxes = [];
    make("legend", set, {}, "Show");
    for (const [name, line] of this.lines) {
      const box = this.check(set, true, on => this.shown[on ? "add" : "delete"](name));
      const path = make("path", make("svg", box.parentNode, {"aria-hidden": "true"}), {d: "M0 5H24", fill: "none", "stroke-width": "2.5", "stroke-dasharray": DASHES[line.dash].join(" ")});
      make("span", box.parentNode, {}, name);
      boxes.push([box, path, line, name]);
    }
    this.colour = () => boxes.forEach(([, path, line]) => path.setAttribute("stroke", seen(line.colour)));
    for (const [text, on] of [["All", true], ["None", false]]) {
      make("button", set, {type: "button"}, text).addEventListener("click", () => {
        for (const [box, , , name] of boxes) { box.checked = on; this.shown[on ? "add" : "delete"](name); }
        this.redraw();
      });
    }
    set.hidden = boxes.length < 2;
  }

  addPanel(told) {
    const grid = this.grid ??= make("div", this.box, {class: "panels"}), box = make("div", grid, {class: "panel"});
    make("p", box, {}, told.title);
    const panel = {told, figure: this, place: make("div", box, {class: "chart", "aria-hidden": "true"}), plot: null};
    panel.place.panel = panel;
    watcher.observe(panel.place);
    sizer.observe(panel.place);
    return panel;
  }

  rows() {
    const some = this.panels.some(panel => panel.told.title), rows = [["panel", "line", this.x, "mean", "from", "to", "more"].slice(some ? 0 : 1)];
    for (const {told} of this.panels) for (const line of told.lines) for (const k of line.x.keys()) {
      const more = line.notes[k] ?? line.more.replace(/^, /, "");
      rows.push([told.title, line.name, line.x[k], line.mean[k], line.low[k], line.high[k], more].slice(some ? 0 : 1));
    }
    return rows;
  }

  addTable() {  // when it is asked for: it may be long
    const details = make("details", this.box), box = make("div", details, {class: "wide", tabindex: "0", role: "region", "aria-label": "Values of this figure"});
    make("summary", details, {}, "Values of this figure as a table");
    details.addEventListener("toggle", () => {
      if (box.firstChild) return;
      const [head, ...rows] = this.rows(), table = make("table", box), top = make("tr", make("thead", table)), body = make("tbody", table);
      for (const name of head) make("th", top, {scope: "col"}, name);
      for (const row of rows) { const line = make("tr", body); for (const cell of row) make("td", line, {}, String(cell)); }
    });
  }

  redraw() {
    this.colour();
    let low = Infinity, high = -Infinity;
    for (const {told} of this.panels) for (const line of told.lines) if (this.shown.has(line.name)) for (const k of line.x.keys()) {
      if ((this.log[0] && line.x[k] <= 0) || (this.log[1] && line.mean[k] <= 0)) continue;
      low = Math.min(low, !this.log[1] || line.low[k] > 0 ? line.low[k] : line.mean[k]); high = Math.max(high, line.high[k]);
    }
    this.range = padded(low, high, this.log[1]);
    if (this.within) this.range = [Math.max(this.range[0], this.within[0] || this.range[0]), Math.min(this.range[1], this.within[1])];
    for (const panel of this.panels) { this.stale.add(panel); if (visible.has(panel.place)) draw(panel); }
  }
}

// --- a panel -----------------------------------------------------------------------------------------------------------

const visible = new WeakSet();
const watcher = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    visible[isIntersecting ? "add" : "delete"](target);
    if (isIntersecting) draw(target.panel);
  }
}, {rootMargin: "300px"});
const sizer = new ResizeObserver(entries => {
  for (const {target} of entries) target.panel.plot?.setSize({width: target.clientWidth, height: target.clientHeight});
});

function draw(panel) {
  const {figure, told, place} = panel, [logX, logY] = figure.log;
  if (!figure.stale.delete(panel)) return;
  panel.plot?.destroy();
  const lines = told.lines.filter(line => figure.shown.has(line.name)), tables = [], series = [{}], bands = [];
  for (const line of lines) {
    const there = [...line.x.keys()].filter(k => (!logX || line.x[k] > 0) && (!logY || line.mean[k] > 0));
    let last = -Infinity;  // a chart has one point of a line at a place
    const x = there.map(k => (last = line.x[k] > last ? line.x[k] : last + Math.abs(last) * 1e-9));
    tables.push([x, ...["mean", "low", "high"].map(name => there.map(k => logY && line[name][k] <= 0 ? line.mean[k] : line[name][k]))]);
    const colour = seen(line.colour), at = series.length, edge = {width: 0, points: {show: false}, spanGaps: true};
    series.push({stroke: colour, width: 1.8, dash: DASHES[line.dash], spanGaps: true, points: {show: x.length < 15, size: 6, fill: colour}}, edge, edge);
    bands.push({series: [at + 2, at + 1], fill: `color-mix(in srgb, ${colour} 18%, transparent)`});
  }
  const style = getComputedStyle(document.documentElement), ink = name => style.getPropertyValue(name).trim();
  const xs = [...new Set(told.lines.flatMap(line => line.x))].sort((a, b) => a - b);
  const axis = {stroke: ink("--dim"), grid: {stroke: ink("--line"), width: 1}, ticks: {show: false}, font: "12px system-ui, sans-serif", values: (_, ticks) => ticks.map(short)};
  const logAxis = along => ({filter: (_, ticks) => ticks, splits: (plot, _, low, high) => logTicks(low, high, along(plot))});
  const sizes = (plot, _, low, high) => {  // numbers of machines are the ticks
    let last = -Infinity;
    const at = v => (plot.width - 70) * (logX ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
    return xs.filter(v => { const fits = v >= low && v <= high && at(v) - last > 30; if (fits) last = at(v); return fits; });
  };
  const options = {
    width: place.clientWidth, height: place.clientHeight, legend: {show: false}, focus: {alpha: 0.25},
    scales: {x: {time: false, distr: logX ? 3 : 1, range: (_, low, high) => padded(low, high, logX)}, y: {distr: logY ? 3 : 1, range: () => figure.range}},
    axes: [
      {...axis, size: 30, label: figure.x, labelSize: 18, labelGap: 0, labelFont: axis.font, ...(logX ? logAxis(plot => plot.width / NARROW) : {}), ...(figure.x === "machines M" ? {splits: sizes, filter: (_, ticks) => ticks} : {})},
      {...axis, size: 54, ...(logY ? logAxis(plot => plot.height / LOW) : {})},
    ],
    cursor: {points: {show: false}, y: false, drag: {x: true, y: false}},
    series, bands, hooks: {setCursor: [plot => ask(plot, panel, lines)]},
  };
  panel.plot = new uPlot(options, lines.length ? uPlot.join(tables) : [[]], place);
  panel.dot = make("div", panel.plot.over, {class: "dot", hidden: ""});
  panel.tip = make("div", panel.plot.over, {class: "tip", hidden: ""});
  panel.asked = null;
}

function ask(plot, panel, lines) {  // tell of the point that is nearest to the pointer
  const {left, top} = plot.cursor;
  let best = null, least = left < 0 ? 0 : NEAR ** 2;
  for (const [of, line] of lines.entries()) for (const k of line.x.keys()) {
    const x = plot.valToPos(line.x[k], "x"), y = plot.valToPos(line.mean[k], "y"), far = (x - left) ** 2 + (y - top) ** 2;
    if (far < least && x >= 0 && x <= plot.over.clientWidth) { least = far; best = {of, line, k, x, y}; }
  }
  if (!panel.tip || (best?.line === panel.asked?.line && best?.k === panel.asked?.k)) return;
  if (best?.of !== panel.asked?.of) {
    plot.setSeries(best ? 1 + 3 * best.of : null, {focus: Boolean(best)});
    if (best) for (const edge of [2, 3]) plot.series[edge + 3 * best.of].alpha = 1;  // its band stays, too
  }
  panel.asked = best;
  panel.dot.hidden = panel.tip.hidden = !best;
  if (!best) return;
  const {line, k, x, y} = best, {figure} = panel;
  panel.tip.textContent = line.notes[k] ?? `${line.name}${line.more}, at ${short(line.x[k])} ${figure.x}: ${short(line.mean[k])} (${short(line.low[k])} to ${short(line.high[k])})`;
  Object.assign(panel.dot.style, {left: `${x}px`, top: `${y}px`, background: seen(line.colour)});
  const [at, above] = beside(plot, lines, x, y, panel.tip.getBoundingClientRect());
  Object.assign(panel.tip.style, {left: `${at}px`, top: `${above}px`});
}

function beside(plot, lines, x, y, {width, height}) {  // where a box near a point hides the least of the lines
  const way = lines.flatMap(line => {
    const points = line.x.map((v, k) => [plot.valToPos(v, "x"), plot.valToPos(line.mean[k], "y")]);
    return points.slice(1).flatMap(([u, v], k) => [0.2, 0.4, 0.6, 0.8, 1].map(s => [s * u + (1 - s) * points[k][0], s * v + (1 - s) * points[k][1]]));
  });
  const far = 14;
  const places = [x - width / 2, x + far, x - width - far].flatMap(left => [y - height - far, y + far, y - height / 2].map(top => [left, top]));
  const boxes = places.map(([left, top]) => [Math.max(0, Math.min(left, plot.over.clientWidth - width)), Math.max(-30, Math.min(top, plot.over.clientHeight - height))]);
  const hidden = ([left, top]) => way.concat([[x, y]]).filter(([u, v]) => u > left - 4 && u < left + width + 4 && v > top - 4 && v < top + height + 4).length;
  return boxes.reduce((best, box) => hidden(box) < hidden(best) ? box : best);
}

// --- the page ----------------------------------------------------------------------------------------------------------

const asked = [...document.querySelectorAll("figure > script")].map(data => {
  const section = data.closest("section"), name = section.querySelector("h2").id, count = [...section.querySelectorAll("figure > script")].indexOf(data);
  return new Figure(data.parentNode, JSON.parse(data.textContent), count ? `${name}-${count + 1}` : name);
});
DARK.addEventListener("change", () => asked.forEach(figure => figure.redraw()));
for (const table of document.querySelectorAll("details > .wide > table")) {
  const name = table.closest("section").querySelector("h2").id, box = make("p", table.closest("details"), {class: "csv"});
  make("button", box, {type: "button"}, "Table as CSV").addEventListener("click", () => save([...table.rows].map(row => [...row.cells].map(cell => cell.textContent)), `${name}-table`));
}
// On paper there is nothing to click on: the tables of the pages are open there.
addEventListener("beforeprint", () => document.querySelectorAll("section > details").forEach(details => details.open = true));
