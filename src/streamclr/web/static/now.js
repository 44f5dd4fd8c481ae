// What an engineer looks at: what the camera sees, what changed, how good the classifier is, and the labels.

import { $, bytes, clock, count, duration, el, listOr, percent, perSecond, setText } from "./common.js";

const LIVE_SECONDS = 10; // a frame that is not older counts as what is seen now
const N_CHANGES = 60;
const N_BARS = 8;
const PIXELATED = 160; // pixels; pictures up to this width are enlarged with visible pixels, not blurred

let skew = 0; // seconds that the server's clock is ahead of this one
export const setClock = (time) => (skew = time - Date.now() / 1000);

let run = null;
export function drawNow(selected) {
  run = selected;
  drawSummary();
  const now = run?.now ?? {};
  drawFrames(now.frames ?? []);
  drawChanges(now.changes ?? [], run?.status.events ?? [], (now.frames ?? []).length > 1);
  drawCounts(now.counts);
  drawClassifier(now.classifier);
  drawLabels(now.labels, now.classifier);
}

// Only what has changed is drawn again: somebody may be reading or marking it.
const drawn = new Map();
function isSame(what, ...facts) {
  const known = JSON.stringify([run?.id, ...facts]);
  if (drawn.get(what) === known) return true;
  drawn.set(what, known);
  return false;
}

// ---- the line at the top

const STATES = {
  learning: "",
  waiting: "No frames to learn from at the moment: the run waits.",
  finished: "The run is finished.",
  stopped: "The run has stopped. The same command starts it again where it was.",
};

function drawSummary() {
  const put = (name, text) => setText($(`[data-value="${name}"]`), text);
  const { status = {}, steps } = run ?? {};
  const state = status.state ?? run?.state;
  put("state", state ?? "–");
  put("seen", count(status.seen ?? steps?.seen.at(-1)));
  put("goal", status.images ? `of ${count(status.images)}` : "");
  put("rate", perSecond(status.rate));
  put("memory", bytes(status.memory));
  put("source", [run?.source, run?.policy && `policy ${run.policy}`, status.step && `step ${count(status.step)}`].filter(Boolean).join(" · "));
  $("#goal").hidden = !status.images;
  if (status.images) $("#goal").firstChild.style.width = `${Math.min(100, (100 * status.seen) / status.images)}%`;
  const troubles = (status.health ?? []).filter(({ ok }) => !ok).map(({ text }) => `${text}.`);
  const lively = state === "learning" && !troubles.length ? ["All is well."] : [];
  const said = run ? [...troubles, ...lively, STATES[state]].filter(Boolean).join(" ") : "";
  setText($("#say"), said);
  $("#summary").dataset.state = state ?? "";
  $("#summary").dataset.ok = String(!troubles.length && state !== "stopped");
}

// ---- the newest frames

const figures = new Map(); // by run and source

function drawFrames(frames) {
  const shown = frames.map((frame) => [`${run.id}/${frame.name}`, frame]);
  for (const key of figures.keys()) if (!shown.some(([one]) => one === key)) figures.delete(key);
  for (const [key, frame] of shown) {
    if (!figures.has(key)) figures.set(key, newFigure());
    fill(figures.get(key), frame);
  }
  const items = [...figures.values()].map(({ item }) => item);
  const list = $("#frames");
  const why = run?.status.state === "learning" ? "…" : "No frame was kept: one comes while the run learns and this page is open.";
  if (!items.length) list.replaceChildren(el("li", { class: "note" }, run ? why : ""));
  else if (items.length !== list.children.length || items.some((item, i) => item !== list.children[i])) list.replaceChildren(...items);
  list.dataset.n = items.length;
}

function newFigure() {
  const parts = {
    image: el("img", { alt: "", draggable: "false" }),
    name: el("b", { class: "class" }), sure: el("span", { class: "sure" }),
    source: el("span", { class: "source" }), age: el("span", { class: "age" }),
  };
  const item = el("li", {}, parts.image,
    el("p", { class: "caption" }, parts.name, parts.sure), el("p", { class: "note" }, parts.source, parts.age));
  return { item, ...parts, picture: "", time: 0 };
}

async function fill(figure, frame) {
  figure.time = frame.time;
  figure.item.dataset.source = frame.name;
  setText(figure.source, frame.name);
  setText(figure.name, frame.class ?? (run.predicts ? "no class yet" : ""));
  setText(figure.sure, frame.class === null ? "" : percent(frame.probability));
  figure.item.classList.toggle("unknown", frame.class === null);
  figure.image.alt = frame.class === null ? `newest frame of ${frame.name}` : `newest frame of ${frame.name}: ${frame.class}`;
  tellAge(figure);
  if (figure.picture === frame.picture) return;
  figure.picture = frame.picture;
  const path = `/api/runs/${encodeURIComponent(run.id)}/frames/${frame.picture}`;
  const loaded = new Image();
  loaded.src = path;
  await loaded.decode().catch(() => {}); // before the old one is replaced, to avoid flicker
  if (figure.picture !== frame.picture || !loaded.naturalWidth) return;
  figure.image.src = path;
  figure.image.classList.toggle("pixels", frame.side <= PIXELATED);
}

function tellAge(figure) {
  const age = Math.max(0, Date.now() / 1000 + skew - figure.time);
  const isLive = age < LIVE_SECONDS;
  figure.item.classList.toggle("live", isLive);
  setText(figure.age, isLive ? "live" : age < 86_400 ? `${duration(Math.round(age))} ago` : clock(1000 * figure.time));
}

setInterval(() => document.hidden || [...figures.values()].forEach(tellAge), 1000);

// ---- what changed

function drawChanges(changes, events, isMany) {
  if (isSame("changes", changes, events, isMany)) return;
  const seen = changes.map(({ time, source, class: name, before }) => ({
    when: 1000 * time, kind: "class",
    text: [isMany || source ? `${source ?? ""}: ` : "", el("b", {}, name), before ? `, before ${before}` : ""],
  }));
  const told = events.filter(({ kind }, i) => kind !== "tried" || !events.slice(i + 1).some((one) => one.kind === "tried"))
    .map(({ time, kind, plain }) => ({ when: Date.parse(time), kind, text: [plain] }));
  const all = [...seen, ...told].sort((a, b) => b.when - a.when).slice(0, N_CHANGES);
  $("#changes").replaceChildren(...listOr(all.map(({ when, kind, text }) =>
    el("li", { "data-kind": kind }, el("span", { class: "note" }, Number.isNaN(when) ? "" : clock(when)), el("span", {}, ...text))),
    "Nothing yet."));
}

// ---- bars: class counts, accuracy by class

function bars(rows) {
  return el("table", { class: "bars" }, el("tbody", {}, ...rows.map(({ name, share, told, note }) =>
    el("tr", {}, el("th", { scope: "row" }, name),
      el("td", { class: "bar-cell", "aria-hidden": "true" }, bar(share)),
      el("td", {}, told, note ? el("span", { class: "note" }, ` ${note}`) : null)))));
}

function bar(share) {
  const fill = el("i");
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return el("span", { class: "track" }, fill);
}

function drawCounts(counts) {
  if (isSame("counts", counts, run?.predicts)) return;
  if (!counts) {
    setText($("#counts-title"), "Seen");
    const how = run?.predicts ? "No frame has a class yet." : ["Frames get no class: start the run with ", el("code", {}, "--predict"), "."];
    $("#counts").replaceChildren(el("p", { class: "note" }, ...(run ? [how].flat() : [])));
    return;
  }
  setText($("#counts-title"), counts.minutes < 2 ? "Seen in the last minute" : `Seen in the last ${counts.minutes} minutes`);
  const most = counts.classes.slice(0, N_BARS);
  const others = counts.n - most.reduce((sum, [, n]) => sum + n, 0);
  const rows = most.map(([name, n]) => ({ name, share: n / counts.n, told: percent(n / counts.n), note: count(n) }));
  if (others) rows.push({ name: "others", share: others / counts.n, told: percent(others / counts.n), note: count(others) });
  $("#counts").replaceChildren(bars(rows), el("p", { class: "note" }, `${count(counts.n)} frames, until ${clock(1000 * counts.until)}`));
}

// ---- the classifier and the labels

function drawClassifier(one) {
  if (isSame("classifier", one)) return;
  if (!one) {
    const how = run?.can_label ? "No classifier yet. It is trained when there are labels of two classes." : "No classifier yet.";
    $("#classifier").replaceChildren(el("p", { class: "note" }, run ? how : ""));
    return;
  }
  const { accuracy, low, high, held_back: n, by_class: byClass } = one;
  const about = [one.name, one.n_labels == null ? "" : `trained on ${count(one.n_labels)} labels`].filter(Boolean).join(", ");
  const measured = accuracy == null ? "Not measured yet: no label was held back."
    : n ? `${count(Math.round(accuracy * n))} of ${count(n)} labels held back are right, so ${percent(low)} to ${percent(high)} of all frames (95 % interval).`
    : `Measured: ${one.measured}.`;
  const rows = byClass.map(([name, right, of]) => ({ name, share: right / of, told: `${right} of ${of}` }));
  $("#classifier").replaceChildren(
    el("p", { class: "figure" }, el("b", {}, percent(accuracy)), el("span", {}, about)),
    ...(one.pinned ? [el("p", { class: "pinned" }, el("b", {}, "pinned"), " Nothing takes its place until ", el("code", {}, "streamclr unpin"), ".")] : []),
    el("p", { class: "note" }, measured),
    ...(rows.length ? [bars(rows)] : []));
}

function drawLabels(labels, classifier) {
  if (isSame("labels", labels, classifier?.name, run?.can_label)) return;
  const link = run?.can_label ? el("a", { class: "button", href: `/label/${encodeURIComponent(run.id)}`, "aria-label": `label images of ${run.name}` }, "give labels") : null;
  if (!labels) {
    const how = !run ? "" : run.can_label ? "None yet. The page asks about the frames that tell most." : "This run keeps no questions for a person.";
    $("#labels").replaceChildren(el("p", { class: "note" }, how), ...(link ? [link] : []));
    return;
  }
  const { given, unsure, skipped, open, used, by_class: byClass } = labels;
  const most = Math.max(1, ...byClass.map(([, n]) => n));
  const useful = used == null ? "" : used >= given ? "The classifier in use knows all of them." : `The classifier in use knows ${count(used)} of them; the others count in the next one.`;
  const left = open ? `${count(open)} more questions are open, the most useful first.` : "No question is open.";
  const put = [unsure ? `${count(unsure)} not sure` : "", skipped ? `${count(skipped)} skipped` : ""].filter(Boolean).join(", ");
  $("#labels").replaceChildren(
    el("p", { class: "figure" }, el("b", {}, count(given)), el("span", {}, given === 1 ? "label given" : "labels given")),
    el("p", { class: "note" }, [useful, left, put && `${put}.`].filter(Boolean).join(" ")),
    ...(byClass.length ? [bars(byClass.slice(0, N_BARS).map(([name, n]) => ({ name, share: n / most, told: count(n) })))] : []),
    ...(link ? [link] : []));
}
