// Shows what the server of this page tells: /history once, then /stream as it happens.
"use strict";

const KEPT_POINTS = 3000, KEPT_ROWS = 50, SHOWN_ROWS = 8;
const neurons = new Map();
const SILENT_MS = 10000;  // the server sends gauges every 2 s
const FRESH_SECONDS = 60;  // of a figure: an older one says of when it is
const SOLVED_SECONDS = 600, START_SECONDS = 60;  // of warnings: how long solved ones and those of a start are shown
const GAP_SECONDS = 120;  // between two points of a curve
const DAY = 86400;
let faults = {};  // name of a failed round's cause -> sentence
let shown = "", waiting = [], loaded = false, drawSoon = false, heard = Date.now(), lost = false;
let ahead = 0;  // milliseconds: this computer's clock before the miner's, whose times all events have
const present = () => (Date.now() - ahead) / 1000;

const $ = (id) => document.getElementById(id);
const number = (value, digits = 2) =>
  value === null || value === undefined || Number.isNaN(value) ? "–"
    : Number(value).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
function moment(time) {  // with the day, unless it is today
  const at = new Date(time * 1000), today = new Date().toDateString() === at.toDateString();
  return today ? clock(time) : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock(time).slice(0, 5)}`;
}
function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

// Every text from the outside goes through textContent: it is shown, never interpreted.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((c) => (c instanceof Node ? c : document.createTextNode(String(c)))));
  return made;
}

// What did not change stays as it is, down to the single text: it can be selected and copied.
function replace(place, ...children) {
  children.forEach((child, i) => {
    if (i < place.childNodes.length) update(place.childNodes[i], child); else place.append(child);
  });
  while (place.childNodes.length > children.length) place.lastChild.remove();
}

function update(there, made) {
  if (there.isEqualNode(made)) return;
  if (there.nodeName !== made.nodeName) { there.replaceWith(made); return; }
  if (there.nodeType === Node.TEXT_NODE) { there.data = made.data; return; }
  for (const { name } of [...there.attributes]) if (!made.hasAttribute(name)) there.removeAttribute(name);
  for (const { name, value } of made.attributes) if (there.getAttribute(name) !== value) there.setAttribute(name, value);
  replace(there, ...made.childNodes);
}

function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// --- what is known ----------------------------------------------------------------------------

function take(event) {
  const neuron = neurons.get(event.neuron);
  if (!neuron) return;
  if (event.gauges) { Object.assign(neuron, event); return; }  // all that changes without an event
  if (event.number <= neuron.taken) return;  // the history had it already
  neuron.taken = event.number;
  neuron.state = event.state;
  if (event.kind === "step") {
    neuron.steps.push(neuron.columns.map((c) => (event[c] === undefined ? null : event[c])));
    if (neuron.steps.length > KEPT_POINTS) neuron.steps = merged(neuron.steps, neuron.columns);
  } else if (event.kind === "outer_step") neuron.marks.push(event);
  else if (event.kind === "scores") neuron.scores = event;
  if (neuron.tables[event.kind]) {
    neuron.tables[event.kind].push(event);
    neuron.tables[event.kind].splice(0, neuron.tables[event.kind].length - KEPT_ROWS);
  }
}

const LAST_OF = new Set(["time", "outer_step", "inner_step", "learning_rate", "grad_norm", "gpu_memory_gb", "gpu_utilization"]);

// Rows nearer to each other than an even share of the whole time become one, so that a tab that stays open for
// weeks keeps its past: at most half of KEPT_POINTS are left.
function merged(rows, columns) {
  const at = columns.indexOf("time"), share = (rows[rows.length - 1][at] - rows[0][at]) / (KEPT_POINTS / 2 - 1);
  const kept = [];
  let bucket = [];
  const close = () => kept.push(columns.map((column, i) => {
    const values = bucket.map((row) => row[i]).filter((value) => value !== null);
    if (LAST_OF.has(column) || !values.length) return bucket[bucket.length - 1][i];
    return values.reduce((sum, value) => sum + value, 0) / values.length;
  }));
  for (const row of rows) {
    if (bucket.length && row[at] - bucket[0][at] >= share) { close(); bucket = []; }
    bucket.push(row);
  }
  close();
  return kept;
}

function begin(history) {
  faults = history.faults;
  for (const neuron of history.neurons) {
    neurons.set(neuron.name, neuron);
  }
  if (!neurons.has(shown)) {
    const miners = history.neurons.filter((n) => n.steps.length);
    shown = (miners[0] || history.neurons[0] || { name: "" }).name;
  }
}

function buttons() {
  if (neurons.size < 2) return;
  const names = [...neurons.keys()];
  if ($("neurons").children.length !== names.length) {
    $("neurons").replaceChildren(...names.map((name) => {
      const made = element("button", { type: "button" }, name);
      made.addEventListener("click", () => { shown = name; draw(); });
      return made;
    }));
  }
  names.forEach((name, i) => {
    const made = $("neurons").children[i], bad = verdictOf(neurons.get(name))[2] === "bad";
    made.setAttribute("aria-pressed", String(name === shown));
    made.classList.toggle("bad", bad);
    say(made, `${bad ? "⚠ " : ""}${titleOf(neurons.get(name))}`);
  });
}

function titleOf(neuron) {  // as its settings name it; two of one name differ by their folders
  const same = [...neurons.values()].filter((other) => other.title === neuron.title).length;
  return same > 1 ? neuron.name : neuron.title;
}

const newestOf = (neuron, kind) => neuron.tables[kind][neuron.tables[kind].length - 1];

// --- cards ------------------------------------------------------------------------------------

function card(title, value, small = "", kind = "") {
  const made = element("div", { class: `card ${kind}` },
    element("h2", {}, title), element("p", {}, value), element("small", {}, small));
  return made;
}

const gaugeOf = (neuron, name) => neuron.gauges[`dt_${name}`];

function cards(neuron) {
  const gauge = (name) => gaugeOf(neuron, name), facts = neuron.facts || {};
  const column = (name) => {
    const last = neuron.steps[neuron.steps.length - 1];
    return last ? last[neuron.columns.indexOf(name)] : null;
  };
  const now = present();
  const running = runs(neuron);
  const made = [], score = judged(neuron), steps = neuron.steps.length > 0;
  if (score) made.push(card("Score", ...score));
  made.push(card("State", stateOf(neuron)), ...startCards(neuron));
  made.push(...uploadCards(neuron, running));  // whether it counts comes before how it trains
  const told = facts.next_round ?? gauge("next_round_timestamp_seconds"), next = neuron.next_round ?? told;
  if (next && running) {
    made.push(card("Next close", next > now ? `in ${span(next - now)}` : "due",
      next !== told ? `by the clock, ${clock(next)}` : next > now ? `expected at ${clock(next)}` : `since ${span(now - next)}`));
  }
  const rounds = neuron.tables.round.filter((r) => !early(r)), last = rounds[rounds.length - 1];
  if (last) made.push(card("Last close", tookPart(last) ? "merged" : last.ok ? fateOf(last) : "failed", causeOf(last),
    tookPart(last) ? "good" : last.ok && last.fate !== "refused" || !running ? "" : "bad"));
  const share = gauge("round_participation_ratio"), taken = rounds.filter(tookPart).length;
  if (rounds.length) made.push(card("Closes merged", `${taken} of ${rounds.length}`,
    share === undefined ? "the last ones" : `${number(100 * share, 0)} % of the subnet's last 20`));
  if (steps) {
    made.push(card("Step", `${column("outer_step")} . ${column("inner_step")}`,
      `outer . inner, ${span(now - column("time"))} ago`, wordOf(neuron) === "stuck" ? "bad" : ""));
    made.push(card("Loss", number(column("loss"), 3), `learning rate ${(column("learning_rate") || 0).toExponential(2)}`));
    const wait = column("data_wait_seconds");
    made.push(card("Step time", `${number(column("seconds"), 1)} s`, `of it ${number(wait, 1)} s without data`));
    made.push(card("Tokens per second", number(column("tokens_per_second"), 0),
      column("mfu") === null ? "" : `MFU ${number(100 * column("mfu"), 1)} %`));
    if (column("gpu_memory_gb")) made.push(card("GPU memory", `${number(column("gpu_memory_gb"), 1)} GB`,
      column("gpu_utilization") === null ? "" : `utilization ${number(column("gpu_utilization"), 0)} %`));
  }
  made.push(...dayCards(neuron));
  const looked = newestOf(neuron, "export");
  if (looked) made.push(card("Evaluation", looked.ok ? Object.entries(looked.results).slice(0, 3).map(([name, value]) => `${name} ${number(value, 3)}`).join("; ") || "exported" : "failed",
    looked.ok ? `outer step ${looked.outer_step}, ${looked.folder}` : looked.reason, looked.ok ? "" : "bad"));
  made.push(...machineCards(neuron));
  const alive = gauge("network_members_alive"), speed = gauge("network_tokens_per_second");
  if (alive !== undefined) made.push(card("Members at work", `${number(alive, 0)} of ${number(gauge("network_members"), 0)}`,
    `a round takes ${number(gauge("network_members_needed"), 0)}; ${number(gauge("network_members_scored"), 0)} have a score`,
    alive < gauge("network_members_needed") ? "bad" : ""));
  const due = gauge("network_next_round_timestamp_seconds");
  if (due !== undefined && running) made.push(card("Next round", due > now ? `in ${span(due - now)}` : "due",
    `outer step ${number(gauge("network_outer_step"), 0)}`));
  if (speed !== undefined) made.push(card("Tokens a second", number(speed, 0), `all members; ${number(gauge("network_tokens") / 1e9, 2)} B in all`));
  const held = newestOf(neuron, "held_out");
  const domains = Object.entries(held?.domains ?? {}).map(([name, loss]) => `; ${name} ${number(loss, 3)}`).join("");
  if (held) made.push(card("Held-out loss", number(held.after, 3), `before ${number(held.before, 3)}${held.text ? `, on ${held.text}` : ""}${domains}`));
  replace($("now"), ...made);
  $("now").classList.toggle("old", lost || !running || present() - (facts.looked || present()) > 5 * FRESH_SECONDS);
}

const launchOf = (neuron) => neuron.facts && neuron.facts.launch;

function startCards(neuron) {  // how far a start has come, and when a refused one is tried again
  const launcher = launchOf(neuron), now = present();
  if (!launcher) return [];
  if (launcher.state === "refused" && launcher.next_try_at) {
    return [card("Next try", launcher.next_try_at > now ? `in ${span(launcher.next_try_at - now)}` : "now",
      `attempt ${launcher.attempt + 1}`, "bad")];
  }
  if (launcher.state !== "starting" || !launcher.stage) return [];
  const left = launcher.eta_seconds == null ? null : launcher.eta_seconds - (now - launcher.stage_at);
  return [card("Start", left === null ? `for ${span(now - launcher.at)}` : left > 0 ? `${span(left)} left` : "nearly there",
    launcher.stage, "fresh")];
}

function dayCards(neuron) {
  const tokens = neuron.tokens_a_day;
  return tokens === null ? [] : [card("Tokens a day", amount(tokens), "of text trained on, pauses counted")];
}

function uploadCards(neuron, running) {
  const made = [], newest = ((neuron.facts || {}).uploads || []).at(-1);
  if (newest) made.push(card("Uploaded", `${span(present() - newest.at)} ago`, `of outer step ${newest.outer_step}: ${newest.fate || "not judged yet"}${newest.cause ? `, ${newest.cause}` : ""}`,
    newest.fate === "refused" && running ? "bad" : ""));
  return made;
}

function machineCards(neuron) {
  const made = [], launcher = launchOf(neuron), disk = neuron.facts && neuron.facts.disk && neuron.facts.disk.value;
  if (disk) {
    const full = disk.free < Math.max(disk.needed, 1e9), share = disk.free / disk.total;
    made.push(card("Disk", `${number(disk.free / 1e9, disk.free < 1e10 ? 1 : 0)} GB free`,
      `${number(100 * share, 0)} % of ${number(disk.total / 1e9, 0)} GB`, full ? "bad" : share < 0.1 ? "fresh low" : "fresh"));
  }
  const crash = launcher && launcher.last_crash && launcher.last_crash.at ? launcher.last_crash : null;
  if (launcher && (launcher.restarts || crash)) made.push(card("Restarts", number(launcher.restarts, 0),
    crash ? `last crash ${span(present() - crash.at)} ago: ${crash.text}` : "", crash && present() - crash.at < 3600 ? "bad" : ""));
  return made;
}

function amount(value) {
  const [size, unit] = value >= 1e9 ? [1e9, "billion"] : value >= 1e6 ? [1e6, "million"] : [1e3, "thousand"];
  return `${number(value / size, value / size < 10 ? 2 : 1)} ${unit}`;
}

const AWAY = new Set(["stopped", "cannot start", "starting"]);
const wordOf = (neuron) => (neuron.judgement ? neuron.judgement.verdict : "");
const ended = (neuron) => neuron.state === "stopped" || (neuron.state === "finished" && newestOf(neuron, "stop"));
const runs = (neuron) => (neuron.judgement ? !AWAY.has(wordOf(neuron)) : !ended(neuron)) && !(neuron.life && neuron.life.gone);

function stateOf(neuron) {
  if (neuron.state === "finished") return neuron.state;
  if (AWAY.has(wordOf(neuron))) return wordOf(neuron);
  if (neuron.state === "stopped") return neuron.state;
  if (!runs(neuron)) return "dead";
  if (!neuron.taken) return "waiting";
  if (neuron.state === "starting" && (launchOf(neuron) || {}).state === "running") return "training";
  return neuron.state === "update_failed" ? "training" : (neuron.state || "–").replace(/_/g, " ");
}

function endOf(neuron) {  // when a miner that is stopped was last there
  const { at } = launchOf(neuron) || {};
  return wordOf(neuron) === "stopped" && at ? `${span(present() - at)} ago, at ${moment(at)}: ` : "";
}

// In a word, what there is to know or to do, and good (nothing to do), wait, bad (act) or idle.
function verdictOf(neuron) {
  const state = stateOf(neuron), stop = newestOf(neuron, "stop"), verdict = neuron.judgement;
  if (lost) return ["connection lost", `the dashboard, its machine or the tunnel to it is down; figures of ${clock(heard / 1000)}`, "bad"];
  if (verdict) return [verdict.verdict, endOf(neuron) + verdict.cause, verdict.level, verdict.remedy];
  if (state === "finished") return [state, (newestOf(neuron, "finished") || stop || {}).reason || "", "good"];
  if (state === "stopped") return [state, stop ? `${moment(stop.time)}: ${stop.reason || ""}` : "", stop && stop.exit_status ? "bad" : "idle"];
  if (state === "dead") {
    const since = neuron.life.last_sign;
    return [state, `no sign of life for ${span(present() - since)}, since ${moment(since)}`, "bad", "pm2 status, then the end of its log"];
  }
  const network = newestOf(neuron, "network"), written = gaugeOf(neuron, "metrics_written_timestamp_seconds");
  if (network) {  // of a validator: the same as on the registry's page
    const silent = present() - Math.max(network.time, written || 0);
    if (silent > network.next_report) return ["validator silent", `no figures for ${span(silent)}: the end of its log tells why`, "bad"];
    return [network.verdict, network.words, network.level];
  }
  if (!neuron.taken) return [state, "no events yet: no miner has run in this folder", "idle"];
  return [state, "", "good"];  // a validator waits between its rounds
}

const uidOf = (neuron) => (newestOf(neuron, "start") || {}).uid;

function scoreOf(neuron) {  // where the validator is shown too
  const judge = [...neurons.values()].find((n) => n.scores);
  return judge && judge.scores.scores[uidOf(neuron)];
}

function judged(neuron) {  // by a validator whose folder is shown too
  const found = [...neurons.values()].map((n) => n.judged[uidOf(neuron)]).find(Boolean), score = scoreOf(neuron);
  if (!found && !score) return undefined;
  const counted = found ? `${found.scored} of ${found.passes} uploads scored` : "by the validator of this subnet";
  const reset = found && found.last_reset ? `; last reset: ${found.last_reset}` : "";
  return [number(score && score.total, 3), counted + reset, found && !found.scored ? "bad" : ""];
}

// --- curves -----------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
function shape(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// A curve is cut where nothing was written for long: a straight line would look like training.
function partsOf(points) {
  const pauses = points.slice(1).map((p, i) => p[0] - points[i][0]).sort((a, b) => a - b);
  const limit = Math.max(GAP_SECONDS, 10 * (pauses[Math.floor(pauses.length / 2)] || 0)), parts = [[]];
  points.forEach((p, i) => {
    if (i && p[0] - points[i - 1][0] > limit) parts.push([]);
    parts.at(-1).push(p);
  });
  return parts.map((part) => (part.length > 1 ? part : [part[0], part[0]]));  // one point is a dot
}

// Of the inner steps, by column; `rows` and `columns` of something else.
function chart(id, title, unit, neuron, series, digits, rows = neuron.steps, columns = neuron.columns) {
  const place = $(id), width = Math.max(280, place.clientWidth - 30), height = 190;
  const at = columns.indexOf("time");
  const lines = series.map((s) => ({ ...s, points: rows
    .map((row) => [row[at], row[columns.indexOf(s.column)]]).filter((p) => p[0] !== null && p[1] !== null) }))
    .filter((s) => s.points.length);
  place.hidden = !lines.length;
  if (!lines.length) return;
  const all = lines.flatMap((s) => s.points);
  const times = all.map((p) => p[0]), values = all.map((p) => p[1]);
  const [t0, t1] = [Math.min(...times), Math.max(...times)];
  const sorted = [...values].sort((a, b) => a - b);
  let low = sorted[0], high = sorted[Math.min(sorted.length - 1, Math.ceil(sorted.length * 0.995))];
  if (series.length > 1 || low > 0 && low < 0.3 * high) low = Math.min(0, low);
  if (high === low) high = low + Math.max(1, Math.abs(low) / 10);
  const left = 48, right = 8, top = 8, bottom = 22;
  const x = (t) => left + (t1 === t0 ? 1 : (t - t0) / (t1 - t0)) * (width - left - right);
  const y = (v) => top + (1 - (Math.min(v, high) - low) / (high - low)) * (height - top - bottom);
  const newest = lines.map((s) => `${s.name} ${number(s.points[s.points.length - 1][1], digits)} ${unit}`).join(", ");
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", preserveAspectRatio: "none",
    "aria-label": `${title} since ${moment(t0)}: ${newest}; lowest ${number(sorted[0], digits)}, highest ${number(sorted[sorted.length - 1], digits)}` });
  for (let i = 0; i <= 3; i++) {
    const value = low + (high - low) * i / 3;
    drawing.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    drawing.append(shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, high - low < 3 ? digits : high - low < 30 ? Math.min(digits, 1) : 0)));
  }
  for (const [t, anchor] of t0 === t1 ? [[t1, "end"]] : [[t0, "start"], [t1, "end"]]) drawing.append(shape("text", { x: x(t), y: height - 4, "text-anchor": anchor }, moment(t)));
  const marks = neuron.marks.filter((mark) => mark.time >= t0 && mark.time <= t1);
  const every = Math.ceil(marks.length / 40);  // more would hide the curve
  for (const mark of marks.filter((_, i) => i % every === 0)) {
    const line = shape("line", { class: "mark", x1: x(mark.time), x2: x(mark.time), y1: top, y2: height - bottom });
    line.append(shape("title", {}, `outer step ${mark.outer_step}`));
    drawing.append(line);
  }
  for (const s of lines) for (const part of partsOf(s.points)) drawing.append(shape("polyline", { class: s.style,
    points: part.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") }));
  const keys = lines.map((s) => element("span", { class: `key-${s.style}` },
    `${s.name} ${number(s.points[s.points.length - 1][1], digits)} ${unit}`));
  replace(place, element("figcaption", {}, element("b", {}, title), ...keys), drawing);
}

// --- tables -----------------------------------------------------------------------------------

function table(id, title, heads, rows) {
  if (!rows.length) { replace($(id)); return; }
  replace($(id), element("h2", {}, title), element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((h) => element("th", { scope: "col" }, h)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((c) => element("td", {}, c)))))));
  // One that is wider than the screen is scrolled by keyboard too.
  if ($(id).scrollWidth > $(id).clientWidth) $(id).tabIndex = 0; else $(id).removeAttribute("tabindex");
}

// Warnings that still matter: none of an earlier start, none that is solved, each sentence once.
function problemsOf(neuron) {
  const start = newestOf(neuron, "start") || newestOf(neuron, "starting"), well = verdictOf(neuron)[2] === "good";
  const since = Math.max(start ? start.time - START_SECONDS : 0, present() - (well ? SOLVED_SECONDS : DAY)), found = new Map();
  for (const p of neuron.tables.problem.filter((each) => each.time >= since)) {
    const same = String(p.text).replace(/[0-9]+/g, "#"), before = found.get(same);
    found.delete(same);  // the newest one last
    found.set(same, { ...p, times: (before ? before.times : 0) + 1 });
  }
  return [...found.values()].reverse().slice(0, SHOWN_ROWS);
}

const verdict = (ok, yes, no) => element("span", { class: ok ? "ok" : "not" }, ok ? yes : no);

function tables(neuron) {
  const newest = (kind) => [...neuron.tables[kind]].reverse().slice(0, SHOWN_ROWS);
  table("rounds", "Rounds", ["time", "outer step", "result", "miners", "seconds"], newest("round").map((r) => [
    moment(r.time), r.outer_step + 1, r.ok && !tookPart(r) ? element("span", { class: r.fate === "refused" || r.fate === "missed" ? "not" : "" }, fateOf(r))
      : verdict(r.ok, fateOf(r), `failed: ${causeOf(r)}`), (r.participants || []).length || "–", number(r.seconds, 1)]));
  table("publications", "Uploads", ["time", "revision", "result", "MB", "seconds"], newest("publication").map((p) => [
    moment(p.time), p.revision, verdict(p.ok, "uploaded", p.reason || "failed"), number(p.bytes_sent / 1e6, 1), number(p.seconds, 1)]));
  const scores = neuron.scores ? Object.entries(neuron.scores.scores) : [];
  table("scores", "Scores", ["uid", "random", "assigned", "train", "all-reduce", "total"],
    scores.sort((a, b) => b[1].total - a[1].total).slice(0, 20).map(([uid, s]) => [uid,
      number(s.random, 2), number(s.assigned, 3), number(s.train, 3), number(s.all_reduce, 0), number(s.total, 3)]));
  const ranks = ranksOf(neuron), measured = RANK_FIGURES.filter((f, i) => ranks.some((row) => row[i + 1] !== "–"));
  table("ranks", "Ranks", ["rank", ...measured.map((f) => f.head)],
    ranks.map((row) => [row[0], ...measured.map((f) => row[RANK_FIGURES.indexOf(f) + 1])]));
  table("subnet", "All neurons", ["neuron", "verdict", "score", "step", "loss", "tokens/s", "rounds"],
    neurons.size < 2 ? [] : [...neurons.values()].map(summaryOf));
  const problems = problemsOf(neuron);
  replace($("problems"), ...(problems.length ? [element("h2", {}, "Warnings and errors"),
    element("ul", {}, ...problems.map((p) => element("li", { class: p.level || "" }, element("time", {}, moment(p.time)), p.text,
      p.times > 1 ? ` (${p.times} times)` : "")))] : []));
}

// Of a member's round "fate" is what became of its upload; a validator's names the miners in it.
const tookPart = (round) => round.ok && (!round.fate || round.fate === "merged");
// Why a round failed, in a sentence; what became of an upload, as the validator put it.
function causeOf(round) {
  const sentence = faults[round.fault] || String(round.fault || "").replace(/_/g, " ").toLowerCase();
  return [sentence, String(round.detail || "")].filter(Boolean).join(": ");
}
const fateOf = (round) => round.fate || "published";
const early = (round) => round.fate === "too early";  // a close before the first upload, which it could not reach

const RANK_FIGURES = [
  { name: "memory_bytes", head: "memory", unit: "GB", scale: 1e9, digits: 2 },
  { name: "gpu_memory_bytes", head: "GPU memory", unit: "GB", scale: 1e9, digits: 1 },
  { name: "gpu_utilization_percent", head: "GPU used", unit: "%", scale: 1, digits: 0 },
  { name: "gpu_temperature_celsius", head: "heat", unit: "°C", scale: 1, digits: 0 },
  { name: "gpu_power_watts", head: "power", unit: "W", scale: 1, digits: 0 },
];

function ranksOf(neuron) {  // a row of text for each rank, in the order of RANK_FIGURES
  const ranks = Object.keys(neuron.gauges).map((k) => /^dt_rank_\w+\.(\d+)$/.exec(k)).filter(Boolean).map((m) => Number(m[1]));
  return [...new Set(ranks)].sort((a, b) => a - b).map((rank) => [rank, ...RANK_FIGURES.map((f) => {
    const value = neuron.gauges[`dt_rank_${f.name}.${rank}`];
    return value === undefined ? "–" : `${number(value / f.scale, f.digits)} ${f.unit}`;
  })]);
}

function summaryOf(neuron) {
  const last = neuron.steps[neuron.steps.length - 1], value = (c) => (last ? last[neuron.columns.indexOf(c)] : null);
  const rounds = neuron.tables.round.filter((r) => !early(r)), score = scoreOf(neuron);
  const bad = verdictOf(neuron)[2] === "bad";
  return [titleOf(neuron), element("span", { class: bad ? "not" : "" }, verdictOf(neuron)[0]), score ? number(score.total, 3) : "–",
    last ? `${value("outer_step")} . ${value("inner_step")}` : "–",
    number(value("loss"), 3), number(value("tokens_per_second"), 0), `${rounds.filter(tookPart).length} of ${rounds.length}`];
}

// --- drawing ----------------------------------------------------------------------------------

function draw() {
  const neuron = neurons.get(shown);
  if (!neuron) return;
  connection();
  const start = newestOf(neuron, "start") || {};
  const title = titleOf(neuron), name = start.uid === undefined ? title : `${title}, uid ${start.uid}`;
  say($("title"), name);
  say($("hotkey"), start.hotkey || "");
  buttons();
  cards(neuron);
  const red = [...document.querySelectorAll("#now .card.bad h2")].map((head) => head.textContent).join(", ");
  let [word, words, kind, remedy] = verdictOf(neuron);
  if (kind === "good" && red) [words, kind] = [`${words ? `${words}; ` : ""}look at: ${red}`, "wait"];
  document.title = `${kind === "bad" ? "⚠ " : ""}${name}`;
  $("verdict").className = kind;
  const looked = neuron.facts && neuron.facts.looked, age = looked ? present() - looked : 0;
  replace($("verdict"), element("h2", {}, word), element("p", {}, words),
    ...(remedy ? [element("p", { class: "remedy" }, remedy)] : []),
    ...(age > FRESH_SECONDS ? [element("p", { class: "age" }, `The miner's own figures are as of ${span(age)} ago.`)] : []));
  chart("loss", "Loss", "nats", neuron, [{ column: "loss", name: "inner step", style: "a" }], 3);
  chart("time", "Where a step's time goes", "s", neuron, [{ column: "seconds", name: "step", style: "a" },
    { column: "data_wait_seconds", name: "of it without data", style: "b" },
    { column: "between_seconds", name: "before it: rounds, loads", style: "c" }], 2);
  chart("speed", "Tokens per second", "", neuron, [{ column: "tokens_per_second", name: "all ranks", style: "a" }], 0);
  chart("memory", "GPU memory", "GB", neuron, [{ column: "gpu_memory_gb", name: "peak", style: "a" }], 1);
  const every = neuron.counts.seconds === DAY ? "day" : "hour";
  chart("counts", `Uploads and closes, by the ${every}`, "", neuron, [
    { column: "uploads", name: "uploads", style: "a" }, { column: "failed", name: "failed uploads", style: "b" },
    { column: "taken", name: "closes merged", style: "c" },
    { column: "missed", name: "missed", style: "d" }], 0,
  neuron.counts.rows.length > 1 ? neuron.counts.rows : [], ["time", "uploads", "failed", "taken", "missed"]);
  tables(neuron);
  if (neuron.steps.length && !performance.getEntriesByName("drawn").length) performance.mark("drawn");
}

function connection() {
  const silent = Date.now() - heard > SILENT_MS;  // a tunnel may break without an error
  lost = lost || (loaded && silent);
  say($("connection"), lost ? "connection lost" : "live");
  $("connection").classList.toggle("lost", lost);
}

function soon() {
  if (drawSoon || document.hidden) return;
  drawSoon = true;
  requestAnimationFrame(() => { drawSoon = false; draw(); });
}

function follow() {
  const source = new EventSource("stream");
  const kinds = ["step", "outer_step", "scores", "state", "round", "publication", "problem",
    "held_out", "start", "stop", "verdict", "network", "gauges"];
  for (const kind of kinds) source.addEventListener(kind, (message) => {
    const event = JSON.parse(message.data);
    heard = Date.now();
    if (loaded) { lost = false; take(event); soon(); } else waiting.push(event);
  });
  source.addEventListener("open", async () => {
    loaded = false;
    try {
      const answer = await fetch("history");
      const differs = Date.now() - Date.parse(answer.headers.get("Date"));
      ahead = Math.abs(differs) > 5000 ? differs : 0;  // the header counts whole seconds
      begin(await answer.json());
    } catch (problem) {  // the server ended between the two answers: the stream alone shows no past
      source.close();
      lost = true; connection(); soon();
      setTimeout(follow, 1000);
      return;
    }
    waiting.forEach(take); waiting = []; loaded = true;
    heard = Date.now(); lost = false;
    draw();
  });
  source.addEventListener("error", () => { lost = true; connection(); soon(); });
}

if (location.search) history.replaceState(null, "", location.pathname);  // the token stays with the cookie
setInterval(soon, 1000);  // ages and countdowns continue between events
window.addEventListener("resize", soon);
document.addEventListener("visibilitychange", soon);
follow();
