// The curves of the runs, each with a sentence about what it says, drawn over each other.

import { $, bytes, count, decimal, duration, el, percent, recall, remember, short } from "./common.js";
import { LineChart, SECONDS } from "./chart.js";

const CHARTS = {
  loss: {
    title: "Loss", format: decimal,
    about: "How hard it is to tell two views of one frame from all other frames. It falls while the encoder learns.",
  },
  score: {
    title: "Mean score in the buffer", format: decimal, zero: true, rare: true,
    about: "How much the kept frames still teach. Near 0 the encoder has learned what they show.",
  },
  replaced: {
    title: "Replaced in a step", format: percent, zero: true, most: 1,
    about: "The share of the buffer that new frames took over. Near 0 for hours: the scene does not change.",
  },
  rescored: {
    title: "Re-scored in a step", format: percent, zero: true, most: 1, rare: true,
    about: "The share of older frames whose score was computed again. Fewer cost less time.",
  },
  spread: {
    title: "Spread of projections", format: decimal, zero: true,
    about: "How different frames look to the encoder. Near 0 it has collapsed: all frames look the same to it.",
  },
  rate: {
    title: "Images per second", format: short, zero: true,
    about: "How fast it learns, pauses included. Below the camera's rate, frames are passed over.",
  },
  memory: {
    title: "Memory", format: bytes, zero: true,
    about: "Of the process that learns. It stays level after the first steps.",
  },
  accuracy: {
    title: "kNN accuracy", format: percent, sparse: true, rare: true, most: 1,
    about: "Of a simple classifier with the source's own labels, which the encoder never sees. It rises as the encoder improves.",
  },
};

const AXES = {
  seen: { of: (run) => run.steps.seen, format: short, tell: (x) => `${count(x)} images` },
  // Since the first step, so that runs of different days can be compared.
  time: {
    of: (run) => run.steps.time.map((time) => time - run.steps.time[0]),
    format: duration,
    units: SECONDS,
    tell: (x) => `after ${duration(x)}`,
  },
};

const charts = {};
let axis = AXES[recall("axis")] ? recall("axis") : "seen";
let runs = [];

for (const [name, { about, rare, ...options }] of Object.entries(CHARTS)) {
  const figure = el("figure", { class: "card chart", "data-chart": name }, el("figcaption", {}, options.title));
  $("#charts").append(figure);
  charts[name] = new LineChart(figure, options);
  figure.append(el("p", { class: "note explain" }, about));
  figure.hidden = Boolean(rare);
}

// chosen: the ids that the user has ticked, or null; then the selected run alone is drawn.
let chosen = recall("shown");
let selected = null;
const isShown = (run) => (chosen?.some((id) => runs.some((one) => one.id === id)) ? chosen.includes(run.id) : run.id === selected);

export function listCurves(listed, selectedId) {
  runs = listed;
  selected = selectedId;
  const items = runs.map((run) => {
    const box = el("input", { type: "checkbox", "data-pick": run.id });
    box.checked = isShown(run);
    box.addEventListener("change", () => {
      chosen = runs.filter((one) => (one.id === run.id ? box.checked : isShown(one))).map((one) => one.id);
      remember("shown", chosen);
      drawCurves();
    });
    return el("li", { class: run.colour }, el("label", {}, box, el("i", { class: "swatch" }), run.name));
  });
  $("#legend").replaceChildren(...items);
  $("#legend").hidden = runs.length < 2;
  drawCurves();
}

export function drawCurves() {
  const shown = runs.filter(isShown);
  const xs = shown.map(AXES[axis].of);
  for (const [name, chart] of Object.entries(charts)) {
    const series = shown.map((run, i) => ({ name: run.name, colour: run.colour, x: xs[i], y: run.steps[name] }));
    // Most runs never measure the accuracy, and not every policy scores.
    if (CHARTS[name].rare) chart.figure.hidden = !series.some((one) => one.y.some((y) => y !== null));
    chart.update(series, AXES[axis]);
  }
}

// At most once a second: steps may come ten times as often, and drawing costs time on small devices.
let isDue = false;
export function drawCurvesSoon(id, wait) {
  if (isDue || !runs.some((run) => run.id === id && isShown(run))) return;
  isDue = true;
  setTimeout(() => requestAnimationFrame(() => {
    isDue = false;
    drawCurves();
  }), wait);
}

for (const input of document.querySelectorAll("#axis input")) {
  input.checked = input.value === axis;
  input.addEventListener("change", () => {
    axis = input.value;
    remember("axis", axis);
    drawCurves();
  });
}
