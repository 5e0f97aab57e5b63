// The timeline: one canvas, two lanes for each shown rank, and an overview above it.
"use strict";

const GUTTER = 58, AXIS = 22, LANE = 24, BUCKET_LANE = 20, GAP = 12;
const WORDS = { lost: "waiting", exposed: "communication" };
const KINDS = ["input", "forward", "loss", "backward", "lost", "exposed", "optimizer"];

// White or nearly black, whichever is easier to read on a colour (#rrggbb).
function inkOn(background) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = parseInt(background.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return 1.05 / (light + 0.05) > (light + 0.05) / 0.058 ? "#ffffff" : "#15181d";
}

class Timeline {
  constructor(run, canvas, overview, detail) {
    Object.assign(this, { run, canvas, overview, detail, shown: run.ranks, chosen: -1 });
    this.last = Math.max(...run.ranks.map((rank) => endOf(rank, rank.n - 1)));
    this.from = 0;
    this.to = this.last;
    this.listen();
  }

  listen() {
    const { canvas, overview } = this;
    let held = null;
    canvas.addEventListener("pointerdown", (e) => {
      held = { x: e.clientX, from: this.from, moved: false };
      canvas.setPointerCapture(e.pointerId);
      canvas.classList.add("dragging");
    });
    canvas.addEventListener("pointermove", (e) => {
      if (!held) canvas.title = this.hint(this.placeAt(e));
      if (!held) return;
      if (Math.abs(e.clientX - held.x) > 3) held.moved = true;
      this.show(held.from - (e.clientX - held.x) / this.scale, undefined);
    });
    const release = (e) => {
      if (held && !held.moved && e.type === "pointerup") this.chooseAt(e);
      held = null;
      canvas.classList.remove("dragging");
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      this.zoom(Math.exp(e.deltaY / 200), this.timeAt(e));
    }, { passive: false });
    canvas.addEventListener("keydown", (e) => this.press(e));
    const jump = (e) => {
      const box = overview.getBoundingClientRect();
      const at = ((e.clientX - box.left - GUTTER) / (box.width - GUTTER)) * this.last;
      this.show(at - (this.to - this.from) / 2, undefined);
    };
    overview.addEventListener("pointerdown", (e) => { overview.setPointerCapture(e.pointerId); jump(e); });
    overview.addEventListener("pointermove", (e) => { if (e.buttons) jump(e); });
  }

  get scale() { return (this.canvas.clientWidth - GUTTER) / (this.to - this.from); }
  x(time) { return GUTTER + (time - this.from) * this.scale; }
  timeAt(e) { return this.from + (e.clientX - this.canvas.getBoundingClientRect().left - GUTTER) / this.scale; }

  // Show a span of time. Without an end, the span keeps its length.
  show(from, to) {
    const span = Math.min(this.last, Math.max(20, (to ?? from + this.to - this.from) - from));
    this.from = Math.min(Math.max(0, from), Math.max(0, this.last - span));
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  press(e) {
    const span = this.to - this.from;
    const actions = {
      ArrowLeft: () => this.show(this.from - span / 5), ArrowRight: () => this.show(this.from + span / 5),
      ArrowUp: () => this.zoom(0.7), ArrowDown: () => this.zoom(1 / 0.7),
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7),
      Home: () => this.show(0, this.last), n: () => this.choose(this.chosen + 1), p: () => this.choose(this.chosen - 1),
    };
    if (!actions[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    actions[e.key]();
  }

  get rowHeight() { return LANE + (this.run.buckets ? BUCKET_LANE : 0) + GAP; }

  // What the pointer is on: a rank, one of its rows if it has one there, the time, and which lane.
  placeAt(e) {
    const y = e.clientY - this.canvas.getBoundingClientRect().top - AXIS, time = this.timeAt(e);
    const rank = this.shown[Math.floor(y / this.rowHeight)];
    const i = rank ? this.firstRow(rank, time) : -1;
    const isThere = rank && i < rank.n && time >= rank.began[i];
    return { rank, i: isThere ? i : -1, time, isLower: y % this.rowHeight > LANE };
  }

  // The same in words.
  hint({ rank, i, time, isLower }) {
    if (i < 0) return "";
    const found = isLower
      ? rank.buckets.map((bucket, b) => {
        const [ready, ended] = [bucket.ready[i], bucket.ended[i]].map((value) => rank.began[i] + value);
        if (bucket.ready[i] < 0 || bucket.ended[i] < 0 || time < ready || time > ended) return "";
        const began = Math.max(ready, Math.min(ended, this.lastStart(rank, i, b)));
        return time < began ? `bucket ${b} ready, waits ${showMs(began - ready)}` : `bucket ${b} reducing ${showMs(ended - began)}`;
      })
      : piecesOf(rank, i).map(([kind, from, to]) => (time >= from && time < to ? `${WORDS[kind] ?? kind} ${showMs(to - from)}` : ""));
    const told = found.filter(Boolean).join("; ");
    return told && `rank ${rank.rank}, step ${rank.step[i]}: ${told}`;
  }

  chooseAt(e) {
    const { rank, i } = this.placeAt(e);
    if (i >= 0) this.choose(this.run.places.get(`${rank.wrapper[i]}:${rank.step[i]}`), false);
  }

  // Choose a step by its place among all steps, and bring it into view.
  choose(place, move = true) {
    this.chosen = Math.min(this.run.count - 1, Math.max(0, place));
    const rows = this.shown.map((rank) => [rank, rank.rowOf[this.chosen]]).filter(([, i]) => i >= 0);
    if (move && rows.length) {
      const from = Math.min(...rows.map(([rank, i]) => rank.began[i]));
      const to = Math.max(...rows.map(([rank, i]) => endOf(rank, i)));
      const margin = (to - from) * 0.06;
      this.show(from - margin, to + margin);
    } else this.draw();
    this.describe();
    this.onChoose?.(this.chosen);
  }

  // The place of the step that took longest.
  slowest() {
    let [worst, place] = [-1, 0];
    for (const rank of this.shown) {
      for (let i = 1; i < rank.n; i++) {
        if (tookOf(rank, i) > worst) [worst, place] = [tookOf(rank, i), this.run.places.get(`${rank.wrapper[i]}:${rank.step[i]}`)];
      }
    }
    return place;
  }

  describe() {
    const table = document.createElement("table");
    table.createCaption().textContent = `Step ${this.run.numbers[this.chosen]}`;
    const head = table.createTHead().insertRow();
    for (const name of ["rank", ...KINDS, "others waited for it"]) {
      const th = head.appendChild(document.createElement("th"));
      th.scope = "col";
      th.className = name === "rank" ? "" : "n";
      th.textContent = WORDS[name] ?? name;
    }
    const body = table.createTBody();
    for (const rank of this.shown) {
      const i = rank.rowOf[this.chosen];
      if (i < 0) continue;
      const row = body.insertRow();
      const th = row.appendChild(document.createElement("th"));
      th.scope = "row";
      th.textContent = `rank ${rank.rank}`;
      const took = Object.fromEntries(piecesOf(rank, i).map(([kind, from, to]) => [kind, to - from]));
      for (const us of [...KINDS.map((kind) => took[kind]), rank.blame[i]]) {
        const cell = row.insertCell();
        cell.className = "n";
        cell.textContent = us ? showMs(us) : "–";
      }
    }
    this.detail.replaceChildren(table);
  }

  // --- drawing ---------------------------------------------------------------------------------

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.drawNow(); });
  }

  prepare(canvas, height) {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    return g;
  }

  drawNow() {
    this.colours = Object.fromEntries([...KINDS, "waits", "reducing", "ink", "muted", "line", "soft", "card", "accent"].map((name) => [name, colour(name)]));
    const row = this.rowHeight;
    const g = this.prepare(this.canvas, AXIS + row * this.shown.length);
    this.drawAxis(g);
    this.shown.forEach((rank, at) => {
      const y = AXIS + at * row;
      g.fillStyle = this.colours.muted;
      g.fillText(`rank ${rank.rank}`, 0, y + LANE / 2);
      g.save();
      g.beginPath();
      g.rect(GUTTER, y, this.canvas.clientWidth - GUTTER, row);
      g.clip();
      this.drawRank(g, rank, y);
      g.restore();
    });
    this.drawOverview();
    this.canvas.dataset.from = this.from;
    this.canvas.dataset.to = this.to;
  }

  drawAxis(g) {
    const width = this.canvas.clientWidth, span = this.to - this.from;
    const rough = span / Math.max(2, (width - GUTTER) / 120);
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    g.fillStyle = this.colours.muted;
    g.strokeStyle = this.colours.line;
    g.beginPath();
    for (let time = Math.ceil(this.from / tick) * tick; time <= this.to; time += tick) {
      const x = Math.round(this.x(time)) + 0.5;
      g.moveTo(x, AXIS - 5);
      g.lineTo(x, this.canvas.clientHeight);
      const text = tick >= 1e6 ? `${(time / 1e6).toFixed(0)} s` : tick >= 1e4 ? `${(time / 1e6).toFixed(2)} s` : tick >= 100 ? `${(time / 1e3).toFixed(1)} ms` : `${(time / 1e3).toFixed(3)} ms`;
      if (x < width - 50) g.fillText(text, x + 4, AXIS / 2 - 2);
    }
    g.stroke();
  }

  // The first row of a rank that ends after a time.
  firstRow(rank, time) {
    let [low, high] = [0, rank.n];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (endOf(rank, middle) < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  drawRank(g, rank, y) {
    const first = this.firstRow(rank, this.from);
    const end = this.firstRow(rank, this.to) + 1;
    const width = this.canvas.clientWidth - GUTTER;
    if (end - first > width / 6) return this.drawMany(g, rank, y, first, Math.min(end, rank.n));
    for (let i = first; i < Math.min(end, rank.n); i++) {
      for (const [kind, from, to] of piecesOf(rank, i)) this.drawPiece(g, kind, from, to, y);
      this.drawBuckets(g, rank, i, y + LANE + 3);
      if (this.run.places.get(`${rank.wrapper[i]}:${rank.step[i]}`) === this.chosen) {
        g.strokeStyle = this.colours.ink;
        g.lineWidth = 1.5;
        g.strokeRect(this.x(rank.began[i]), y - 2, this.x(endOf(rank, i)) - this.x(rank.began[i]), LANE + 4);
      }
    }
  }

  drawPiece(g, kind, from, to, y) {
    const x = this.x(from), width = this.x(to) - x;
    g.fillStyle = this.colours[kind];
    g.fillRect(x, y, Math.max(0.4, width - (width > 4 ? 1 : 0)), LANE);
    if (kind === "lost") this.hatch(g, x, y, width);
    // It may begin left of what is shown, and end right of it.
    const left = Math.max(x, GUTTER), room = Math.min(x + width, this.canvas.clientWidth) - left;
    const word = { lost: "waiting", exposed: "comm." }[kind] ?? kind;
    const text = room > 110 ? `${word} ${showMs(to - from)}` : word;
    if (g.measureText(text).width + 10 > room) return;
    g.fillStyle = inkOn(this.colours[kind]);
    g.fillText(text, left + 6, y + LANE / 2 + 0.5);
  }

  hatch(g, x, y, width) {
    const [from, to] = [Math.max(x, GUTTER), Math.min(x + width, this.canvas.clientWidth)];
    if (to - from < 6) return;
    g.save();
    g.beginPath();
    g.rect(from, y, to - from, LANE);
    g.clip();
    g.strokeStyle = "rgb(255 255 255 / 22%)";
    g.lineWidth = 2;
    g.beginPath();
    for (let at = from - LANE; at < to; at += 8) { g.moveTo(at, y + LANE); g.lineTo(at + LANE, y); }
    g.stroke();
    g.restore();
  }

  drawBuckets(g, rank, i, y) {
    const lanes = Math.min(4, Math.max(1, this.run.buckets)), height = (BUCKET_LANE - 2) / lanes;
    rank.buckets.forEach((bucket, b) => {
      if (bucket.ended[i] < 0 || bucket.ready[i] < 0) return;
      const top = y + (b % lanes) * height;
      const at = (value) => this.x(rank.began[i] + value);
      const starts = this.lastStart(rank, i, b);
      const ready = at(bucket.ready[i]), ended = at(bucket.ended[i]);
      const began = Math.min(ended, Math.max(ready, this.x(starts)));
      g.fillStyle = this.colours.waits;
      g.fillRect(ready, top + height / 2 - 1, began - ready, 2);
      g.fillRect(ready, top, 1.5, height - 1);
      g.fillStyle = this.colours.reducing;
      g.fillRect(began, top, Math.max(0.8, ended - began), height - 1);
    });
  }

  // A reduction begins when the last rank has started it, shown or not.
  lastStart(rank, i, b) {
    const place = this.run.places.get(`${rank.wrapper[i]}:${rank.step[i]}`);
    let last = 0;
    for (const other of this.run.ranks) {
      const row = other.rowOf[place];
      if (row >= 0) last = Math.max(last, other.began[row] + Math.max(other.buckets[b].began[row], other.buckets[b].ready[row]));
    }
    return last;
  }

  // Too many steps for single pieces: for each pixel, the shares of its kinds.
  drawMany(g, rank, y, first, end) {
    const height = LANE + (this.run.buckets ? BUCKET_LANE : 0);
    let i = first;
    for (let x = GUTTER; x < this.canvas.clientWidth && i < end; x += 2) {
      const until = this.from + (x + 2 - GUTTER) / this.scale;
      const sums = {};
      let total = 0;
      for (; i < end && rank.began[i] < until; i++) {
        for (const [kind, from, to] of piecesOf(rank, i)) { sums[kind] = (sums[kind] ?? 0) + to - from; total += to - from; }
      }
      if (total) this.column = [sums, total];
      if (!this.column) continue;
      let top = y;
      for (const kind of KINDS) {
        const part = ((this.column[0][kind] ?? 0) / this.column[1]) * height;
        g.fillStyle = this.colours[kind];
        g.fillRect(x, top, 2, part);
        top += part;
      }
    }
    this.column = null;
  }

  drawOverview() {
    const g = this.prepare(this.overview, 40);
    const width = this.overview.clientWidth - GUTTER;
    const rank = this.shown[0];
    g.fillStyle = this.colours.soft;
    g.fillRect(GUTTER, 0, width, 40);
    if (!rank) return;
    // Each pixel has the longest step that it shows; a long one covers many.
    const columns = new Float64Array(Math.ceil(width) + 1), all = [];
    for (let i = 1; i < rank.n; i++) {
      const took = tookOf(rank, i), end = rank.began[i] + rank.reduced[i];
      const [first, last] = [end - took, end].map((time) => Math.round((Math.max(0, time) / this.last) * width));
      const gap = last - first > 4 ? 1 : 0;
      for (let at = first; at <= last - gap; at++) columns[at] = Math.max(columns[at], took);
      all.push(took);
    }
    const usual = all.sort((a, b) => a - b)[Math.floor(all.length / 2)] || 1;
    columns.forEach((took, at) => {
      if (!took) return;
      g.fillStyle = took > 3 * usual ? this.colours.lost : this.colours.muted;
      const height = Math.min(1, took / (2 * usual)) * 34;
      g.fillRect(GUTTER + at, 40 - height, 1, height);
    });
    const [from, to] = [this.from, this.to].map((time) => GUTTER + (time / this.last) * width);
    g.fillStyle = this.colours.accent;
    g.globalAlpha = 0.22;
    g.fillRect(from, 0, Math.max(3, to - from), 40);
    g.globalAlpha = 1;
    g.fillRect(from, 0, 2, 40);
    g.fillRect(Math.max(from + 2, to - 2), 0, 2, 40);
    g.fillStyle = this.colours.muted;
    g.fillText("all steps", 0, 20);
  }
}
