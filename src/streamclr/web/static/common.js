// Shared by the pages: elements, number formats, requests, pictures, and answers waiting to be saved.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (selector, root = document) => root.querySelector(selector);

// Strings become text nodes, never markup: class names, sources and events are untrusted.
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const listOr = (items, nothing) => (items.length ? items : [el("li", { class: "note" }, nothing)]);

// Only what changed is written: a screen reader repeats a live region at every write.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const known = (format) => (x) => (isNumber(x) ? format(x) : "–");

export const count = known((n) => Math.round(n).toLocaleString("en"));
export const decimal = known((x) => {
  const size = Math.abs(x);
  if (size !== 0 && size < 0.001) return x.toExponential(1);
  return x.toFixed(size >= 100 ? 0 : size >= 10 ? 2 : 3);
});
export const percent = known((x) => {
  if (x > 0 && x < 0.0005) return "< 0.1 %";
  return `${(100 * x).toFixed(Math.abs(x) < 0.0995 && x !== 0 ? 1 : 0)} %`;
});
export const perSecond = known((x) => `${x >= 100 ? count(x) : x.toPrecision(x >= 10 ? 3 : 2)}/s`);
export const bytes = known((x) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(x, 1)) / 3)));
  const value = x / 1000 ** power;
  return `${value >= 100 || power === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[power]}`;
});
export const short = known((n) => {
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (Math.abs(n) >= size) return `${parseFloat((n / size).toFixed(2))}${unit}`;
  }
  return `${parseFloat(n.toFixed(2))}`;
});
export const duration = known((s) => {
  for (const [size, unit, next, part] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (s < size) continue;
    const rest = Math.floor((s % size) / next);
    return rest ? `${Math.floor(s / size)} ${unit} ${rest} ${part}` : `${Math.floor(s / size)} ${unit}`;
  }
  return `${parseFloat(s.toFixed(1))} s`;
});

export function clock(when) {
  const date = new Date(when);
  if (Number.isNaN(date.getTime())) return String(when);
  const time = date.toLocaleTimeString("en-GB");
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? time : `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

// A failed request. `again` says whether the same request may succeed later.
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
    this.again = status === 0 || status === 401 || status === 429 || status >= 500;
  }
}

const MESSAGES = {
  0: "no answer from the server",
  401: "not signed in: open the URL that the server printed",
  429: "too many requests, waiting",
};

export async function request(path, { method = "GET", body } = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      cache: "no-store",
      headers: body ? { "Content-Type": "application/json" } : {},
      body: body && JSON.stringify(body),
      signal: AbortSignal.timeout(20_000),
    });
    if (answer.ok) return await answer.json();
  } catch {
    throw new Refused(0, MESSAGES[0]); // the connection broke, perhaps after the server had acted
  }
  const said = await answer.json().catch(() => ({}));
  const detail = typeof said.detail === "string" ? said.detail : `the server answered ${answer.status}`;
  throw new Refused(answer.status, MESSAGES[answer.status] ?? detail);
}

// crypto.randomUUID exists in secure contexts only, and http:// on a bind address other than the loopback is none.
export function uuid() {
  if (crypto.randomUUID) return crypto.randomUUID();
  const b = crypto.getRandomValues(new Uint8Array(16));
  b[6] = (b[6] & 0x0f) | 0x40; // version 4
  b[8] = (b[8] & 0x3f) | 0x80; // variant 1
  const hex = [...b].map((x) => x.toString(16).padStart(2, "0")).join("");
  return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join("-");
}

// localStorage throws where a browser forbids it; the page then works without it.
export function recall(key, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(`streamclr.${key}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(key, value) {
  try {
    if (value === null) localStorage.removeItem(`streamclr.${key}`);
    else localStorage.setItem(`streamclr.${key}`, JSON.stringify(value));
  } catch {}
}

export function rememberedKeys(prefix) {
  try {
    const all = Object.keys(localStorage).filter((key) => key.startsWith(`streamclr.${prefix}`));
    return all.map((key) => key.slice("streamclr.".length)).sort();
  } catch {
    return [];
  }
}

export const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

const SMALL = 160; // pixels; pictures up to this width are enlarged with visible pixels, not blurred
const MOST_PICTURES = 500;

// Loads again after a failure: a browser would leave it broken.
export function picture(path) {
  const image = el("img", { src: path, alt: "", draggable: "false" });
  let wait = 1;
  image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth <= SMALL));
  image.addEventListener("error", async () => {
    await pause((wait *= 2));
    if (wait <= 32) image.src = path;
  });
  return image;
}

// Pictures by path, loaded ahead.
export class Pictures {
  images = new Map();

  get(path) {
    if (this.images.has(path)) return this.images.get(path);
    const image = picture(path);
    this.images.set(path, image);
    if (this.images.size > MOST_PICTURES) this.images.delete(this.images.keys().next().value);
    return image;
  }

  has(path) {
    return Boolean(this.images.get(path)?.naturalWidth);
  }
}

// Answers that the server has not saved yet: sent in order, one at a time, each until it is acknowledged. They wait
// in localStorage, each under its own key, so that two tabs do not overwrite each other's.
export class Outbox {
  // base: path of the run. query: of each request. changed(): an entry was added, removed or failed. taken(state, entry): acknowledged.
  // refused(problem, entry): rejected for good.
  constructor(base, query, { changed, taken, refused }) {
    Object.assign(this, { base, query, changed, taken, refused, trouble: null, n: 0, version: 0, isBusy: false });
    this.prefix = `answer.${base}/`;
    this.entries = rememberedKeys(this.prefix)
      .map((key) => ({ ...recall(key), key }))
      .filter(({ method, path }) => typeof method === "string" && typeof path === "string");
  }

  get isEmpty() {
    return this.entries.length === 0;
  }

  add(method, path, body) {
    const time = String(Date.now()).padStart(15, "0");
    const entry = { method, path, body, key: `${this.prefix}${time}.${String(this.n++).padStart(6, "0")}.${uuid()}` };
    this.entries.push(entry);
    this.version++;
    remember(entry.key, { method, path, body });
    this.send();
    return entry;
  }

  async send() {
    this.changed();
    if (this.isBusy) return;
    this.isBusy = true;
    for (let wait = 1; !this.isEmpty; this.changed()) {
      const [entry] = this.entries;
      const [state, problem] = await request(this.base + entry.path + this.query, entry).then((one) => [one], (why) => [null, why]);
      this.trouble = problem?.again ? problem : null;
      if (this.trouble) {
        this.changed();
        await Promise.race([pause(wait), new Promise((go) => addEventListener("online", go, { once: true }))]);
        wait = Math.min(15, 2 * wait);
        continue;
      }
      wait = 1;
      if (problem) this.drop(this.undoOf(entry));
      this.drop(entry);
      if (problem) this.refused(problem, entry);
      else this.taken(state, entry);
    }
    this.isBusy = false;
  }

  drop(entry) {
    if (!entry) return;
    this.version++;
    this.entries.splice(this.entries.indexOf(entry), 1);
    remember(entry.key, null);
  }

  // The queued undo of this answer: without the answer it would undo an older one.
  undoOf(answer) {
    let depth = 0;
    for (const entry of answer.path === "/labels" ? this.entries.slice(1) : []) {
      if (entry.path === "/labels") depth++;
      else if (entry.path === "/labels/undo" && depth-- === 0) return entry;
    }
    return null;
  }

  // Tasks that are answered on this page but not yet on the server.
  tasks() {
    const stack = [];
    for (const { path, body } of this.entries) {
      if (path === "/labels") stack.push(body.tasks);
      else if (path === "/labels/undo") stack.pop();
    }
    return new Set(stack.flat());
  }
}
