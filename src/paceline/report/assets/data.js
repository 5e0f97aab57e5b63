// The records inside of the page, as report/embed.py wrote them. Times are microseconds since the
// first record, on one clock; -1 is what did not happen.
"use strict";

const STAMPS = ["forwardBegan", "forwardEnded", "backwardBegan", "backwardEnded", "reduced", "optimizerBegan", "optimizerEnded"];

async function inflate(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Int32Array(await new Response(stream).arrayBuffer());
}

async function readRank(packed, buckets, places) {
  const values = await inflate(packed.data);
  const n = packed.steps;
  let at = 0;
  const column = () => values.subarray(at, (at += n));
  const rank = { rank: packed.rank, n, step: column(), wrapper: column(), began: new Float64Array(n) };
  const gaps = column();
  for (let i = 0, sum = 0; i < n; i++) rank.began[i] = sum += gaps[i];
  for (const name of STAMPS) rank[name] = column();
  rank.lost = column();
  rank.blame = column();
  rank.buckets = [];
  for (let b = 0; b < buckets; b++) rank.buckets.push({ ready: column(), began: column(), ended: column() });
  rank.rowOf = new Int32Array(places.size).fill(-1);
  for (let i = 0; i < n; i++) rank.rowOf[places.get(`${rank.wrapper[i]}:${rank.step[i]}`)] = i;
  return rank;
}

async function readRun() {
  const packed = JSON.parse(document.getElementById("data").textContent);
  const places = new Map(packed.numbers.map((step, at) => [`${packed.wrappers[at]}:${step}`, at]));
  const ranks = await Promise.all(packed.ranks.map((each) => readRank(each, packed.buckets, places)));
  return { ...packed, places, ranks, count: packed.numbers.length };
}

// When a row of a rank is over.
function endOf(rank, i) {
  return rank.began[i] + Math.max(rank.reduced[i], rank.optimizerEnded[i]);
}

// From reduction to reduction, as the analysis has it; the first row has none before it.
function tookOf(rank, i) {
  const before = i ? rank.began[i - 1] + rank.reduced[i - 1] : rank.began[i];
  return rank.began[i] + rank.reduced[i] - before;
}

// The pieces of a row, in order: kind, begin, end.
function piecesOf(rank, i) {
  const from = rank.began[i];
  const at = (name) => from + Math.max(0, rank[name][i]);
  const pieces = [
    ["input", from, at("forwardBegan")],
    ["forward", at("forwardBegan"), at("forwardEnded")],
    ["loss", at("forwardEnded"), at("backwardBegan")],
    ["backward", at("backwardBegan"), at("backwardEnded")],
  ];
  const arrived = at("backwardEnded");
  const alone = Math.min(arrived + rank.lost[i], at("reduced"));
  pieces.push(["lost", arrived, alone], ["exposed", alone, at("reduced")]);
  if (rank.optimizerEnded[i] >= 0) pieces.push(["optimizer", at("reduced"), at("optimizerEnded")]);
  return pieces.filter(([, begin, end]) => end > begin);
}

function showMs(us) {
  const ms = us / 1000;
  if (ms >= 1000) return `${(ms / 1000).toPrecision(3)} s`;
  if (ms >= 1) return `${ms >= 100 ? ms.toFixed(0) : ms.toPrecision(3)} ms`;
  return `${us.toFixed(0)} µs`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
