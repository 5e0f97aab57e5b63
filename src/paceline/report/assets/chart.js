// Step time, waiting and loss over steps. uPlot draws; zoom and keys are here.
"use strict";

const STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [power, 2 * power, 5 * power]);

class StepChart {
  constructor(run, place) {
    Object.assign(this, { run, place, shown: run.ranks, clip: true });
    place.addEventListener("keydown", (e) => this.press(e));
    new ResizeObserver(() => {
      if (this.plot && this.plot.width !== place.clientWidth) this.plot.setSize(this.size());
    }).observe(place);
  }

  size() { return { width: this.place.clientWidth, height: this.place.clientWidth < 600 ? 240 : 300 }; }

  columns() {
    const { run, shown } = this;
    const steps = Array.from({ length: run.count }, (_, place) => place);
    const took = new Array(run.count).fill(null), lost = new Array(run.count).fill(null);
    for (const place of steps) {
      let [longest, sum, ranks] = [0, 0, 0];
      for (const rank of shown) {
        const i = rank.rowOf[place];
        if (i < 1) continue;
        longest = Math.max(longest, tookOf(rank, i));
        sum += rank.lost[i];
        ranks += 1;
      }
      if (ranks) [took[place], lost[place]] = [longest / 1000, sum / ranks / 1000];
    }
    return [steps, took, lost, run.losses];
  }

  draw() {
    const before = this.plot && { ...this.plot.scales.x };
    this.plot?.destroy();
    this.data = this.columns();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
    const number = (place) => this.run.numbers[Math.round(place)] ?? "";
    const fill = (name, alpha) => `color-mix(in srgb, ${colour(name)} ${alpha}%, transparent)`;
    const ms = (_, value) => (value == null ? "–" : showMs(value * 1000));
    const hasLoss = this.run.losses.some((loss) => loss !== null);
    this.plot = new uPlot({
      ...this.size(),
      hooks: { draw: [(plot) => this.mark(plot)] },
      cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false }, ms: { range: (_, __, most) => [0, this.limit(most) || 1] } },
      axes: [
        { ...axis, incrs: STEPS, splits: (_, __, low, high, every) => this.ticks(low, high, every), values: (_, places) => places.map((place) => (Number.isInteger(place) ? number(place) : "")) },
        { ...axis, scale: "ms", size: 66, values: (_, values) => values.map((value) => (value ? showMs(value * 1000).replace(/\.0+ /, " ") : "0")) },
        { ...axis, scale: "loss", side: 1, size: 56, grid: { show: false } },
      ].slice(0, hasLoss ? 3 : 2),
      series: [
        { label: "step", value: (_, place) => (place == null ? "–" : number(place)) },
        { label: "step time", scale: "ms", stroke: colour("forward"), width: 1.5, fill: fill("forward", 12), value: ms },
        { label: "waiting for ranks", scale: "ms", stroke: colour("lost"), width: 1.2, fill: fill("lost", 25), value: ms },
        { label: "loss", scale: "loss", stroke: colour("optimizer"), width: 1.8, value: (_, value) => (value == null ? "–" : value.toPrecision(4)) },
      ].slice(0, hasLoss ? 4 : 3),
    }, this.data.slice(0, hasLoss ? 4 : 3), this.place);
    if (before && before.min != null && before.max != null) this.plot.setScale("x", { min: before.min, max: before.max });
    this.place.querySelector("canvas").setAttribute("aria-hidden", "true"); // the place has the name
    this.listenForClicks();
  }

  // Places of steps with round numbers: records may begin anywhere.
  ticks(low, high, every) {
    const first = this.run.numbers[0], found = [];
    for (let number = Math.ceil((low + first) / every) * every; number - first <= high; number += every) found.push(number - first);
    return found;
  }

  // Where ranks of an elastic job left or joined.
  mark(plot) {
    const steps = (this.place.dataset.changes || "").split(",").filter(Boolean).map(Number);
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("accent");
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const step of steps) {
      const place = this.run.numbers.findIndex((number) => number > step);
      const x = plot.valToPos(place - 0.5, "x", true);
      if (place < 0 || x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // A few long steps must not press all others flat, unless one wants to see them.
  limit(most) {
    const sorted = this.data[1].filter((value) => value !== null).sort((a, b) => a - b);
    const usual = sorted[Math.floor(sorted.length * 0.98)] ?? 0;
    this.hasOutliers = sorted.length > 20 && sorted[sorted.length - 1] > 3 * usual;
    return this.clip && this.hasOutliers ? Math.min(most, 1.3 * usual) : most * 1.05;
  }

  listenForClicks() {
    const over = this.plot.over;
    let down = 0;
    over.addEventListener("mousedown", (e) => { down = e.clientX; });
    over.addEventListener("click", (e) => {
      if (Math.abs(e.clientX - down) < 4 && this.plot.cursor.idx != null) this.onChoose?.(this.plot.cursor.idx);
    });
  }

  show(from, to) {
    const last = this.run.count - 1;
    const span = Math.min(last, Math.max(4, to - from));
    const first = Math.min(Math.max(0, from), last - span);
    this.plot.setScale("x", { min: first, max: first + span });
  }

  zoom(factor) {
    const { min, max } = this.plot.scales.x, middle = (min + max) / 2;
    this.show(middle - ((max - min) / 2) * factor, middle + ((max - min) / 2) * factor);
  }

  all() { this.show(0, this.run.count - 1); }

  press(e) {
    const { min, max } = this.plot.scales.x, far = (max - min) / 5;
    const actions = {
      ArrowLeft: () => this.show(min - far, max - far), ArrowRight: () => this.show(min + far, max + far),
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), Home: () => this.all(),
    };
    if (!actions[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    actions[e.key]();
  }
}
