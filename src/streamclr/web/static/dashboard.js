// The dashboard: all runs, live.

import { $, bytes, clock, count, decimal, duration, el, pause, percent, perSecond, recall } from "./common.js";
import { remember, request, setText, short } from "./common.js";
import { LineChart, PointMap, SECONDS } from "./chart.js";

const COLUMNS = "step seen time loss score replaced rescored spread rate memory accuracy".split(" ");
const N_COLOURS = 8;
const MAX_POINTS = 4000; // per run; a page that stays open for weeks must not grow
const N_SHOWN_FIRST = 4; // runs in the charts before the user has chosen

const CHARTS = {
  loss: { title: "Loss", format: decimal },
  score: { title: "Mean score in the buffer", format: decimal, zero: true },
  replaced: { title: "Replaced in a step", format: percent, zero: true, most: 1 },
  rescored: { title: "Re-scored in a step", format: percent, zero: true, most: 1 },
  spread: { title: "Spread of projections", format: decimal, zero: true },
  rate: { title: "Images per second", format: short, zero: true },
  memory: { title: "Memory", format: bytes, zero: true },
  accuracy: { title: "kNN accuracy", format: percent, sparse: true, most: 1 },
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

const runs = new Map(); // by id, in the order of the server
const charts = {};
let axis = AXES[recall("axis")] ? recall("axis") : "seen";
let selected = recall("selected");

// ---- runs

async function listRuns() {
  const { runs: listed } = await request("/api/runs");
  const ids = new Set(listed.map((run) => run.id));
  for (const [id, run] of runs) if (!ids.has(id)) runs.delete(id), run.card.remove();
  const chosen = recall("shown");
  const lively = listed.filter((run) => run.state === "learning" || run.state === "waiting");
  const first = (lively.length ? lively : listed).slice(0, N_SHOWN_FIRST).map((run) => run.id);
  const isShown = (id) => (chosen && listed.some((run) => chosen.includes(run.id)) ? chosen : first).includes(id);
  for (const info of listed) {
    const run = runs.get(info.id) ?? newRun(info.id, isShown(info.id));
    Object.assign(run, info);
    drawRun(run);
  }
  $("#no-runs").hidden = listed.length > 0;
  document.body.classList.toggle("no-runs", !listed.length);
  if (!runs.has(selected)) selected = first[0] ?? null;
  drawSelection();
}

function newRun(id, shown) {
  const run = { id, shown, steps: empty(), status: {}, colour: `colour-${runs.size % N_COLOURS}` };
  run.card = runCard(run);
  runs.set(id, run);
  $("#runs").append(run.card);
  return run;
}

const empty = () => Object.fromEntries(COLUMNS.map((name) => [name, []]));

const TILES = { step: "step", seen: "images seen", rate: "per second", memory: "memory", loss: "loss" };

function runCard(run) {
  const box = el("input", { type: "checkbox", "data-pick": run.id });
  box.checked = run.shown;
  box.addEventListener("change", () => {
    run.shown = box.checked;
    remember("shown", [...runs.values()].filter((one) => one.shown).map((one) => one.id));
    drawRun(run);
    drawCharts();
  });
  const tiles = Object.entries(TILES).map(([name, title]) =>
    el("div", {}, el("dt", {}, title), el("dd", { "data-value": name }, "–"),
      name === "seen" ? el("dd", { class: "note", "data-value": "goal" }) : null));
  return el("article", { class: `run card ${run.colour}`, "data-run": run.id },
    el("div", { class: "head" },
      el("label", {}, box, el("i", { class: "swatch" }), el("span", { "data-value": "name" })),
      el("span", { class: "state", "data-value": "state" }),
      el("a", { class: "button", hidden: true }, "label")),
    el("p", { class: "note", "data-value": "source" }),
    el("dl", { class: "tiles" }, ...tiles),
    el("div", { class: "goal", hidden: true }, el("i")));
}

function drawRun(run) {
  const put = (name, text) => setText($(`[data-value="${name}"]`, run.card), text);
  const { status, steps } = run;
  const state = status.state ?? run.state;
  put("name", run.name ?? run.id);
  put("source", [run.source, run.policy].filter(Boolean).join(" · "));
  put("state", state ?? "");
  put("step", count(status.step ?? steps.step.at(-1)));
  put("seen", count(status.seen ?? steps.seen.at(-1)));
  put("goal", status.images ? `of ${count(status.images)}` : "");
  put("rate", perSecond(status.rate));
  put("memory", bytes(status.memory));
  put("loss", decimal(steps.loss.findLast((loss) => loss !== null)));
  run.card.dataset.state = state;
  run.card.classList.toggle("off", !run.shown);
  const goal = $(".goal", run.card);
  goal.hidden = !status.images || !run.shown;
  if (status.images) goal.firstChild.style.width = `${Math.min(100, (100 * status.seen) / status.images)}%`;
  const link = $("a", run.card);
  link.hidden = !run.can_label;
  link.href = `/label/${encodeURIComponent(run.id)}`;
  link.setAttribute("aria-label", `label images of ${run.name}`);
}

// ---- charts

for (const [name, options] of Object.entries(CHARTS)) {
  const figure = el("figure", { class: "card chart", "data-chart": name }, el("figcaption", {}, options.title));
  figure.hidden = name === "accuracy"; // most runs never measure it
  $("#charts").append(figure);
  charts[name] = new LineChart(figure, options);
}

function drawCharts() {
  const shown = [...runs.values()].filter((run) => run.shown);
  const xs = shown.map(AXES[axis].of);
  $("#legend").replaceChildren(...shown.map((run) =>
    el("li", { class: run.colour }, el("i", { class: "swatch" }), run.name)));
  for (const [name, chart] of Object.entries(charts)) {
    const series = shown.map((run, i) => ({ name: run.name, colour: run.colour, x: xs[i], y: run.steps[name] }));
    if (name === "accuracy") chart.figure.hidden = !series.some((one) => one.y.some((y) => y !== null));
    chart.update(series, AXES[axis]);
  }
}

// At most once a second: steps may come ten times as often, and drawing costs time on small devices.
let isDue = false;
function drawSoon(wait) {
  if (isDue) return;
  isDue = true;
  setTimeout(() => requestAnimationFrame(() => {
    isDue = false;
    drawCharts();
  }), wait);
}

for (const input of document.querySelectorAll("#axis input")) {
  input.checked = input.value === axis;
  input.addEventListener("change", () => {
    axis = input.value;
    remember("axis", axis);
    drawCharts();
  });
}

// ---- the selected run

function drawSelection() {
  const list = $("#selected");
  const options = [...runs.values()].map((run) => el("option", { value: run.id }, run.name));
  const isSame = options.length === list.length && options.every((one, i) => one.value === list[i].value);
  if (!isSame) list.replaceChildren(...options);
  list.value = selected ?? "";
  drawDetails();
  readWall();
}

$("#selected").addEventListener("change", (event) => {
  selected = event.target.value;
  remember("selected", selected);
  wall = null;
  drawDetails();
  drawWall("…");
  readWall();
});

const listOr = (items, nothing) => (items.length ? items : [el("li", { class: "note" }, nothing)]);

let drawn = "";
function drawDetails() {
  const known = JSON.stringify([selected, runs.get(selected)?.status]);
  if (known === drawn) return; // do not redraw what the user may be reading or marking
  drawn = known;
  const { status = {} } = runs.get(selected) ?? {};
  const { health = [], account, kept_out: keptOut, events = [], sources = {}, checkpoint } = status;
  $("#health").replaceChildren(...listOr(health.map(({ what, ok, text }) =>
    el("li", { class: ok ? "ok" : "not-ok", "data-health": what, "data-ok": String(ok) },
      el("b", { class: "verdict" }, ok ? "ok" : "not ok"), el("span", {}, el("b", {}, what), ` ${text}`))),
    "no data yet"));
  $("#account").replaceChildren(...accountRows(account, keptOut));
  $("#sources").replaceChildren(...listOr(Object.entries(sources).map(([name, { connected, lost }]) =>
    el("li", { class: connected ? "ok" : "not-ok" },
      el("b", { class: "verdict" }, connected ? "connected" : "not connected"),
      el("span", {}, name, lost ? `, lost ${lost === 1 ? "once" : `${count(lost)} times`}` : ""))),
    "no live sources"));
  const said = [...events].reverse().map(({ time, step, event }) =>
    el("li", {}, el("span", { class: "note" }, `${clock(time)} · step ${count(step)}`), el("span", {}, event)));
  if (checkpoint != null) said.push(el("li", { class: "note" }, `last checkpoint: step ${count(checkpoint)}`));
  $("#events").replaceChildren(...listOr(said, "no events yet"));
}

function accountRows(account, keptOut) {
  const row = (name, n, of, kind) => el("tr", { class: kind },
    el("th", { scope: "row" }, name), el("td", { "data-account": name.replace(/^[=+] /, "") }, count(n)),
    el("td", {}, of ? percent(n / of) : ""));
  const rows = [];
  if (account) {
    const { received, learned, passed = {}, rejected = {} } = account;
    const sum = (reasons) => Object.values(reasons).reduce((a, b) => a + b, 0);
    const most = (reasons) => Object.entries(reasons).sort((a, b) => b[1] - a[1]);
    rows.push(row("received", received), row("= learned from", learned, received));
    for (const [name, reasons] of [["+ passed over", passed], ["+ rejected", rejected]]) {
      rows.push(row(name, sum(reasons), received), ...most(reasons).map(([why, n]) => row(why, n, received, "part")));
    }
    const open = received - learned - sum(passed) - sum(rejected);
    if (open) rows.push(row(open > 0 ? "+ not decided yet" : "counted twice", Math.abs(open), received));
  }
  if (keptOut && Object.keys(keptOut).length) {
    rows.push(el("tr", { class: "group" }, el("th", { colspan: 3 }, "kept out of the buffer by the guards")));
    for (const [guard, n] of Object.entries(keptOut)) rows.push(row(guard, n, 0, "part"));
  }
  return [rows.length ? el("table", {}, el("tbody", {}, ...rows)) : el("p", { class: "note" }, "no data yet")];
}

// ---- the buffer

const ORDERS = {
  high: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
  low: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity),
  old: (a, b) => b.age - a.age || a.arrival - b.arrival,
  young: (a, b) => a.age - b.age || b.arrival - a.arrival,
  last: (a, b) => b.arrival - a.arrival,
  first: (a, b) => a.arrival - b.arrival,
};
const WALL_EVERY = 10; // seconds; the learner writes its buffer only while somebody watches

let wall = null; // {run, ...the server's answer, sheet: Image}
let isReading = false;
let isStale = false;
const map = new PointMap($("#map"), tellChosen);

async function readWall() {
  isStale = true;
  if (isReading || document.hidden) return;
  isReading = true;
  while (isStale && selected) {
    isStale = false;
    const run = selected;
    try {
      const answer = await request(`/api/runs/${encodeURIComponent(run)}/wall`);
      if (run !== selected) continue;
      if (!answer.picture) {
        if (!wall) drawWall("no picture of the buffer yet: it comes within a few seconds while the run is learning");
        setTimeout(readWall, 3000);
      } else if (wall?.run !== run || wall.version !== answer.version) {
        const sheet = new Image();
        sheet.src = answer.picture;
        await sheet.decode(); // before the old wall is replaced, to avoid flicker
        if (run !== selected) continue;
        wall = { run, sheet, ...answer };
        drawWall();
      }
    } catch (problem) {
      if (!wall) drawWall(problem.status ? problem.message : "could not load the picture of the buffer");
    }
  }
  isReading = false;
}

function cellPicture(index) {
  const { sheet, cell, columns } = wall;
  const canvas = el("canvas", { width: cell, height: cell, "aria-hidden": "true" });
  const [x, y] = [(index % columns) * cell, Math.floor(index / columns) * cell];
  canvas.getContext("2d").drawImage(sheet, x, y, cell, cell, 0, 0, cell, cell);
  return canvas;
}

function drawWall(message = null) {
  if (!wall) {
    $("#wall").replaceChildren(el("li", { class: "note" }, message ?? ""));
    $("#left").replaceChildren();
    setText($("#wall-note"), "");
    $("#fifths").hidden = true;
    map.update([]);
    return;
  }
  const cells = wall.cells.map((cell, index) => ({ ...cell, index }));
  const lowest = wall.lowest == null ? "" : `, lowest score kept ${decimal(wall.lowest)}`;
  setText($("#wall-note"), `${count(cells.length)} images at step ${count(wall.step)}${lowest}; age in steps`);
  $("#wall").classList.toggle("few", cells.length <= 100);
  $("#wall").replaceChildren(...cells.sort(ORDERS[$("#sort").value]).map(({ arrival, score, age, entered, index }) =>
    el("li", { class: entered ? "new" : null, title: `arrival ${count(arrival)}`, "data-arrival": arrival },
      cellPicture(index), el("b", {}, decimal(score)), el("span", {}, entered ? "new" : `age ${count(age)}`))));
  $("#left").replaceChildren(...listOr(wall.left.map(({ cell, arrival, age, why }) =>
    el("li", { "data-arrival": arrival }, cellPicture(cell),
      el("span", {}, why, el("br"), el("span", { class: "note" }, `arrival ${count(arrival)}, age ${count(age)}`)))),
    "no image left in the last step"));
  map.update(wall.cells.map(({ x, y, score, arrival }) => ({ x, y, score, key: arrival })));
  $("#fifths").hidden = !map.range;
  setText($("#lowest"), decimal(map.range?.[0]));
  setText($("#highest"), decimal(map.range?.[1]));
}

function tellChosen(i) {
  const { arrival, score, age } = wall?.cells[i] ?? {};
  const told = [`score ${decimal(score)}`, el("br"), `age ${count(age)} steps`, el("br"), `arrival ${count(arrival)}`];
  const nothing = el("span", { class: "note" }, "point at a dot, or use the arrow keys");
  $("#chosen").replaceChildren(...(i === null ? [nothing] : [cellPicture(i), el("span", {}, ...told)]));
}

$("#sort").value = recall("sort", "high");
$("#sort").addEventListener("change", (event) => {
  remember("sort", event.target.value);
  drawWall();
});
setInterval(readWall, 1000 * WALL_EVERY);
document.addEventListener("visibilitychange", readWall);

// ---- live

function tell(state, text) {
  $("#connection").dataset.state = state;
  setText($("#connection"), text);
}

function take(steps) {
  const run = runs.get(steps.run);
  if (!run) return void meet(steps.run);
  if (steps.reset) run.steps = empty();
  for (const name of COLUMNS) for (const value of steps[name]) run.steps[name].push(value);
  if (run.steps.step.length > MAX_POINTS) {
    // The older half loses every second step; the few with an accuracy stay.
    const { step, accuracy } = run.steps;
    const isKept = step.map((_, i) => i >= MAX_POINTS / 2 || i % 2 === 0 || accuracy[i] !== null);
    for (const name of COLUMNS) run.steps[name] = run.steps[name].filter((_, i) => isKept[i]);
  }
  drawRun(run);
  if (run.shown) drawSoon(steps.reset ? 0 : 1000);
}

// A run that is not listed has just started: connect again to get its history.
const met = new Set();
async function meet(id) {
  if (met.has(id)) return;
  met.add(id);
  await pause(1);
  live?.close();
  connect();
}

// A hidden page must not keep the learner writing its buffer.
let hiding;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (!document.hidden && live === null) connect();
  if (document.hidden) hiding = setTimeout(() => (live?.close(), (live = null), tell("wait", "paused")), 60_000);
});

let live;
async function connect(wait = 1) {
  try {
    await listRuns();
  } catch (problem) {
    tell("lost", problem.status === 401 ? problem.message : "connection lost, trying again");
    await pause(wait);
    return connect(Math.min(15, 2 * wait));
  }
  live?.close(); // two connections would deliver every step twice
  live = new EventSource("/api/live");
  live.onopen = () => {
    wait = 1;
    tell("live", "live");
    readWall();
  };
  live.onerror = () => {
    tell("lost", "connection lost, trying again");
    if (live?.readyState === EventSource.CLOSED) pause(wait).then(() => connect(Math.min(15, 2 * wait)));
  };
  live.addEventListener("steps", (event) => take(JSON.parse(event.data)));
  live.addEventListener("status", (event) => {
    const status = JSON.parse(event.data);
    const run = runs.get(status.run);
    if (!run) return void meet(status.run);
    run.status = status;
    drawRun(run);
    if (run.id === selected) drawDetails();
  });
  live.addEventListener("wall", (event) => JSON.parse(event.data).run === selected && readWall());
}

setInterval(() => document.hidden || listRuns().catch(() => {}), 30_000); // can_label changes without an event
connect();
