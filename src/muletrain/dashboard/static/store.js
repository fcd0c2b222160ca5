// The state of all runs: fetched once, then changed by server-sent events.

import { $ } from "./dom.js";

export const store = { loaded: false, runs: [], steers: false, past: null, skew: 0 };
let source = null;
let changed = () => {};

export function connect(onchange) {
  changed = onchange;
  begin();
}

async function begin() {
  source?.close();
  try {
    const answer = await fetch("/api/state");
    if (!answer.ok) throw new Error(answer.status === 403 ? "no token: open the printed link" : `error ${answer.status}`);
    const state = await answer.json();
    store.steers = state.steers;
    store.loaded = true;
    store.runs = state.runs.map((changes) => apply(empty(), changes));
    listen(state.id);
    status("live", "good");
    changed();
  } catch (e) {
    status(e.message.startsWith("no token") ? e.message : "not connected; trying again", "bad");
    setTimeout(begin, 1500);
  }
}

const empty = () => ({ head: {}, health: {}, stages: [], links: [], clients: [], run: {}, heldout: [], checkpoints: [], samples: [], peers: {}, marks: [], curve: [] });

function apply(run, changes) {
  Object.assign(run, changes.set ?? {});
  for (const [key, peer] of Object.entries(changes.peers ?? {})) {
    if (peer === null) delete run.peers[key];
    else run.peers[key] = peer;
  }
  if (changes.marks) run.marks = run.marks.concat(changes.marks).slice(-2000);
  if (changes.curve) run.curve = run.curve.slice(0, changes.curve.from).concat(changes.curve.rows);
  return run;
}

function listen(id) {
  source = new EventSource(`/api/events?after=${encodeURIComponent(id)}`);
  source.onopen = () => status("live", "good");
  source.onmessage = (message) => {
    for (const [k, changes] of Object.entries(JSON.parse(message.data).runs)) apply(store.runs[k], changes);
    changed();
  };
  source.addEventListener("reset", begin);
  source.addEventListener("full", () => {
    source.close();
    status("too many viewers; trying again", "bad");
    setTimeout(begin, 10000);
  });
  source.onerror = () => {
    status("not connected; trying again", "bad");
    if (source.readyState === EventSource.CLOSED) setTimeout(begin, 1500);
  };
}

function status(text, tone) {
  if ($("link").textContent === text) return;
  $("link").textContent = text;
  $("link").dataset.tone = tone;
}

/** The state of run `k` that is shown: now, or at the time on the event line. */
export function view(k) {
  const run = store.runs[k];
  if (!run || store.past?.run !== k) return run;
  const { t, state } = store.past;
  const kept = run.marks.filter((mark) => mark.t <= t);
  return { ...run, ...state, marks: kept, curve: run.curve.filter((row) => row[1] <= t), heldout: run.heldout.filter((h) => h[1] <= t), checkpoints: run.checkpoints.filter((c) => c.t <= t), samples: run.samples.filter((s) => s.t <= t) };
}

/** Show run `k` as it was at `t`; `after`: with the event at `t`. */
export async function showPast(k, t, after = false) {
  const answer = await fetch(`/api/at?run=${k}&t=${t}${after ? "&after" : ""}`);
  if (!answer.ok) return after ? showNow() : undefined;
  store.past = { run: k, asked: t, ...(await answer.json()) };
  changed();
}

export function showNow() {
  store.past = null;
  changed();
}

export async function act(k, action, peer = "") {
  const answer = await fetch("/api/act", { method: "POST", headers: { "X-Muletrain": "1", "Content-Type": "application/json" }, body: JSON.stringify({ run: k, action, peer }) });
  return answer.json();
}
