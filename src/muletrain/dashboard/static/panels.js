// The smaller panels: health, figures, times, traffic, clients, checkpoints, texts, configuration, comparison.

import { color } from "./charts.js";
import { $, bytes, clock, command, count, duration, el, fill, int, loss, percent, plural } from "./dom.js";
import { store } from "./store.js";

const SECONDS = [["forward", "forward"], ["backward", "backward"], ["averaging", "averaging"], ["update", "update"], ["wait", "idle"]];

export function drawHealth(run) {
  const h = run.health;
  fill($("health"), h, () => [
    el("strong", { class: "word", "data-tone": h.tone }, h.word ?? "–"),
    el("span", { class: "why" }, h.why ?? ""),
    h.remedy ? el("span", { class: "remedy" }, h.remedy) : null,
    h.command ? command(h.command) : null]);
}

export function drawTiles(run) {
  const h = run.head, peers = Object.values(run.peers);
  const answering = peers.filter((p) => p.state !== "gone" && p.state !== "silent" && p.state !== "finished").length;
  const held = run.heldout.at(-1), working = run.clients.filter((c) => c.state === "working").length;
  const ended = peers.length && peers.every((p) => p.state === "finished" || p.state === "gone");
  const tiles = [
    ["step", h.steps ? `${int(h.step)}` : "–", h.steps ? `of ${int(h.steps)}` : "not begun", h.steps ? h.step / h.steps : null],
    ["loss", loss(h.loss), "nats/token"],
    ["held-out loss", held ? loss(held[2]) : "–", held ? `after step ${int(held[0])}` : "not measured yet"],
    ["throughput", count(h.tokens_per_s), "tokens/s"],
    ["trained", count(h.tokens), "tokens"],
    h.left_s !== null && h.left_s !== undefined && h.step < h.steps ? ["time left", duration(h.left_s), "at this speed"] : ["trained for", h.step ? duration(h.trained_s) : "–", "waits included"],
    ended ? ["peers", int(peers.length), "took part"] : ["peers", int(answering), !peers.length ? "none yet" : peers.length > answering ? `answer, of ${int(peers.length)}` : "all answer"],
    run.clients.length ? ["clients", int(working), `at work, of ${int(run.clients.length)}`] : ["sent", bytes(h.sent), "by all peers"],
    ["recomputed", int(h.recomputed), h.skipped ? `microbatches; ${plural(h.skipped, "update")} skipped` : "microbatches"],
  ];
  fill($("tiles"), tiles, () => tiles.map(([name, value, unit, share]) => el("div", { class: "tile" }, el("span", { class: "name" }, name), el("span", { class: "value" }, value), el("span", { class: "unit" }, unit),
    share === null || share === undefined ? null : el("progress", { max: 1, value: share, "aria-label": "Share of the steps done" }))));
}

export function drawTimes(run) {
  const stages = run.stages.filter((s) => s.seconds.some(Boolean));
  const longest = Math.max(...stages.map((s) => s.seconds.reduce((a, b) => a + (b ?? 0), 0)), 1e-9);
  fill($("time"), stages.map((s) => [s.stage, s.seconds]), () => {
    if (!stages.length) return el("p", { class: "empty" }, "The first step is not done yet.");
    return [
      el("div", { class: "legend" }, ...SECONDS.map(([kind, name]) => el("span", { class: "key" }, el("i", { class: `t-${kind}` }), name))),
      el("div", { class: "bars", tabIndex: stages.length > 8 ? 0 : -1, role: "group", "aria-label": "Times by stage" }, ...stages.map((s) => {
        const total = s.seconds.reduce((a, b) => a + (b ?? 0), 0);
        const said = SECONDS.map(([, name], k) => `${name} ${duration(s.seconds[k])}`).join(", ");
        return el("div", { class: "barrow" }, el("span", {}, `Stage ${s.stage}`),
          el("div", { class: "stack", role: "img", "aria-label": said, title: said }, ...SECONDS.map(([kind], k) => el("i", { class: `t-${kind}`, style: { width: `${(100 * (s.seconds[k] ?? 0)) / longest}%` } }))),
          el("span", { class: "n" }, duration(total)), el("span", { class: "n muted" }, `${percent(s.seconds[4] / total)} idle`));
      })),
      el("p", { class: "muted small" }, "Mean of each stage's peers over about the last five steps.")];
  });
}

const TRAFFIC = ["activation", "gradient", "averaging", "state", "control", "relayed"];

export function drawTraffic(run) {
  const rows = run.links.map((l) => [l.from, l.to, l.bytes, Object.values(l.bytes).reduce((a, b) => a + b, 0)]).filter((r) => r[3]).sort((a, b) => b[3] - a[3]);
  const shown = rows.slice(0, 40);
  fill($("bytes"), shown, () => {
    if (!rows.length) return el("p", { class: "empty" }, "Nothing was sent yet. A run of one peer sends nothing.");
    const kinds = TRAFFIC.filter((kind) => rows.some((r) => r[2][kind]));
    const name = ([from, to]) => (to < 0 ? `stage ${from} to others` : from === to ? `inside stage ${from}` : `stage ${from} → ${to}`);
    const sum = (kind) => rows.reduce((a, r) => a + (r[2][kind] ?? 0), 0), all = rows.reduce((a, r) => a + r[3], 0);
    return [el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "link"), ...kinds.map((k) => el("th", { scope: "col", class: "n" }, k)), el("th", { scope: "col", class: "n" }, "total"))),
      el("tbody", {}, ...shown.map((r) => el("tr", {}, el("th", { scope: "row" }, name(r)), ...kinds.map((k) => el("td", { class: "n" }, r[2][k] ? bytes(r[2][k]) : "–")), el("td", { class: "n" }, bytes(r[3]))))),
      el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, "all"), ...kinds.map((k) => el("td", { class: "n" }, bytes(sum(k)))), el("td", { class: "n" }, bytes(all))))),
      rows.length > shown.length ? el("p", { class: "muted small" }, `${plural(rows.length - shown.length, "smaller link")} not listed`) : null];
  });
}

export function drawClients(run) {
  $("clients-panel").hidden = !run.clients.length;
  const working = run.clients.filter((c) => c.state === "working").length;
  $("clients-about").textContent = `${int(working)} of ${int(run.clients.length)} at work for the stages' servers`;
  const rows = [...run.clients].sort((a, b) => a.stage - b.stage || b.parts - a.parts).slice(0, 100);
  fill($("clients"), rows, () => el("table", {}, el("thead", {}, el("tr", {}, ...["stage", "client", "state"].map((t) => el("th", { scope: "col" }, t)), ...["parts computed", "late", "computed again by others"].map((t) => el("th", { scope: "col", class: "n" }, t)))),
    el("tbody", {}, ...rows.map((c) => el("tr", { "data-state": c.state === "working" ? "training" : "gone" }, el("td", {}, String(c.stage)), el("th", { scope: "row" }, c.name), el("td", {}, c.state), el("td", { class: "n" }, int(c.parts)), el("td", { class: "n" }, int(c.late)), el("td", { class: "n" }, int(c.redone)))))));
}

const USES = [["Resume", (p) => `muletrain run --resume ${p}`], ["Generate", (p) => `muletrain generate ${p} "The "`], ["Evaluate", (p) => `muletrain eval ${p}`], ["Export", (p) => `muletrain export ${p} --hf my-model`]];
const quoted = (path) => (/^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'\\''`)}'`);

export function drawCheckpoints(run) {
  const found = [...run.checkpoints].reverse();
  fill($("checkpoints"), found, () => {
    if (!found.length) return el("p", { class: "empty" }, "None yet. checkpoint.every sets the steps between two; the last step has one in any case.");
    return el("ul", { class: "checkpoints" }, ...found.map((c) => el("li", {},
      el("div", {}, el("b", {}, `step ${int(c.step)}`), el("span", { class: "muted" }, ` ${clock(c.t)} · ${bytes(c.bytes)} · written in ${duration(c.seconds)}`)),
      el("code", { class: "path" }, c.path),
      el("div", { class: "buttons" }, ...USES.map(([name, text]) => copyButton(name, text(quoted(c.path))))))));
  });
}

function copyButton(name, text) {
  const part = command(text, name);
  part.firstChild.remove();
  part.firstChild.title = text;
  return part.firstChild;
}

export function drawSamples(run) {
  $("samples-panel").hidden = !run.samples.length;
  fill($("samples"), run.samples, () => [...run.samples].reverse().map((s) => el("div", { class: "sample" }, el("h3", {}, `after step ${int(s.step)}`), ...s.texts.map((t) => el("blockquote", {}, t)))));
}

const pair = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

export function drawAbout(run) {
  const r = run.run;
  const facts = [["folder", r.folder], ["run", r.run_id], ["model", r.of_model], ["parameters", r.params ? count(r.params) : ""], ["strategy", r.of_strategy], ["data", r.of_data], ["batch", r.of_batch ? `${r.of_batch} sequences of ${int(r.of_context)} tokens` : ""],
    ["tokens of a step", r.tokens_per_step ? int(r.tokens_per_step) : ""], ["microbatches of a step", r.microbatches], ["optimizer", r.of_optimizer ? `${r.of_optimizer}, peak learning rate ${r.of_lr}` : ""], ["learning rate now", run.head.lr], ["gradient norm", run.head.grad_norm], ["precision", r.of_precision], ["rerouted microbatches", int(run.head.rerouted)]];
  const shown = facts.filter(([, v]) => v !== "" && v !== undefined && v !== null).map(([k, v]) => [k, String(v)]);
  const config = Object.entries(r.config ?? {});
  fill($("about"), [shown, config], () => [el("dl", { class: "facts" }, ...shown.map(pair)),
    config.length ? el("details", {}, el("summary", {}, `Configuration (${config.length} fields)`), el("dl", { class: "facts" }, ...config.map(pair))) : null,
    r.whole === false ? el("p", { class: "muted small" }, "This machine's peers only: other machines report to the one that began the run.") : null]);
}

export function drawCompare(runs) {
  const rows = [
    ["health", (r) => r.health.word], ["step", (r) => `${int(r.head.step)} of ${int(r.head.steps)}`], ["loss [nats/token]", (r) => loss(r.head.loss)], ["held-out loss [nats/token]", (r) => loss(r.heldout.at(-1)?.[2])],
    ["throughput, last steps [tokens/s]", (r) => count(r.head.tokens_per_s)], ["mean throughput [tokens/s]", (r) => count(r.head.trained_s ? r.head.tokens / r.head.trained_s : null)], ["tokens", (r) => count(r.head.tokens)], ["trained for", (r) => duration(r.head.trained_s)], ["sent", (r) => bytes(r.head.sent)], ["peers", (r) => int(Object.keys(r.peers).length)], ["recomputed microbatches", (r) => int(r.head.recomputed)],
  ].map(([name, of]) => [name, runs.map(({ run }) => of(run) ?? "–")]);
  const keys = [...new Set(runs.flatMap(({ run }) => Object.keys(run.run.config ?? {})))].sort();
  const different = keys.map((key) => [key, runs.map(({ run }) => run.run.config?.[key] ?? "–")]).filter(([, values]) => new Set(values).size > 1);
  const table = (head, lines, className) => el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, head), ...runs.map(({ name, k }) => el("th", { scope: "col", class: className }, el("i", { class: "swatch", style: { background: color(k) } }), name)))),
    el("tbody", {}, ...lines.map(([name, values]) => el("tr", {}, el("th", { scope: "row" }, name), ...values.map((v) => el("td", { class: className }, v))))));
  fill($("compare"), [rows, different, document.documentElement.dataset.theme], () => [
    el("div", { class: "bar" }, el("h2", { id: "h-compare" }, "Side by side")), el("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": "Figures of the runs" }, table("figure", rows, "n")),
    el("div", { class: "bar later" }, el("h2", {}, "Differences of the configuration")),
    different.length ? el("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": "Differences of the configuration" }, table("field", different, "code")) : el("p", { class: "empty" }, store.runs.length > 1 ? "The configurations are equal." : "")]);
}
