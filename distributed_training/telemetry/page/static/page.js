// Draws what /history says, every two seconds: whether work counts, what is wrong, what to do; loss; speed.
"use strict";

const EVERY_MS = 2000, SILENT_MS = 15000;  // between two questions; without an answer the connection is lost
const FRESH_SECONDS = 60;  // of a figure: an older one says of when it is
const SOLVED_SECONDS = 600, START_SECONDS = 60;  // of warnings: how long solved ones and those of a start are shown
const GAP_SECONDS = 120, DAY = 86400, SHOWN_ROWS = 8;
let neurons = new Map(), faults = {}, shown = "", heard = 0, lost = false;
let ahead = 0;  // seconds: this computer's clock before the miner's, whose times all events have
const present = () => Date.now() / 1000 - ahead;

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
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  return s < 7200 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}
const ago = (time) => `${span(present() - time)} ago`;

// Every text from the outside goes through textContent: it is shown, never interpreted.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// What did not change stays as it is, down to the single text: it can be selected and copied.
function replace(place, ...children) {
  children.map((c) => (c instanceof Node ? c : document.createTextNode(String(c)))).forEach((child, i) => {
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

// --- what is known ----------------------------------------------------------------------------

const newestOf = (neuron, kind) => neuron.tables[kind].at(-1);
const columnOf = (neuron, name) => (neuron.steps.length ? neuron.steps.at(-1)[neuron.columns.indexOf(name)] : null);
const runs = (neuron) => !["stopped", "cannot start", "starting", "dead"].includes(neuron.verdict[0]) && !neuron.life.gone;
const tookPart = (round) => round.ok && (!round.fate || round.fate === "merged");
const closesOf = (neuron) => neuron.tables.round.filter((r) => r.fate !== "too early");  // the first it could reach
const uidOf = (neuron) => (newestOf(neuron, "start") || {}).uid;
// As its settings name it; two of one name differ by their folders.
const titleOf = (neuron) => ([...neurons.values()].filter((n) => n.title === neuron.title).length > 1 ? neuron.name : neuron.title);
const scoreOf = (neuron) => [...neurons.values()].map((n) => n.scores && n.scores.scores[uidOf(neuron)]).find(Boolean);
function causeOf(round) {  // why a round failed; what became of an upload, as the validator put it
  const sentence = faults[round.fault] || String(round.fault || "").replace(/_/g, " ").toLowerCase();
  return [sentence, String(round.detail || "")].filter(Boolean).join(": ");
}
function amount(value) {
  const [size, unit] = value >= 1e9 ? [1e9, "billion"] : value >= 1e6 ? [1e6, "million"] : [1e3, "thousand"];
  return `${number(value / size, value / size < 10 ? 2 : 1)} ${unit}`;
}

// --- cards ------------------------------------------------------------------------------------

const card = (title, value, small = "", kind = "") => element("div", { class: `card ${kind}` },
  element("h2", {}, title), element("p", {}, value), element("small", {}, small));

function workCards(neuron) {
  const made = [], now = present(), facts = neuron.facts, launch = facts.launch || {}, running = runs(neuron);
  const gauge = (name) => neuron.gauges[`dt_${name}`], score = scoreOf(neuron);
  const judged = [...neurons.values()].map((n) => n.judged[uidOf(neuron)]).find(Boolean);
  if (score || judged) {
    const words = judged ? `${judged.scored} of ${judged.passes} uploads scored` : "by the validator of this subnet";
    made.push(card("Score", number(score && score.total, 3), words + (judged && judged.last_reset ? `; last reset: ${judged.last_reset}` : ""),
      judged && !judged.scored ? "bad" : ""));
  }
  if (launch.state === "refused" && launch.next_try_at) {
    made.push(card("Next try", launch.next_try_at > now ? `in ${span(launch.next_try_at - now)}` : "now", `attempt ${launch.attempt + 1}`, "bad"));
  } else if (launch.state === "starting" && launch.stage) {
    const left = launch.eta_seconds === null ? null : launch.eta_seconds - (now - launch.stage_at);
    made.push(card("Start", left === null ? `for ${span(now - launch.at)}` : left > 0 ? `${span(left)} left` : "nearly there", launch.stage, "fresh"));
  }
  const upload = (facts.uploads || []).at(-1);
  if (upload) made.push(card("Uploaded", ago(upload.at), `of outer step ${upload.outer_step}: ${upload.fate || "not judged yet"}${upload.cause ? `, ${upload.cause}` : ""}`,
    upload.fate === "refused" && running ? "bad" : ""));
  const closes = closesOf(neuron), last = closes.at(-1), share = gauge("round_participation_ratio");
  if (last) {
    made.push(card("Last close", tookPart(last) ? "merged" : last.ok ? last.fate : "failed", causeOf(last),
      tookPart(last) ? "good" : last.ok && last.fate !== "refused" || !running ? "" : "bad"));
    made.push(card("Closes merged", `${closes.filter(tookPart).length} of ${closes.length}`,
      share === undefined ? "the last ones" : `${number(100 * share, 0)} % of the network's last 20`));
  }
  const told = facts.next_round ?? gauge("next_round_timestamp_seconds"), next = neuron.next_round ?? told;
  if (next && running) made.push(card("Next close", next > now ? `in ${span(next - now)}` : "due",
    next !== told ? `by the clock, ${clock(next)}` : next > now ? `expected at ${clock(next)}` : `since ${span(now - next)}`));
  const alive = gauge("network_members_alive"), due = gauge("network_next_round_timestamp_seconds"), held = newestOf(neuron, "held_out");
  if (alive !== undefined) made.push(card("Members at work", `${number(alive, 0)} of ${number(gauge("network_members"), 0)}`,
    `a round takes ${number(gauge("network_members_needed"), 0)}; ${number(gauge("network_members_scored"), 0)} have a score`,
    alive < gauge("network_members_needed") ? "bad" : ""));
  if (due !== undefined && running) made.push(card("Next round", due > now ? `in ${span(due - now)}` : "due", `outer step ${number(gauge("network_outer_step"), 0)}`));
  if (held) made.push(card("Held-out loss", number(held.after, 3), [`before ${number(held.before, 3)}${held.text ? `, on ${held.text}` : ""}`,
    ...Object.entries(held.domains ?? {}).map(([name, loss]) => `${name} ${number(loss, 3)}`)].join("; ")));
  const exported = newestOf(neuron, "export");
  if (exported) made.push(card("Evaluation", exported.ok ? Object.entries(exported.results).slice(0, 3).map(([name, value]) => `${name} ${number(value, 3)}`).join("; ") || "exported" : "failed",
    exported.ok ? `outer step ${exported.outer_step}, ${exported.folder}` : exported.reason, exported.ok ? "" : "bad"));
  return made;
}

function speedCards(neuron) {
  const made = [], column = (name) => columnOf(neuron, name), facts = neuron.facts, launch = facts.launch || {};
  const speed = neuron.gauges.dt_network_tokens_per_second, disk = facts.disk && facts.disk.value, crash = launch.last_crash;
  if (neuron.steps.length) {
    made.push(card("Step", `${column("outer_step")} . ${column("inner_step")}`, `outer . inner, ${ago(column("time"))}`, neuron.verdict[0] === "stuck" ? "bad" : ""));
    made.push(card("Loss", number(column("loss"), 3), `learning rate ${(column("learning_rate") || 0).toExponential(2)}`));
    made.push(card("Step time", `${number(column("seconds"), 1)} s`, `of it ${number(column("data_wait_seconds"), 1)} s without data`));
    made.push(card("Tokens per second", number(column("tokens_per_second"), 0), column("mfu") === null ? "" : `MFU ${number(100 * column("mfu"), 1)} %`));
    if (column("gpu_memory_gb")) made.push(card("GPU memory", `${number(column("gpu_memory_gb"), 1)} GB`,
      column("gpu_utilization") === null ? "" : `utilization ${number(column("gpu_utilization"), 0)} %`));
  }
  if (speed !== undefined) made.push(card("Tokens a second", number(speed, 0), `all members; ${number(neuron.gauges.dt_network_tokens / 1e9, 2)} B in all`));
  if (neuron.tokens_a_day !== null) made.push(card("Tokens a day", amount(neuron.tokens_a_day), "of text trained on, pauses counted"));
  if (disk) {
    const share = disk.free / disk.total;
    made.push(card("Disk", `${number(disk.free / 1e9, disk.free < 1e10 ? 1 : 0)} GB free`, `${number(100 * share, 0)} % of ${number(disk.total / 1e9, 0)} GB`,
      disk.free < Math.max(disk.needed, 1e9) ? "bad" : share < 0.1 ? "fresh low" : "fresh"));
  }
  if (launch.restarts || crash && crash.at) made.push(card("Restarts", number(launch.restarts, 0),
    crash.at ? `last crash ${ago(crash.at)}: ${crash.text}` : "", crash.at && present() - crash.at < 3600 ? "bad" : ""));
  return made;
}

// Warnings that still matter: none of an earlier start, none that is solved, each sentence once.
function problemsOf(neuron) {
  const start = newestOf(neuron, "start") || newestOf(neuron, "starting"), found = new Map();
  const since = Math.max(start ? start.time - START_SECONDS : 0, present() - (neuron.verdict[2] === "good" ? SOLVED_SECONDS : DAY));
  for (const p of neuron.tables.problem.filter((each) => each.time >= since)) {
    const same = String(p.text).replace(/[0-9]+/g, "#"), times = (found.get(same) || { times: 0 }).times + 1;
    found.delete(same);  // the newest one last
    found.set(same, { ...p, times });
  }
  return [...found.values()].reverse().slice(0, SHOWN_ROWS);
}

// --- curves -----------------------------------------------------------------------------------

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
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

// The mean of the points around each, a thirtieth of the curve: single steps scatter.
function smooth(points) {
  const reach = Math.floor(points.length / 60);
  return points.map(([time], i) => {
    const around = points.slice(Math.max(0, i - reach), i + reach + 1);
    return [time, around.reduce((sum, p) => sum + p[1], 0) / around.length];
  });
}

// Lines over time, of the steps' columns; `rows` and `columns` of something else.
function chart(id, title, unit, neuron, series, digits, rows = neuron.steps, columns = neuron.columns) {
  const place = $(id), width = Math.max(280, place.clientWidth - 30), height = 190, at = columns.indexOf("time");
  const lines = series.map((s) => ({ ...s, points: rows.map((row) => [row[at], row[columns.indexOf(s.column)]])
    .filter((p) => p[0] !== null && p[1] !== null) })).filter((s) => s.points.length);
  place.hidden = !lines.length;
  if (!lines.length) return;
  const all = lines.flatMap((s) => s.points), times = all.map((p) => p[0]), sorted = all.map((p) => p[1]).sort((a, b) => a - b);
  const t0 = times.reduce((a, b) => Math.min(a, b)), t1 = times.reduce((a, b) => Math.max(a, b));
  let low = sorted[0], high = sorted[Math.min(sorted.length - 1, Math.ceil(sorted.length * 0.995))];
  if (series.length > 1 || low > 0 && low < 0.3 * high) low = Math.min(0, low);
  if (high === low) high = low + Math.max(1, Math.abs(low) / 10);
  const left = 48, right = 8, top = 8, bottom = 22;
  const x = (t) => left + (t1 === t0 ? 1 : (t - t0) / (t1 - t0)) * (width - left - right);
  const y = (v) => top + (1 - (Math.min(v, high) - low) / (high - low)) * (height - top - bottom);
  const told = (s) => `${s.name} ${number(s.points.at(-1)[1], digits)} ${unit}`.trim();
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", preserveAspectRatio: "none",
    "aria-label": `${title} since ${moment(t0)}: ${lines.map(told).join(", ")}; lowest ${number(sorted[0], digits)}, highest ${number(sorted.at(-1), digits)}` });
  for (let i = 0; i <= 3; i++) {
    const value = low + (high - low) * i / 3, shownDigits = high - low < 3 ? digits : high - low < 30 ? Math.min(digits, 1) : 0;
    drawing.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, shownDigits)));
  }
  for (const [t, anchor] of t0 === t1 ? [[t1, "end"]] : [[t0, "start"], [t1, "end"]]) drawing.append(shape("text", { x: x(t), y: height - 4, "text-anchor": anchor }, moment(t)));
  const marks = neuron.marks.filter((mark) => mark.time >= t0 && mark.time <= t1), every = Math.ceil(marks.length / 40);
  for (const mark of marks.filter((_, i) => i % every === 0)) {  // more would hide the curve
    const line = shape("line", { class: "mark", x1: x(mark.time), x2: x(mark.time), y1: top, y2: height - bottom });
    line.append(shape("title", {}, `outer step ${mark.outer_step}`));
    drawing.append(line);
  }
  const draw = (part, style) => drawing.append(shape("polyline", { class: style, points: part.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") }));
  for (const s of lines) for (const part of partsOf(s.points)) {
    if (s.smooth) draw(part, "raw");
    draw(s.smooth ? smooth(part) : part, s.style);
  }
  replace(place, element("figcaption", {}, element("b", {}, title), ...lines.map((s) => element("span", { class: `key-${s.style}` }, told(s)))), drawing);
}

// --- tables -----------------------------------------------------------------------------------

function table(id, title, heads, rows) {  // on a phone each row is a card, whose cells name themselves
  const cell = (content, i) => element("td", { "data-head": heads[i] }, element("span", {}, content));
  replace($(id), ...(rows.length ? [element("h2", {}, title), element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((h) => element("th", { scope: "col" }, h)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell)))))] : []));
}

const RANK_FIGURES = [["memory_bytes", "memory", "GB", 1e9, 2], ["gpu_memory_bytes", "GPU memory", "GB", 1e9, 1],
  ["gpu_utilization_percent", "GPU used", "%", 1, 0], ["gpu_temperature_celsius", "heat", "°C", 1, 0], ["gpu_power_watts", "power", "W", 1, 0]];

function tables(neuron) {
  const newest = (kind) => neuron.tables[kind].slice(-SHOWN_ROWS).reverse(), coloured = (kind, text) => element("span", { class: kind }, text);
  table("rounds", "Rounds", ["time", "outer step", "result", "miners", "seconds"], newest("round").map((r) => [moment(r.time), r.outer_step + 1,
    !r.ok ? coloured("not", `failed: ${causeOf(r)}`) : tookPart(r) ? coloured("ok", r.fate || "published") : coloured(["refused", "missed"].includes(r.fate) ? "not" : "", r.fate),
    (r.participants || []).length || "–", number(r.seconds, 1)]));
  table("publications", "Uploads", ["time", "revision", "result", "MB", "seconds"], newest("publication").map((p) => [moment(p.time), p.revision,
    p.ok ? coloured("ok", "uploaded") : coloured("not", p.reason || "failed"), number(p.bytes_sent / 1e6, 1), number(p.seconds, 1)]));
  table("scores", "Scores", ["uid", "random", "assigned", "train", "all-reduce", "total"], Object.entries(neuron.scores ? neuron.scores.scores : {})
    .sort((a, b) => b[1].total - a[1].total).slice(0, 20).map(([uid, s]) => [uid, number(s.random, 2), number(s.assigned, 3), number(s.train, 3), number(s.all_reduce, 0), number(s.total, 3)]));
  const ranks = [...new Set(Object.keys(neuron.gauges).map((k) => /^dt_rank_\w+\.(\d+)$/.exec(k)).filter(Boolean).map((m) => Number(m[1])))].sort((a, b) => a - b);
  const figure = (rank, [name, , unit, scale, digits]) => {
    const value = neuron.gauges[`dt_rank_${name}.${rank}`];
    return value === undefined ? "–" : `${number(value / scale, digits)} ${unit}`;
  };
  const measured = RANK_FIGURES.filter((f) => ranks.some((rank) => figure(rank, f) !== "–"));
  table("ranks", "Ranks", ["rank", ...measured.map((f) => f[1])], ranks.map((rank) => [rank, ...measured.map((f) => figure(rank, f))]));
  table("subnet", "All neurons", ["neuron", "verdict", "score", "step", "loss", "tokens/s", "rounds"], neurons.size < 2 ? [] : [...neurons.values()].map((n) => {
    const closes = closesOf(n), score = scoreOf(n), column = (name) => columnOf(n, name);
    return [titleOf(n), coloured(n.verdict[2] === "bad" ? "not" : "", n.verdict[0]), score ? number(score.total, 3) : "–", n.steps.length ? `${column("outer_step")} . ${column("inner_step")}` : "–",
      number(column("loss"), 3), number(column("tokens_per_second"), 0), `${closes.filter(tookPart).length} of ${closes.length}`];
  }));
}

// --- drawing ----------------------------------------------------------------------------------

function buttons() {
  replace($("neurons"), ...(neurons.size < 2 ? [] : [...neurons.values()].map((neuron) => element("button",
    { type: "button", name: neuron.name, "aria-pressed": String(neuron.name === shown), class: neuron.verdict[2] === "bad" ? "bad" : "" },
    `${neuron.verdict[2] === "bad" ? "⚠ " : ""}${titleOf(neuron)}`))));
}

function draw() {
  $("connection").textContent = lost ? "connection lost" : heard ? "live" : "connecting";
  $("connection").classList.toggle("lost", lost);
  const neuron = neurons.get(shown);
  if (!neuron) return;
  const title = titleOf(neuron), uid = uidOf(neuron), name = uid === undefined ? title : `${title}, uid ${uid}`;
  replace($("title"), name);
  replace($("hotkey"), (newestOf(neuron, "start") || {}).hotkey || "");
  buttons();
  replace($("work"), ...workCards(neuron));
  replace($("speed"), ...speedCards(neuron));
  const age = neuron.facts.looked ? present() - neuron.facts.looked : 0;
  for (const id of ["work", "speed"]) $(id).classList.toggle("old", lost || !runs(neuron) || age > 5 * FRESH_SECONDS);
  const red = [...document.querySelectorAll(".cards .card.bad h2")].map((head) => head.textContent).join(", ");
  let [word, words, kind, remedy] = neuron.verdict;
  if (lost) [word, words, kind, remedy] = ["connection lost", `the dashboard, its machine or the tunnel to it is down; figures of ${clock(heard / 1000)}`, "bad", ""];
  else if (kind === "good" && red) [words, kind] = [`${words ? `${words}; ` : ""}look at: ${red}`, "wait"];
  document.title = `${kind === "bad" ? "⚠ " : ""}${name}`;
  $("verdict").className = kind;
  replace($("verdict"), element("h2", {}, word), element("p", {}, words), ...(remedy ? [element("p", { class: "remedy" }, remedy)] : []),
    ...(age > FRESH_SECONDS ? [element("p", { class: "age" }, `The miner's own figures are as of ${span(age)} ago.`)] : []));
  const problems = problemsOf(neuron);
  replace($("problems"), ...(problems.length ? [element("h2", {}, "Warnings and errors"), element("ul", {}, ...problems.map((p) => element("li", { class: p.level || "" },
    element("time", {}, moment(p.time)), p.text, p.times > 1 ? ` (${p.times} times)` : "")))] : []));
  chart("loss", "Loss", "nats", neuron, [{ column: "loss", name: "inner step", style: "a", smooth: true }], 3);
  chart("time", "Where a step's time goes", "s", neuron, [{ column: "seconds", name: "step", style: "a" },
    { column: "data_wait_seconds", name: "of it without data", style: "b" }, { column: "between_seconds", name: "before it: rounds, loads", style: "c" }], 2);
  chart("tokens", "Tokens per second", "", neuron, [{ column: "tokens_per_second", name: "all ranks", style: "a" }], 0);
  chart("memory", "GPU memory", "GB", neuron, [{ column: "gpu_memory_gb", name: "peak", style: "a" }], 1);
  chart("counts", `Uploads and closes, by the ${neuron.counts.seconds === DAY ? "day" : "hour"}`, "", neuron, [
    { column: "uploads", name: "uploads", style: "a" }, { column: "failed", name: "failed uploads", style: "b" },
    { column: "taken", name: "closes merged", style: "c" }, { column: "missed", name: "missed", style: "d" }], 0,
  neuron.counts.rows.length > 1 ? neuron.counts.rows : [], ["time", "uploads", "failed", "taken", "missed"]);
  tables(neuron);
  if (neuron.steps.length && !performance.getEntriesByName("drawn").length) performance.mark("drawn");
}

async function ask() {
  try {
    const answer = await fetch(`history?shown=${encodeURIComponent(shown)}`, { signal: AbortSignal.timeout(SILENT_MS) });
    const found = await answer.json();
    heard = Date.now(); lost = false; faults = found.faults;
    ahead = Math.abs(heard / 1000 - found.now) > 5 ? heard / 1000 - found.now : 0;
    neurons = new Map(found.neurons.map((neuron) => [neuron.name, neuron]));
    if (!neurons.has(shown)) shown = ([...neurons.values()].find((n) => n.steps.length) || found.neurons[0] || { name: "" }).name;
  } catch (problem) {  // it is away, or a tunnel broke without an error
    lost = true;
  }
  draw();
}

async function follow() {
  if (!document.hidden || !heard) await ask();
  setTimeout(follow, EVERY_MS);
}

$("neurons").addEventListener("click", (event) => { if (event.target.name) { shown = event.target.name; draw(); ask(); } });
if (location.search) history.replaceState(null, "", location.pathname);  // the token stays with the cookie
window.addEventListener("resize", draw);
document.addEventListener("visibilitychange", ask);
follow();
