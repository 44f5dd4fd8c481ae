// The dashboard: all runs, live. One of them is selected, and shown first as an engineer needs it.

import { $, el, pause, recall, remember, request, setText } from "./common.js";
import { readWall, showBuffer } from "./buffer.js";
import { drawCurvesSoon, listCurves } from "./curves.js";
import { drawDetails } from "./details.js";
import { drawNow, setClock } from "./now.js";

const COLUMNS = "step seen time loss score replaced rescored spread rate memory accuracy".split(" ");
const N_COLOURS = 8;
const MAX_POINTS = 4000; // per run; a page that stays open for weeks must not grow

const runs = new Map(); // by id, in the order of the server
let nextColour = 0;
let selected = recall("selected");

// ---- runs

function list({ runs: listed, time }) {
  if (time) setClock(time);
  const ids = new Set(listed.map((run) => run.id));
  for (const id of runs.keys()) if (!ids.has(id)) runs.delete(id);
  for (const info of listed) {
    if (!runs.has(info.id)) runs.set(info.id, { steps: empty(), status: {}, colour: `colour-${nextColour++ % N_COLOURS}` });
    Object.assign(runs.get(info.id), info);
  }
  $("#no-runs").hidden = listed.length > 0;
  document.body.classList.toggle("no-runs", !listed.length);
  if (!runs.has(selected)) selected = usual(listed);
  drawTabs();
  listCurves([...runs.values()], selected);
  draw();
}

// The one that learns, else the last.
const usual = (listed) => (listed.find(({ state }) => state === "learning" || state === "waiting") ?? listed.at(-1))?.id ?? null;

const empty = () => Object.fromEntries(COLUMNS.map((name) => [name, []]));

function drawTabs() {
  const tabs = [...runs.values()].map((run) => {
    const tab = el("button", { "data-run": run.id, "data-state": run.state, "aria-pressed": String(run.id === selected) },
      el("i", { class: "dot" }), run.name, el("span", { class: "note" }, run.state));
    tab.addEventListener("click", () => select(run.id));
    return el("li", {}, tab);
  });
  const focused = document.activeElement?.dataset.run;
  $("#runs").replaceChildren(...tabs);
  if (focused) $(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  $("#runs").hidden = !runs.size;
}

function select(id) {
  selected = id;
  remember("selected", id);
  drawTabs();
  listCurves([...runs.values()], selected);
  draw();
}

function draw() {
  const run = runs.get(selected);
  drawNow(run);
  drawDetails(run);
  showBuffer(selected);
  document.title = run ? `${run.name} – StreamCLR` : "StreamCLR";
}

// ---- live

function tell(state, text) {
  $("#connection").dataset.state = state;
  setText($("#connection"), text);
}

function take(steps) {
  const run = runs.get(steps.run);
  if (!run) return; // it was deleted a moment ago
  if (steps.reset) run.steps = empty();
  for (const name of COLUMNS) for (const value of steps[name]) run.steps[name].push(value);
  if (run.steps.step.length > MAX_POINTS) {
    // The older half loses every second step; the few with an accuracy stay.
    const { step, accuracy } = run.steps;
    const isKept = step.map((_, i) => i >= MAX_POINTS / 2 || i % 2 === 0 || accuracy[i] !== null);
    for (const name of COLUMNS) run.steps[name] = run.steps[name].filter((_, i) => isKept[i]);
  }
  drawCurvesSoon(run.id, steps.reset ? 0 : 1000);
}

// A part of what is known of a run: its status, or what is seen now.
function put(name, { run: id, ...content }) {
  const run = runs.get(id);
  if (!run) return;
  run[name] = content;
  if (id === selected) drawNow(run), drawDetails(run);
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
    list(await request("/api/runs")); // an EventSource does not say why it fails
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
  const on = (name, act) => live.addEventListener(name, (event) => act(JSON.parse(event.data)));
  on("runs", list);
  on("steps", take);
  on("status", (status) => put("status", status));
  on("now", (now) => put("now", now));
  on("wall", ({ run }) => run === selected && readWall());
}

connect();
