"use strict";
// The planner in the browser: `commfree_planner` for links without latency, where a step has a short formula or, for
// DiLoCo, a short simulation. tests/planner/test_page.py compares every figure with `commfree_planner`.
(() => { // all names are local: the theme's scripts have global ones, and none may be declared twice

const TARGET = 0.95; // share of the time for computing, from which a method is recommended
const POWER_SGD_RANK = 4;
const BLOCKS_PER_FRAGMENT = 3;
const SYNC_EVERY = 100, OVERLAP_STEPS = 1; // defaults of `commfree-plan`
const CYCLES = 100; // a link that is slightly too slow builds up a backlog for so long
// of `sync_every="auto"`
const AUTO_SYNC_EVERY = [10, 20, 30, 50, 100, 200];
const AUTO_OVERLAP_STEPS = [5, 10, 15, 20, 30, 50, 75, 100];
const AUTO_RESERVE = 1.25;

const sum = values => values.reduce((total, value) => total + value, 0);

// Bytes: commfree_planner/bytes_sent.py

const PAYLOAD_BYTES = {
  fp32: numel => 4 * numel,
  bf16: numel => 2 * numel,
  fp4: numel => 8 * Math.ceil(numel / 16) + Math.ceil(numel / 256),
};

const allReduceBytes = (bytes, replicas) => 2 * bytes * (replicas - 1) / replicas;
const exchangeBytes = (bytes, replicas) => Math.min(bytes * (replicas - 1), allReduceBytes(bytes, replicas));

// through a store: commfree_planner/store.py
const padded = bytes => 8 * Math.ceil(bytes / 8);

function storeExchange(numel, members, wire) {
  const blocks = Math.ceil(numel / 256);
  const most = Math.min(32, Math.max(Math.floor(blocks / 16), 1));
  const parts = Math.ceil(blocks / Math.ceil(blocks / most));
  const width = parts > 1 ? 256 * Math.ceil(numel / (256 * parts)) : numel;
  const payload = padded(PAYLOAD_BYTES[wire](width)), part = 40 + 72 + payload, message = parts * part;
  const means = parts * (40 + padded(4 * (members + 1)) + payload) + 40 + 72 * members;
  const moved = message + (members - 1) * Math.ceil(parts / Math.min(parts, members)) * part + means;
  if (moved < members * message)
    return { sent: message + means / members, moved, total: (2 * members - 1) * message + members * means };
  return { sent: message, moved: members * message, total: members ** 2 * message };
}

function voteBytes(numel, replicas) {
  const down = replicas % 2 === 0 ? 2 : 1; // an even number of voters has ties
  return numel / 8 * (replicas - 1) * Math.min(1, (1 + down) / replicas);
}

function powerSgdFloats(numel, width, inBlock) {
  const sides = inBlock ? 16 / 12 * numel / width : numel / width + width;
  return Math.min(POWER_SGD_RANK * sides, numel);
}

// The model: parameters outside of blocks, which compute nothing, then those of each block

function layersOf({ parameters, blocks, outside }) {
  const end = i => Math.floor((parameters - outside) * i / blocks);
  return [outside, ...Array.from({ length: blocks }, (_, i) => end(i + 1) - end(i))];
}

const defaultFragments = run => Math.ceil(run.blocks / BLOCKS_PER_FRAGMENT) + (run.outside > 0);

function fragmentsOf(run, count) {
  const layers = layersOf(run);
  if (count === 1) return [sum(layers)];
  const groups = count - (run.outside > 0);
  const found = Array.from({ length: groups }, (_, p) => sum(layers.slice(1).filter((_, i) => i % groups === p)));
  return run.outside > 0 ? [...found, run.outside] : found;
}

// Time: commfree_planner/simulation.py without latency

const bytesPerSecond = gbit => gbit * 1e9 / 8;

// a layer's gradients leave while the backward continues, and its next forward waits for them. When the next backward
// begins, everything has arrived, so all steps are the same
function secondsWithGradients(run, layers, sent, gbit) {
  const share = run.seconds / (run.parameters - run.outside);
  const seconds = layers.map((numel, layer) => layer ? share * numel : 0);
  const arrivals = [];
  let now = 0, linkFree = 0;
  for (let layer = layers.length - 1; layer >= 0; layer--) {
    now += 2 / 3 * seconds[layer];
    arrivals[layer] = linkFree = Math.max(now, linkFree) + sent[layer] / bytesPerSecond(gbit);
  }
  seconds.forEach((forward, layer) => { now = Math.max(now, arrivals[layer]) + forward / 3; });
  return now;
}

// fragment p leaves after step p H / P of a cycle, and the step after the next tau steps waits for it
function secondsOfDiloco(run, sent, every, overlap, gbit) {
  const leaving = Array.from({ length: every }, () => 0);
  sent.forEach((bytes, p) => { leaving[Math.floor(p * every / sent.length)] += bytes / bytesPerSecond(gbit); });
  const arrivals = new Float64Array(CYCLES * every + overlap + 1);
  let now = 0, linkFree = 0, begin = 0;
  for (let cycle = 0, step = 0; cycle < CYCLES; cycle++) {
    begin = now;
    for (let place = 0; place < every; place++, step++) {
      now = Math.max(now, arrivals[step]) + run.seconds;
      if (leaving[place]) arrivals[step + overlap + 1] = linkFree = Math.max(now, linkFree) + leaving[place];
    }
  }
  // in the long run no cycle is shorter than its messages
  return Math.max(now - begin, sum(sent) / bytesPerSecond(gbit)) / every;
}

// what `sync_every="auto"` settles on: commfree_planner/pace.py
function autoPace(run, sent, gbit) {
  const steps = sent.map(bytes => bytes / bytesPerSecond(gbit) / run.seconds);
  const first = (choices, least) => choices.find(choice => choice >= least) || choices[choices.length - 1];
  const overlap = first(AUTO_OVERLAP_STEPS, AUTO_RESERVE * Math.max(...steps));
  return [first(AUTO_SYNC_EVERY, Math.max(AUTO_RESERVE * sum(steps), overlap + 2)), overlap];
}

// The rows of the table. A run has: parameters, outside, blocks, seconds, gbit, replicas, every, accumulated

function everyStep(run, name, setting, bytesOf, accumulated = 1) {
  const layers = layersOf(run), sent = layers.map(bytesOf);
  const waiting = gbit => secondsWithGradients(run, layers, sent, gbit) - run.seconds;
  return { name, setting, bytes: sum(sent) / accumulated, seconds: gbit => run.seconds + waiting(gbit) / accumulated };
}

function diloco(run, name, count, wire, pace) {
  const sent = fragmentsOf(run, count).map(numel => exchangeBytes(PAYLOAD_BYTES[wire](numel), run.replicas));
  return exchanges(run, name, count, wire, pace, sent, sent);
}

// the link is busy for `moved` bytes: those of one member or, if the store is one machine, of all. One member also stores
// the state, 8 bytes per parameter every 4 cycles, here spread evenly
function elastic(run, name, count, wire, pace, moved) {
  const found = fragmentsOf(run, count).map(numel => storeExchange(numel, run.replicas, wire));
  const state = 8 * run.parameters / (4 * count), sent = found.map(one => one.sent + state / run.replicas);
  return exchanges(run, name, count, wire, pace, sent, found.map(one => one[moved] + state));
}

function exchanges(run, name, count, wire, pace, sent, moved) {
  const [every, overlap] = pace(moved, run.gbit);
  return {
    name, setting: `H=${every}, P=${count}, tau=${overlap}, ${wire}`, bytes: sum(sent) / every, every, overlap,
    seconds: gbit => secondsOfDiloco(run, moved, ...pace(moved, gbit), gbit),
  };
}

function plan(run) {
  const { replicas, every } = run, count = defaultFragments(run);
  const width = Math.sqrt((run.parameters - run.outside) / run.blocks / 12);
  const gradients = dtype => numel => allReduceBytes(PAYLOAD_BYTES[dtype](numel), replicas);
  const lowRank = (numel, layer) => allReduceBytes(Math.round(4 * powerSgdFloats(numel, width, layer > 0)), replicas);
  const fixed = overlap => () => [every, overlap];
  return [
    everyStep(run, "data parallel", "every step, fp32", gradients("fp32")),
    everyStep(run, "DDP, accumulation", `every ${run.accumulated} steps, fp32`, gradients("fp32"), run.accumulated),
    everyStep(run, "DDP, bf16 hook", "every step, bf16", gradients("bf16")),
    everyStep(run, "DDP, PowerSGD", `every step, rank ${POWER_SGD_RANK}`, lowRank),
    everyStep(run, "Lion, votes", "every step, 1 bit", numel => voteBytes(numel, replicas)),
    diloco(run, "DiLoCo", 1, "fp32", fixed(0)),
    diloco(run, "streaming", count, "fp32", fixed(0)),
    diloco(run, "+ overlap", count, "fp32", fixed(OVERLAP_STEPS)),
    diloco(run, "+ fp4", count, "fp4", fixed(OVERLAP_STEPS)),
    elastic(run, "elastic bucket", count, "fp4", fixed(OVERLAP_STEPS), "moved"),
    elastic(run, "elastic hub", count, "fp4", fixed(OVERLAP_STEPS), "total"),
    diloco(run, 'sync_every="auto"', count, "fp4", (sent, gbit) => autoPace(run, sent, gbit)),
  ].map(row => ({ ...row, utilization: Math.min(1, run.seconds / row.seconds(run.gbit)) }));
}

// Words

const percent = row => `${(100 * row.utilization).toFixed(1)} %`;
const hours = (run, row) => run.steps * run.seconds / row.utilization / 3600;

function take(rows) {
  const named = name => rows.find(row => row.name === name);
  const ddp = named("data parallel"), bf16 = named("DDP, bf16 hook"), auto = named('sync_every="auto"');
  if (ddp.utilization >= TARGET) return `Use ddp: it computes for ${percent(ddp)} of the time.`;
  if (bf16.utilization >= TARGET)
    return `Use ddp with torch's bf16_compress_hook: ${percent(bf16)} of the time, and ${percent(ddp)} without it.`;
  return `Use streaming_diloco: with its default, sync_every="auto", it computes for ${percent(auto)} of the time, ` +
    `ddp for ${percent(ddp)}. It exchanges every ${auto.every} steps on this link, with ` +
    `overlap_steps=${auto.overlap}. ` +
    `If the weights must be equal after every step, use distributed_lion: ${percent(named("Lion, votes"))}.`;
}

// each option with its value, so that a line breaks only between them. `commfree-plan` recommends "auto" unless H is
// fixed
const command = run => ["commfree-plan", `--parameters ${run.parameters}`, `--blocks ${run.blocks}`,
  `--outside ${run.outside}`, `--step-time ${run.seconds}`, `--bandwidth ${run.gbit}`,
  `--num-replicas ${run.replicas}`, ...(run.every === SYNC_EVERY ? [] : [`--sync-every ${run.every}`])];

function human(value, units) {
  let i = 0;
  while (value >= 999.5 && i < units.length - 1) { value /= 1000; i++; }
  return `${+value.toPrecision(3)} ${units[i]}`;
}

// what is wrong with a number, or nothing
function complaint(label, text, { min, max, step }) {
  const whole = step !== "any", number = text === "" ? NaN : +text;
  if (number >= +min && number <= +max && (!whole || Number.isInteger(number))) return "";
  const came = text === "" ? "is not a number" : `is ${text}`;
  return `"${label}" ${came}. Enter a ${whole ? "whole " : ""}number from ${min} to ${max}.`;
}

// The page

const at = id => document.getElementById(id);
const STYLES = [ // colors that color-blind readers can tell apart, and dashes
  ["currentColor"], ["currentColor", "2 4"], ["#999999"], ["#cc79a7"], ["#009e73"],
  ["#d55e00", "7 5"], ["#e69f00"], ["#56b4e9"], ["#0072b2"], ["#882255"], ["#882255", "7 5"], ["#0072b2", "2 4"],
];

function pen(i) {
  const [color, dashes] = STYLES[i];
  return `fill="none" stroke="${color}" stroke-width="2.5"${dashes ? ` stroke-dasharray="${dashes}"` : ""}`;
}

const key = i => '<svg class="key" viewBox="0 0 30 10" aria-hidden="true">' +
  `<line x1="0" x2="30" y1="5" y2="5" ${pen(i)}/></svg>`;

function chart(run, rows) {
  const [w, h, left, bottom, top] = [640, 320, 58, 48, 10];
  const x = power => left + (power + 3) / 6 * (w - left - 24);
  const y = share => top + (1 - share) * (h - bottom - top);
  let svg = `<svg viewBox="0 0 ${w} ${h}" role="img" aria-label="utilization over bandwidth, by method">`;
  for (let p = -3; p <= 3; p++)
    svg += `<line x1="${x(p)}" x2="${x(p)}" y1="${y(1)}" y2="${y(0)}" stroke="var(--line)"/>` +
      `<text x="${x(p)}" y="${h - 26}" text-anchor="middle">${10 ** p}</text>`;
  for (const s of [0, 0.5, 1]) svg += `<text x="${left - 6}" y="${y(s) + 4}" text-anchor="end">${100 * s} %</text>`;
  const curve = (row, i) => {
    const points = [];
    for (let p = -3; p <= 3.001; p += 0.05)
      points.push(`${x(p).toFixed(1)},${y(run.seconds / row.seconds(10 ** p)).toFixed(1)}`);
    return `<polyline ${pen(i)} points="${points.join(" ")}"/>`;
  };
  // dashed lines come last: DiLoCo takes as long as blocking fragments, and would be hidden
  const dashed = i => STYLES[i].length > 1;
  const order = rows.map((_, i) => i).sort((a, b) => dashed(a) - dashed(b));
  svg += order.map(i => curve(rows[i], i)).join("");
  const now = x(Math.log10(run.gbit));
  svg += `<line x1="${now}" x2="${now}" y1="${y(1)}" y2="${y(0)}" stroke="var(--now)" stroke-width="2"/>`;
  return svg + `<text x="${w / 2}" y="${h - 4}" text-anchor="middle">Gbit/s that a replica can send</text></svg>`;
}

function table(run, rows) {
  return rows.map((row, i) => `<tr><th scope="row">${key(i)} ${row.name}<small>${row.setting}</small>` +
    `<td>${percent(row)}<td>${+(run.seconds / row.utilization).toPrecision(3)}` +
    `<td>${human(row.bytes, ["B", "kB", "MB", "GB", "TB"])}<td>${+hours(run, row).toPrecision(3)}`).join("");
}

function read(fields) {
  const run = Object.fromEntries(fields.map(field => [field.id, +field.value]));
  run.parameters = Math.round(run.millions * 1e6);
  run.outside = Math.round(run.parameters * run.embeddings / 100);
  return run;
}

function show() {
  const fields = [...document.querySelectorAll(".planner input[type=number]")];
  const label = field => field.labels[0].textContent;
  const wrong = fields.map(field => complaint(label(field), field.value, field)).filter(Boolean);
  at("found").hidden = wrong.length > 0;
  at("take").textContent = wrong.join(" ");
  if (wrong.length) return;
  const run = read(fields), rows = plan(run);
  at("take").textContent = take(rows);
  at("chart").innerHTML = chart(run, rows);
  at("legend").innerHTML = rows.map((row, i) => `<span>${key(i)} ${row.name}</span>`).join("");
  at("hours").textContent = `hours for ${run.steps.toLocaleString("en-US")} steps`;
  at("rows").innerHTML = table(run, rows);
  at("command").innerHTML = command(run).map(part => `<span>${part}</span>`).join(" ");
}

// sliders have a logarithmic scale, and numbers are exact: a slider writes a rounded number, and follows one
function connect() {
  for (const slider of document.querySelectorAll(".planner input[type=range]")) {
    const field = at(slider.dataset.of);
    const follow = () => { if (field.value > 0) slider.value = Math.log10(field.value); };
    slider.addEventListener("input", () => { field.value = +(10 ** slider.value).toPrecision(2); });
    field.addEventListener("input", follow);
    follow();
  }
  document.querySelector(".planner form").addEventListener("input", show);
  show();
}

if (typeof document === "undefined") module.exports = { plan, take, command, complaint, hours };
else connect();

})();
