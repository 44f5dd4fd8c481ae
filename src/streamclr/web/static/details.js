// How a run is: health, account of frames, sources, log.

import { $, clock, count, el, listOr, percent } from "./common.js";

let drawn = "";
export function drawDetails(run) {
  const known = JSON.stringify([run?.id, run?.status]);
  if (known === drawn) return; // do not redraw what the user may be reading or marking
  drawn = known;
  const { status = {} } = run ?? {};
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
