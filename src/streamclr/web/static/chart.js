// A line chart and a map of points, drawn as SVG.

import { el, svg } from "./common.js";

const LEFT = 52; // pixels for the labels of the y axis
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 24;
const NEAR = 16; // pixels beside the end of a line where the pointer still selects its last value

// About n round numbers between low and high; `units` are the round steps of a non-decimal scale such as time.
function ticks(low, high, n, units = null) {
  const least = (high - low) / n || 1;
  const power = 10 ** Math.floor(Math.log10(least));
  const steps = units && least < units.at(-1) ? units : [1, 2, 5, 10].map((x) => x * power);
  const step = steps.find((x) => x >= least * 0.999) ?? steps.at(-1);
  const marks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) marks.push(i * step);
  return marks;
}

const [MINUTE, HOUR, DAY] = [60, 3600, 86400];
export const SECONDS = [
  1, 2, 5, 10, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
  HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY,
];

const trimmed = (text) => text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");

const isKnown = (y) => y !== null && y !== undefined && Number.isFinite(y);

// Index of the value nearest to x among ascending xs.
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

// The lowest and highest point of each pixel column: extremes stay visible and the path stays short.
function thinned(points, width) {
  if (points.length <= 3 * width) return points;
  const kept = [];
  for (let i = 0; i < points.length; ) {
    const column = Math.floor(points[i].x);
    let low = points[i];
    let high = points[i];
    for (; i < points.length && Math.floor(points[i].x) === column; i++) {
      if (points[i].y < low.y) low = points[i];
      if (points[i].y > high.y) high = points[i];
    }
    kept.push(...(low === high ? [low] : low.x <= high.x ? [low, high] : [high, low]));
  }
  return kept;
}

export class LineChart {
  // figure: gets the drawing. format: y as text. zero: the axis starts at 0. most: the axis never ends above.
  // sparse: few values are known; they are joined over the gaps, and each gets a dot.
  constructor(figure, { title, format, zero = false, most = Infinity, sparse = false, height = 170 }) {
    Object.assign(this, { figure, title, format, zero, most, sparse, height, series: [], at: null });
    this.svg = svg("svg", { role: "img", tabindex: 0, height });
    this.tip = el("div", { class: "tip", "aria-live": "polite", hidden: true });
    this.empty = el("p", { class: "empty" }, "nothing to show yet");
    this.plot = el("div", { class: "plot" }, this.svg, this.empty, this.tip);
    figure.append(this.plot);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("focus", () => this.svg.matches(":focus-visible") && this.move("End"));
    this.svg.addEventListener("keydown", (event) => this.move(event.key) && event.preventDefault());
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // series: [{name, colour: class, x: [], y: [], low: [], high: []}], the last two for a band, if it has one; x: {format, units, tell: text of an x in the tip}
  update(series, x) {
    this.series = series
      .map((one) => ({ ...one, known: one.y.flatMap((y, i) => (isKnown(y) && isKnown(one.x[i]) ? [i] : [])) }))
      .filter((one) => one.known.length);
    this.x = x;
    this.draw();
  }

  get isEmpty() {
    return this.series.length === 0;
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.empty.hidden = !this.isEmpty;
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren();
    this.svg.setAttribute("aria-label", `${this.title}. ${this.summary()}`);
    if (this.isEmpty) return this.show(null);
    this.scale(width);
    this.axes(width);
    for (const one of this.series) this.line(one, width);
    this.cursor = svg("g", { class: "cursor" });
    this.svg.append(this.cursor);
    this.show(this.at);
  }

  summary() {
    if (this.isEmpty) return "Nothing to show yet";
    const last = this.series.map((one) => `${one.name} ${this.format(one.y[one.known.at(-1)])}`);
    return `Now: ${last.join(", ")}`;
  }

  scale(width) {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { x, y, low, high, known } of this.series) {
      x0 = Math.min(x0, x[known[0]]);
      x1 = Math.max(x1, x[known.at(-1)]);
      for (const i of known) {
        y0 = Math.min(y0, low?.[i] ?? y[i]);
        y1 = Math.max(y1, high?.[i] ?? y[i]);
      }
    }
    const around = x0 === x1 ? Math.abs(x0) / 2 || 1 : 0; // a single point is centred
    [x0, x1] = [x0 - around, x1 + around];
    const margin = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
    y0 = this.zero ? Math.min(0, y0) : y0 - margin;
    y1 = Math.max(Math.min(y1 + margin, this.most), y0 + 1e-9);
    this.toX = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    this.fromX = (pixel) => x0 + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    this.toY = (y) => TOP + ((y1 - y) / (y1 - y0)) * (this.height - TOP - BOTTOM);
    Object.assign(this, { x0, x1, y0, y1 });
  }

  axes(width) {
    const bottom = this.height - BOTTOM;
    const group = svg("g", { class: "axis", "aria-hidden": "true" });
    for (const y of ticks(this.y0, this.y1, 5)) {
      const at = this.toY(y).toFixed(1);
      group.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      group.append(svg("text", { x: LEFT - 8, y: at, dy: "0.32em", "text-anchor": "end" }, trimmed(this.format(y))));
    }
    for (const x of ticks(this.x0, this.x1, Math.max(2, width / 75), this.x.units)) {
      const at = this.toX(x);
      const anchor = at > width - RIGHT - 24 ? "end" : at < LEFT + 12 ? "start" : "middle";
      const shift = anchor === "end" ? Math.min(width - RIGHT, at + 18) : at;
      group.append(svg("text", { x: shift.toFixed(1), y: bottom + 17, "text-anchor": anchor }, this.x.format(x)));
    }
    this.svg.append(group);
  }

  line({ x, y, low, high, known, colour }, width) {
    const group = svg("g", { class: `series ${colour}` });
    if (low) group.append(this.band(x, low, high, known.filter((i) => isKnown(low[i]) && isKnown(high[i]))));
    const pieces = [];
    for (let k = 0; k < known.length; k++) {
      const joined = k > 0 && (this.sparse || known[k] === known[k - 1] + 1);
      if (!joined) pieces.push([]);
      pieces.at(-1).push({ x: this.toX(x[known[k]]), y: this.toY(y[known[k]]) });
    }
    let path = "";
    for (const piece of pieces) {
      for (const [i, p] of thinned(piece, width).entries()) {
        path += `${i ? "L" : "M"}${p.x.toFixed(1)} ${p.y.toFixed(1)}`;
      }
      const dotted = piece.length === 1 || (this.sparse && piece.length <= 60);
      if (dotted) group.append(...piece.map((p) => svg("circle", { cx: p.x.toFixed(1), cy: p.y.toFixed(1), r: 3 })));
    }
    group.prepend(svg("path", { d: path }));
    this.svg.append(group);
  }

  band(x, low, high, known) {
    const there = known.map((i) => `${this.toX(x[i]).toFixed(1)} ${this.toY(high[i]).toFixed(1)}`);
    const back = known.map((i) => `${this.toX(x[i]).toFixed(1)} ${this.toY(low[i]).toFixed(1)}`).reverse();
    return svg("polygon", { class: "band", points: [...there, ...back].join(" ") });
  }

  point(event) {
    if (this.isEmpty) return;
    this.show(this.fromX(event.clientX - this.svg.getBoundingClientRect().left));
  }

  // Arrow keys go from value to value of the series with the most values.
  move(key) {
    if (this.isEmpty || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(key)) return false;
    if (key === "Escape") return this.show(null), true;
    const longest = this.series.reduce((a, b) => (b.known.length > a.known.length ? b : a));
    const xs = longest.known.map((i) => longest.x[i]);
    const here = this.at === null ? xs.length - 1 : nearest(xs, this.at);
    // A key moves by at least one pixel, however dense the values are.
    const stride = Math.max(1, Math.round(xs.length / 100));
    const there = { ArrowLeft: here - stride, ArrowRight: here + stride, Home: 0, End: xs.length - 1 }[key];
    this.show(xs[Math.max(0, Math.min(xs.length - 1, there))]);
    return true;
  }

  show(x) {
    this.at = x;
    this.tip.hidden = x === null || this.isEmpty;
    this.cursor?.replaceChildren();
    if (this.tip.hidden) return;
    const rows = [];
    let at = null;
    for (const one of this.series) {
      const xs = one.known.map((i) => one.x[i]);
      const i = one.known[nearest(xs, x)];
      // A run that ended before this x or began after it has no value.
      if ((x < xs[0] || x > xs.at(-1)) && Math.abs(this.toX(one.x[i]) - this.toX(x)) > NEAR) continue;
      if (at === null || Math.abs(one.x[i] - x) < Math.abs(at - x)) at = one.x[i];
      const [cx, cy] = [this.toX(one.x[i]).toFixed(1), this.toY(one.y[i]).toFixed(1)];
      this.cursor.append(svg("circle", { cx, cy, r: 4, class: one.colour }));
      const name = el("span", { class: "name" }, one.name);
      rows.push(el("div", { class: `row ${one.colour}` }, el("i"), name, el("b", {}, this.format(one.y[i]))));
    }
    if (at === null) return void (this.tip.hidden = true);
    const pixel = this.toX(at);
    this.cursor.prepend(svg("line", { x1: pixel, x2: pixel, y1: TOP, y2: this.height - BOTTOM }));
    this.tip.replaceChildren(el("div", { class: "at" }, this.x.tell(at)), ...rows);
    const width = this.plot.clientWidth;
    const room = Math.max(0, width - this.tip.offsetWidth);
    const beside = pixel > width / 2 ? pixel - this.tip.offsetWidth - 12 : pixel + 12;
    this.tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
  }
}

const EDGE = 16; // pixels between the outermost points and the frame
const FIFTHS = 5;

// Points in the square -1..1; hover, touch or arrow keys select one and call `told(i)` (null: none).
export class PointMap {
  constructor(box, told) {
    Object.assign(this, { box, told, points: [], chosen: null });
    this.svg = svg("svg", { role: "img", tabindex: 0, "aria-label": "map of the buffer" });
    this.empty = el("p", { class: "empty" }, "no map yet");
    box.append(this.svg, this.empty);
    this.svg.addEventListener("pointermove", (event) => this.near(event));
    this.svg.addEventListener("pointerdown", (event) => this.near(event));
    this.svg.addEventListener("focus", () => this.chosen === null && this.choose(this.onMap()[0] ?? null));
    this.svg.addEventListener("keydown", (event) => {
      const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!direction) return;
      event.preventDefault();
      this.step(...direction);
    });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  // points: [{x, y, score, key}]; the chosen one stays chosen by its key while it is there.
  update(points) {
    const key = this.chosen === null ? null : this.points[this.chosen].key;
    this.points = points;
    const again = points.findIndex((point) => point.key === key);
    this.chosen = again < 0 ? null : again;
    const scores = points.map((point) => point.score).filter(isKnown).sort((a, b) => a - b);
    // Fifths of the points, not of the range, or a few high scores would leave all others in one colour.
    this.fifth = (score) => (isKnown(score) ? Math.floor((nearest(scores, score) / scores.length) * FIFTHS) : null);
    this.range = scores.length ? [scores[0], scores.at(-1)] : null;
    this.draw();
    this.told(this.chosen);
  }

  onMap() {
    return this.points.flatMap((point, i) => (isKnown(point.x) && isKnown(point.y) ? [i] : []));
  }

  draw() {
    const [width, height] = [this.box.clientWidth, this.box.clientHeight];
    if (!width || !height) return;
    this.place = ({ x, y }) => [
      EDGE + ((x + 1) / 2) * (width - 2 * EDGE),
      EDGE + ((1 - y) / 2) * (height - 2 * EDGE),
    ];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const known = this.onMap();
    this.empty.hidden = known.length > 0;
    this.dots = new Map();
    for (const i of known) {
      const [cx, cy] = this.place(this.points[i]).map((value) => value.toFixed(1));
      const fifth = this.fifth(this.points[i].score);
      this.dots.set(i, svg("circle", { cx, cy, r: 5, class: fifth === null ? "unknown" : `fifth-${fifth}` }));
    }
    this.svg.replaceChildren(...this.dots.values());
    this.mark();
  }

  mark() {
    for (const [i, dot] of this.dots ?? []) dot.classList.toggle("chosen", i === this.chosen);
    const dot = this.dots?.get(this.chosen);
    if (dot) this.svg.append(dot); // above its neighbours
  }

  choose(i) {
    if (i === this.chosen) return;
    this.chosen = i;
    this.mark();
    this.told(i);
  }

  near(event) {
    const frame = this.svg.getBoundingClientRect();
    const [px, py] = [event.clientX - frame.left, event.clientY - frame.top];
    let [best, least] = [null, event.pointerType === "touch" ? 40 : 20];
    for (const i of this.onMap()) {
      const [x, y] = this.place(this.points[i]);
      const away = Math.hypot(x - px, y - py);
      if (away < least) [best, least] = [i, away];
    }
    if (best !== null) this.choose(best);
  }

  step(dx, dy) {
    if (this.chosen === null) return this.choose(this.onMap()[0] ?? null);
    const [x, y] = this.place(this.points[this.chosen]);
    let [best, least] = [null, Infinity];
    for (const i of this.onMap()) {
      const [px, py] = this.place(this.points[i]);
      const along = (px - x) * dx + (py - y) * dy;
      const across = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
      if (i === this.chosen || along <= 0) continue;
      const away = along + 2 * across; // prefer points straight ahead over near ones
      if (away < least) [best, least] = [i, away];
    }
    if (best !== null) this.choose(best);
  }
}
