// The labelling page: a picture, its look-alikes, a key.

import { $, count, el, Outbox, pause, percent, picture, Pictures, request, setText, uuid } from "./common.js";
import { LineChart } from "./chart.js";

const RUN = decodeURIComponent(location.pathname.split("/").filter(Boolean).at(-1));
const BASE = `/api/runs/${encodeURIComponent(RUN)}`;

// The name of this page: its requests begin with it, so that several people get different pictures and undo their own
// answers. A reload keeps it.
const PAGE = (sessionStorage.page ??= uuid().replaceAll("-", "").slice(0, 12));
const token = () => `${PAGE}-${uuid()}`;

let state = null; // as last sent by the server
let current = null; // the task shown; only the user changes it, or a key press could hit another picture
let alike = []; // its look-alikes
let chosen = new Set(); // ids of the look-alikes that get the same label
let cursor = 0; // index of the look-alike that the arrow keys are on
let isRenaming = false; // the next class that is picked gets a new name
let undoing = null; // the undo of an answer from elsewhere; the new state says what to show
let isOffered = false; // whether the field for the first class was opened; only once
let trouble = null; // why the state could not be read
const pictures = new Pictures();
const done = []; // tasks answered on this page, for undo

const say = (text) => setText($("#status"), text);
const nameOf = (id) => state?.classes.find((one) => one.id === id)?.name ?? `class ${id}`;

// ---- answers

const outbox = new Outbox(BASE, `?page=${PAGE}`, {
  changed: drawSaved,
  taken(next, { path, body }) {
    if (path === "/labels/undo" && body.request === undoing) current = null;
    take(next);
    if (path === "/classes") say(`class ${body.name} added`);
  },
  refused(problem, { path, body }) {
    say(`not saved: ${problem.message}`);
    done.splice(0, done.length, ...done.filter((task) => task.id !== body.tasks?.[0]));
    if (path.startsWith("/labels")) show(null);
    read();
  },
});

function answer(kind, id = null) {
  if (!current) return;
  if (!pictures.has(current.picture) && kind !== "skip") return say("wait for the picture");
  const tasks = [current.id];
  if (kind === "label") tasks.push(...alike.map((one) => one.id).filter((one) => chosen.has(one)));
  const more = tasks.length > 1 ? ` and ${tasks.length - 1} look-alike${tasks.length > 2 ? "s" : ""}` : "";
  say({ label: `${nameOf(id)}: this picture${more}`, none: "none of these", skip: "skipped", unsure: "not sure" }[kind]);
  const { body } = outbox.add("POST", "/labels", { request: token(), kind, tasks, class: id });
  done.push({ ...current, request: body.request });
  show(upcoming()[0] ?? null);
}

function undo() {
  const hasAnswer = outbox.entries.some(({ path }) => path === "/labels");
  if (!hasAnswer && !state?.last) return say("nothing to undo");
  say("last answer undone");
  const task = done.pop(); // `of` names it: somebody else may have answered since
  const { body } = outbox.add("POST", "/labels/undo", { request: token(), of: task?.request ?? null });
  if (task) show(task);
  else undoing = body.request;
}

const upcoming = () => {
  const answered = outbox.tasks();
  return (state?.next ?? []).filter((task) => !answered.has(task.id));
};

// ---- state

function take(next) {
  state = next;
  trouble = null;
  if (current) {
    current.guess = (state.next.find((task) => task.id === current.id) ?? current).guess;
    drawGuess();
  } else show(upcoming()[0] ?? null);
  for (const task of state.next) pictures.get(task.picture);
  for (const task of upcoming().slice(0, 2)) for (const one of task.alike) pictures.get(one.picture);
  drawClasses();
  drawStanding();
  drawSaved();
  if (!$("#review").hidden) readGiven();
  if (state.ready && !state.classes.length && outbox.isEmpty && !isOffered) {
    isOffered = true;
    open("add");
  }
}

async function read() {
  const { version } = outbox;
  try {
    const next = await request(`${BASE}/labels?page=${PAGE}`);
    if (outbox.version === version) take(next); // else an answer sent meanwhile brings a newer state
  } catch (problem) {
    trouble = problem.again && problem.status !== 401 ? "connection lost, trying again" : problem.message;
    if (!state) setText($("#message"), trouble);
    drawSaved();
  }
}

async function follow() {
  for (;;) {
    if (!document.hidden && (outbox.isEmpty || !state)) await read();
    const isSoon = !state?.ready || state.accuracy.training || trouble || (!current && state.progress.left);
    const shown = new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
    await Promise.race([pause(isSoon ? 2 : 10), shown]);
  }
}

// ---- the picture

function show(task) {
  const answered = outbox.tasks();
  current = task;
  alike = (task?.alike ?? []).filter((one) => one.id !== task.id && !answered.has(one.id));
  chosen = new Set();
  cursor = 0;
  drawPicture();
  drawGuess();
  drawAlike();
  drawMessage();
}

function drawPicture() {
  const image = current ? pictures.get(current.picture) : el("img", { alt: "", hidden: true });
  $("#picture")?.removeAttribute("id");
  image.id = "picture";
  image.alt = current ? `picture to label, arrival ${count(current.arrival)}` : "";
  image.dataset.task = current?.id ?? "";
  $("#stage").replaceChildren(image);
  $("#stage").hidden = !current;
}

// A probability is sent once enough labels were held back to tell how certain a guess may be.
const guessText = (guess) =>
  !guess ? "" : nameOf(guess.class) + (guess.probability === null ? "" : `, ${percent(guess.probability)}`);

function drawGuess() {
  const guess = current?.guess;
  const own = current?.given; // a picture that is reviewed
  setText($("#guess"), !current ? "" : own ? `labelled: ${own}` : guess ? `guess: ${guessText(guess)}` : "no guess yet");
  for (const button of $("#classes").children) {
    button.classList.toggle("guessed", button.dataset.class === String(guess?.class));
  }
}

function drawMessage() {
  const box = $("#message");
  const isOver = state?.ready && !current && state.progress.left === 0 && outbox.isEmpty;
  box.classList.toggle("over", Boolean(isOver));
  if (isOver) {
    box.replaceChildren(
      el("p", {}, el("b", {}, state.progress.asked ? "All pictures are labelled." : "There are no pictures to label.")),
      el("p", {}, "Next, with RUN the directory of this run:"),
      el("p", {}, el("code", {}, "streamclr predict RUN --source folder:DIR"), " classifies images;"),
      el("p", {}, el("code", {}, "streamclr label export RUN FILE"), " writes the labels to a file."));
  } else {
    const waiting = state?.ready && !current ? "waiting for the next pictures…" : "";
    setText(box, state ? state.message || waiting : trouble ?? "…");
  }
}

// ---- look-alikes

function drawAlike() {
  $("#alike").replaceChildren(...alike.map(({ id, picture: path, guess }, i) => {
    const name = `look-alike ${i + 1} of ${alike.length}${guess ? `, guess ${guessText(guess)}` : ""}`;
    return el("button", { type: "button", "data-task": id, "aria-label": name, onclick: () => toggle(i) },
      picture(path), el("span", {}, guessText(guess) || "–"));
  }));
  if (!alike.length) $("#alike").append(el("p", { class: "note" }, "none"));
  drawChosen();
}

function drawChosen() {
  for (const [i, { id }] of alike.entries()) {
    const button = $("#alike").children[i];
    button.setAttribute("aria-pressed", String(chosen.has(id)));
    button.tabIndex = i === cursor ? 0 : -1;
  }
  const isAll = alike.length > 0 && chosen.size === alike.length;
  setText($("#group"), isAll ? "select none" : "select all");
  $('[data-action="group"]').disabled = !alike.length;
}

function toggle(i) {
  if (!alike[i]) return;
  cursor = i;
  if (!chosen.delete(alike[i].id)) chosen.add(alike[i].id);
  drawChosen();
}

function toggleAll() {
  if (!alike.length) return;
  chosen = new Set(chosen.size === alike.length ? [] : alike.map((one) => one.id));
  drawChosen();
  say(chosen.size ? `${chosen.size} look-alike${chosen.size > 1 ? "s" : ""} selected` : "no look-alike selected");
}

function moveCursor(key) {
  const buttons = [...$("#alike").querySelectorAll("button")];
  if (!buttons.length) return;
  const columns = buttons.filter((one) => one.offsetTop === buttons[0].offsetTop).length;
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key];
  // The first press only shows where the cursor is.
  const to = $("#alike").contains(document.activeElement) ? cursor + by : cursor;
  if (to >= 0 && to < buttons.length) cursor = to;
  drawChosen();
  buttons[cursor].focus();
}

// ---- classes

function drawClasses() {
  $("#no-class").hidden = state.classes.length > 0;
  const shown = JSON.stringify(state.classes.map(({ id, name }) => [id, name]));
  if (shown !== drawClasses.shown) {
    drawClasses.shown = shown; // rebuilt only on change, so that a button keeps the focus
    $("#classes").replaceChildren(...state.classes.map(({ id, name }, i) => {
      const key = i < 10 ? String((i + 1) % 10) : null;
      return el("button", { type: "button", "data-class": id, "aria-keyshortcuts": key, onclick: () => pick(id) },
        el("kbd", { class: key ? null : "none" }, key ?? ""),
        el("span", { class: "name" }, name, el("small", { class: "right" })), el("span", { class: "n" }));
    }));
  }
  for (const [i, { n, tested, right }] of state.classes.entries()) {
    const button = $("#classes").children[i];
    setText($(".n", button), count(n));
    setText($(".right", button), tested ? `${percent(right / tested)} right` : "");
    button.title = tested ? `${count(right)} of ${count(tested)} held-back labels of this class are right` : "";
  }
  drawGuess();
}

function pick(id) {
  if (!isRenaming) {
    close();
    return answer("label", id);
  }
  open("rename");
  $("#rename").dataset.of = id;
  setText($("#rename-title"), `new name of ${nameOf(id)}`);
  $("#rename-class").value = nameOf(id);
  $("#rename-class").select();
}

function open(name) {
  for (const form of document.querySelectorAll(".field")) form.hidden = form.id !== name;
  const input = $(`#${name}-class`);
  input.value = "";
  if (name === "find") {
    setText($("#find-title"), isRenaming ? "rename which class?" : "label as");
    drawFound();
  }
  input.focus();
}

function close() {
  isRenaming = false;
  document.body.classList.remove("renaming");
  for (const form of document.querySelectorAll(".field")) form.hidden = true;
  document.activeElement?.matches("input") && document.activeElement.blur();
}

let found = [];
let at = 0;

function drawFound(to = 0) {
  const part = $("#find-class").value.trim().toLowerCase();
  const where = ({ name }) => name.toLowerCase().indexOf(part);
  // Names that begin with the text come first.
  found = (state?.classes ?? []).filter((one) => where(one) >= 0).sort((a, b) => (where(a) > 0) - (where(b) > 0));
  at = Math.max(0, Math.min(found.length - 1, to));
  $("#found").replaceChildren(...found.map(({ id, name }, i) =>
    el("li", { role: "option", id: `found-${i}`, "aria-selected": String(i === at), onclick: () => pick(id) }, name)));
  if (!found.length) $("#found").append(el("li", { class: "note" }, "no class with this name"));
  $("#find-class").setAttribute("aria-activedescendant", found.length ? `found-${at}` : "");
  $("#found").children[at]?.scrollIntoView({ block: "nearest" });
}

$("#find-class").addEventListener("input", () => drawFound());
$("#find-class").addEventListener("keydown", (event) => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  drawFound(at + by);
});

const SUBMIT = {
  find: () => found[at] && pick(found[at].id),
  add: (name) => name && (outbox.add("POST", "/classes", { request: token(), name }), close()),
  rename: (name) => name && (outbox.add("PUT", `/classes/${$("#rename").dataset.of}`, { name }), close()),
};
for (const [name, submit] of Object.entries(SUBMIT)) {
  $(`#${name}`).addEventListener("submit", (event) => {
    event.preventDefault();
    submit($("input", event.target).value.trim());
  });
}

// ---- review of given labels

let given = []; // as last sent by the server

async function readGiven() {
  const seen = `${state.saved} ${state.accuracy.training}`; // the classifier doubts others after each training
  if (seen === readGiven.seen) return;
  readGiven.seen = seen;
  try {
    given = (await request(`${BASE}/answers`)).answers;
  } catch (problem) {
    readGiven.seen = null;
    return say(`the labels cannot be shown: ${problem.message}`);
  }
  drawGiven();
}

const givenText = (one) => (one.kind === "label" ? nameOf(one.class) : "not sure");

function drawGiven() {
  const wanted = $("#review-class").value;
  const names = ["all", ...new Set(given.map(givenText))];
  $("#review-class").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  $("#review-class").value = names.includes(wanted) ? wanted : "all";
  const shown = given.filter((one) => $("#review-class").value === "all" || givenText(one) === $("#review-class").value);
  $("#given").replaceChildren(...shown.map((one) => {
    const doubt = one.doubt === null ? "" : ` · ${nameOf(one.doubt)}?`;
    const name = `labelled ${givenText(one)}${doubt && `, the classifier says ${nameOf(one.doubt)}`}`;
    return el("button", { type: "button", "data-task": one.id, class: doubt && "doubt", "aria-label": name,
      onclick: () => correct(one) }, picture(one.picture), el("span", {}, givenText(one) + doubt));
  }));
  if (!shown.length) $("#given").append(el("p", { class: "note" }, "no label yet"));
}

function correct(one) {
  show({ ...one, alike: [], guess: null, given: givenText(one) });
  say("press the key of the right class");
  $("#picture").scrollIntoView({ block: "nearest" });
}

$("#review-class").addEventListener("change", drawGiven);

// ---- progress and accuracy

const CURVE = { title: "accuracy over labels", format: percent, most: 1, sparse: true, height: 130 };
const curve = new LineChart($("#curve"), CURVE);
const LABELS = { format: count, tell: (n) => `${count(n)} labels` };

function drawStanding() {
  const { progress, accuracy, enough, people, last } = state;
  const { asked, labelled, skipped, unsure, left } = progress;
  setText($("#progress"), `${count(labelled)} of ${count(asked)} labelled, ${count(skipped)} skipped, `
    + `${count(unsure)} not sure, ${count(left)} left${people > 1 ? ` · ${count(people)} people label now` : ""}`);
  $("#done").style.width = `${asked ? Math.min(100, (100 * labelled) / asked) : 0}%`;
  const { value, low, high, n, training, history } = accuracy;
  const measured = value === null ? "not known yet: label a few of each class"
    : `${percent(value)} (${percent(low).replace(" %", "")} to ${percent(high)}), from ${count(n)} labels`;
  setText($("#accuracy"), measured + (training ? " · training…" : ""));
  $("#curve").hidden = !history.length;
  const [x, y, lowest, highest] = [0, 1, 2, 3].map((i) => history.map((one) => one[i]));
  curve.update([{ name: "accuracy", colour: "colour-0", x, y, low: lowest, high: highest }], LABELS);
  setText($("#enough"), !enough ? "" : "You can stop now. With half of these labels the classifier says the same of "
    + `${count(enough.same)} of ${count(enough.n)} other pictures, so more labels would change little.`);
  const what = !last ? "" : last.kind === "label" ? nameOf(last.class) : last.kind === "skip" ? "skip" : "not sure";
  setText($("#last"), last ? `last answer: ${what}${last.n > 1 ? `, ${count(last.n)} pictures` : ""}` : "");
  drawMessage();
}

// All answers ever given, if the server sends that number; else those to the current questions.
const answers = () => state.saved ?? state.progress.labelled + state.progress.skipped + state.progress.unsure;

function drawSaved() {
  const put = (kind, text) => {
    $("#saved").dataset.state = kind;
    setText($("#saved"), text);
  };
  if (outbox.trouble) put("lost", `not saved: trying again (${outbox.trouble.message})`);
  else if (!outbox.isEmpty) put("wait", "saving…");
  else if (trouble) put("lost", trouble);
  else put(state ? "live" : "wait", state ? `saved, ${count(answers())} answers` : "");
}

// ---- keys and buttons

const ACTIONS = {
  skip: () => answer("skip"),
  unsure: () => answer("unsure"),
  none: () => answer("none"),
  undo,
  group: toggleAll,
  add: () => open("add"),
  find: () => open("find"),
  rename() {
    if (!state?.classes.length) return say("no class to rename");
    if (isRenaming) return close(), say("");
    isRenaming = true;
    document.body.classList.add("renaming");
    say("rename which class? Press its key, or / to find it; Escape cancels");
  },
  help() {
    $("#help").hidden = !$("#help").hidden;
    $("[aria-controls=help]").setAttribute("aria-expanded", String(!$("#help").hidden));
  },
  review() {
    $("#review").hidden = !$("#review").hidden;
    $("[aria-controls=review]").setAttribute("aria-expanded", String(!$("#review").hidden));
    if ($("#review").hidden) {
      if (current?.given) show(upcoming()[0] ?? null);
      return;
    }
    readGiven();
    $("#review").scrollIntoView({ block: "nearest" });
  },
  close,
};
const KEYS = { s: "skip", n: "unsure", x: "none", v: "review", u: "undo", backspace: "undo", g: "group", a: "add", "/": "find", r: "rename" };
Object.assign(KEYS, { h: "help", "?": "help" });

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.action) ACTIONS[button.dataset.action]();
  // Else the space bar, meant for a look-alike, would press the last clicked button.
  if (event.pointerType === "mouse") button?.blur();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (isRenaming) say("");
    if (!$("#help").hidden) ACTIONS.help();
    return close();
  }
  if (event.target.matches("input") || event.isComposing) return;
  const isUndo = (event.ctrlKey || event.metaKey) && !event.shiftKey && event.key.toLowerCase() === "z";
  if (isUndo || !(event.ctrlKey || event.metaKey || event.altKey)) press(event, isUndo);
});

function press(event, isUndo) {
  // On keyboards where digits need Shift (AZERTY), use the position of the key.
  const digit = /^\d$/.test(event.key) ? event.key : !event.shiftKey && event.code?.match(/^Digit(\d)$/)?.[1];
  const action = isUndo ? "undo" : KEYS[event.key.toLowerCase()];
  const isArrow = event.key.startsWith("Arrow") && !event.target.closest("#curve");
  const isSpace = event.key === " " && !event.target.closest("button, a");
  if (!digit && !action && !isArrow && !isSpace) return;
  event.preventDefault();
  if (isArrow) return moveCursor(event.key);
  if (event.repeat) return; // a key held down must not label what nobody has seen
  if (isSpace) return toggle(cursor);
  if (action) return ACTIONS[action]();
  const picked = state?.classes[(Number(digit) + 9) % 10];
  if (picked) pick(picked.id);
  else say(`no class has the key ${digit}`);
}

async function nameRun() {
  const { runs } = await request("/api/runs").catch(() => ({ runs: [] }));
  const name = runs.find((run) => run.id === RUN)?.name ?? RUN;
  setText($("#run"), name);
  document.title = `label ${name} · StreamCLR`;
}

outbox.send();
nameRun();
follow();
