// The buffer as a wall of pictures, the map of its features, and what just left it.

import { $, count, decimal, el, listOr, recall, remember, request, setText } from "./common.js";
import { PointMap } from "./chart.js";

const ORDERS = {
  high: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
  low: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity),
  old: (a, b) => b.age - a.age || a.arrival - b.arrival,
  young: (a, b) => a.age - b.age || b.arrival - a.arrival,
  last: (a, b) => b.arrival - a.arrival,
  first: (a, b) => a.arrival - b.arrival,
};
const WALL_EVERY = 10; // seconds; the learner writes its buffer only while somebody watches

let selected = null; // id of the run whose buffer is shown
let wall = null; // {run, ...the server's answer, sheet: Image}
let isReading = false;
let isStale = false;
const map = new PointMap($("#map"), tellChosen);

export function showBuffer(id) {
  if (id === selected) return;
  selected = id;
  wall = null;
  drawWall(id === null ? "" : "…");
  readWall();
}

export async function readWall() {
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
