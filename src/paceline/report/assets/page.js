// Puts the parts of the report together: filter by rank, buttons, colours.
"use strict";

function followFilter(run, apply) {
  const chips = [...document.querySelectorAll("[data-toggle-rank]")], all = document.querySelector("[data-all]");
  if (!all) return; // one rank has nothing to be told from
  const isOn = (chip) => chip.getAttribute("aria-pressed") === "true";
  const update = () => {
    if (!chips.some(isOn)) chips.forEach((chip) => chip.setAttribute("aria-pressed", "true"));
    all.setAttribute("aria-pressed", String(chips.every(isOn)));
    const shown = new Set(chips.filter(isOn).map((chip) => Number(chip.dataset.toggleRank)));
    for (const row of document.querySelectorAll("[data-rank]")) row.hidden = !shown.has(Number(row.dataset.rank));
    apply(run.ranks.filter((rank) => shown.has(rank.rank)));
  };
  all.addEventListener("click", () => { chips.forEach((chip) => chip.setAttribute("aria-pressed", "true")); update(); });
  chips.forEach((chip) => chip.addEventListener("click", () => {
    // The first click shows one rank alone; further clicks add and remove.
    if (chips.every(isOn) && chips.length > 1) chips.forEach((each) => each.setAttribute("aria-pressed", String(each === chip)));
    else chip.setAttribute("aria-pressed", String(!isOn(chip)));
    update();
  }));
}

// The step to begin with: of a usual length, so that single pieces can be seen.
function usualPlace(run) {
  const rank = run.ranks[0];
  const rows = Array.from({ length: Math.max(0, rank.n - 1) }, (_, i) => i + 1).sort((a, b) => tookOf(rank, a) - tookOf(rank, b));
  const i = rows[rows.length >> 1] ?? 0;
  return run.places.get(`${rank.wrapper[i]}:${rank.step[i]}`);
}

function followButtons(timeline, chart) {
  const on = (id, action) => document.getElementById(id).addEventListener("click", action);
  const field = document.getElementById("go-step");
  on("go-previous", () => timeline.choose(timeline.chosen - 1));
  on("go-next", () => timeline.choose(timeline.chosen + 1));
  on("go-worst", () => timeline.choose(timeline.slowest()));
  on("zoom-in", () => timeline.zoom(0.6));
  on("zoom-out", () => timeline.zoom(1 / 0.6));
  on("zoom-all", () => timeline.show(0, timeline.last));
  on("chart-in", () => chart.zoom(0.6));
  on("chart-out", () => chart.zoom(1 / 0.6));
  on("chart-all", () => chart.all());
  field.addEventListener("change", () => {
    const place = timeline.run.numbers.indexOf(Number(field.value));
    if (place >= 0) timeline.choose(place);
  });
  timeline.onChoose = (place) => { field.value = timeline.run.numbers[place]; };
  const go = (place) => { timeline.choose(place); timeline.canvas.scrollIntoView({ block: "center" }); };
  chart.onChoose = go;
  for (const link of document.querySelectorAll("[data-go]")) {
    link.addEventListener("click", () => { go(timeline.run.places.get(link.dataset.go) ?? 0); timeline.canvas.focus(); });
  }
}

function followClip(chart) {
  const button = document.getElementById("chart-clip");
  button.hidden = !chart.hasOutliers;
  button.addEventListener("click", () => {
    chart.clip = !chart.clip;
    button.setAttribute("aria-pressed", String(chart.clip));
    chart.draw();
  });
}

async function openReport() {
  const run = await readRun();
  if (!run.count) return;
  const byId = (id) => document.getElementById(id);
  const timeline = new Timeline(run, byId("timeline"), byId("overview"), byId("step-detail"));
  const chart = new StepChart(run, byId("chart"));
  followTheme(() => { chart.draw(); timeline.draw(); });
  followButtons(timeline, chart);
  followFilter(run, (ranks) => {
    [chart.shown, timeline.shown] = [ranks, ranks];
    chart.draw();
    timeline.draw();
    timeline.describe();
  });
  chart.draw();
  followClip(chart);
  timeline.choose(usualPlace(run));
  timeline.zoom(2.2);
  new ResizeObserver(() => timeline.draw()).observe(timeline.canvas.parentElement);
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = "true"; }));
}

openReport();
