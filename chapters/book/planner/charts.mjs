// The drawings. Lengths are per cent of what the page gives, so that text keeps its size.

import { bytes, count, percent, seconds } from "./format.mjs";
import { html } from "./html.mjs";

const COMPUTING = ["forward", "backward", "optimizer"];

export function memoryBar(memory) {
  const end = Math.max(memory.total, memory.gpu) * 1.02;
  const left = (value) => `${(100 * value / end).toFixed(3)}%`;
  const parts = memory.parts.filter((part) => part.bytes > 0);
  const nearRight = memory.limit / end > 0.5;
  return html`
    <div class="memory-bar" role="img" aria-label="${bytes(memory.total)} are needed, ${
      bytes(memory.limit)} of the GPU's ${bytes(memory.gpu)} may be used.">
      <div class="area">${parts.map((part) => html`<span class="fill ${slug(part.name)}"
        style="width:${left(part.bytes)}" title="${part.name}: ${bytes(part.bytes)}"></span>`)}</div>
      <div class="limit${memory.fits ? "" : " over"}" style="left:${left(memory.limit)}"><span${
        nearRight ? html` class="before"` : ""}>limit ${bytes(memory.limit)}</span></div>
    </div>`;
}

// One rank's step, a row for each lane. Communication is solid where nothing hides it, else light.
export function timeline(step) {
  const end = Math.max(...step.spans.map((span) => span.end));
  const lane = (name) => step.spans.filter((span) => span.lane === name);
  const drawn = (intervals, kind) => intervals.map(([start, stop]) => html`<rect class="${kind}"
    x="${(100 * start / end).toFixed(3)}%" width="${(100 * (stop - start) / end).toFixed(3)}%" height="100%"/>`);
  const computing = COMPUTING.map((kind) => [kind, joined(
    lane("compute").filter((span) => span.name.startsWith(kind)), end / 400)]);
  const busy = joined(lane("compute"));
  const sending = [...new Set(step.spans.map((span) => span.lane))].filter((name) => name !== "compute")
    .map((name) => {
      const sent = joined(lane(name));
      return { name, sent, exposed: sent.flatMap((interval) => without(interval, busy)) };
    });
  const shown = {
    ...Object.fromEntries(computing.filter(([, intervals]) => intervals.length).map(([kind]) => [kind, kind])),
    ...(sending.some(({ exposed }) => exposed.length) && { communication: "communication, exposed" }),
    ...(sending.length && { "hidden-part": "communication, hidden behind computing" }),
  };
  return html`
    <div class="timeline" role="img" aria-label="One step of ${seconds(step.seconds)}: ${
      seconds(step.compute_seconds)} of computing, and ${
      seconds(step.exposed_seconds)} of communication that it does not hide.">
      <span>computing</span><svg>${computing.map(([kind, intervals]) => drawn(intervals, kind))}</svg>
      ${sending.map(({ name, sent, exposed }) => html`<span>${name}</span>
        <svg>${drawn(sent, "hidden-part")}${drawn(exposed, "communication")}</svg>`)}
      <span></span><div class="axis">${ticks(0.95 * end).map((tick) => html`<span style="left:${
        (100 * tick / end).toFixed(2)}%">${tick ? seconds(tick) : "0"}</span>`)}</div>
    </div>
    ${legend(Object.entries(shown))}`;
}

function legend(rows) {
  return html`<ul class="legend">${rows.map(([kind, words]) => html`
    <li><i class="swatch ${kind}"></i>${words}</li>`)}</ul>`;
}

// Efficiency over the number of GPUs, whose axis is logarithmic. A cross: does not fit.
export function scalingCurve(scaling, now) {
  const points = scaling.points;
  const [first, last] = [points[0].gpus, points.at(-1).gpus];
  const top = Math.max(1, ...points.map((point) => point.efficiency ?? 0)) * 1.08;
  const x = (gpus) => `${(last > first ? 93 * Math.log(gpus / first) / Math.log(last / first) + 2 : 50).toFixed(2)}%`;
  const y = (share) => `${(100 - 100 * share / top).toFixed(2)}%`;
  const upright = (gpus, words) => gpus && gpus >= first && gpus <= last && html`<line class="upright"
    x1="${x(gpus)}" x2="${x(gpus)}" y1="0" y2="100%"/><text x="${x(gpus)}" y="${y(0.25)}"
    dx="-6">${words}</text>`;
  const fitting = points.filter((point) => point.fits);
  const lines = fitting.slice(1).map((point, index) => html`<line x1="${x(fitting[index].gpus)}"
    y1="${y(fitting[index].efficiency)}" x2="${x(point.gpus)}" y2="${y(point.efficiency)}"/>`);
  const marks = points.map((point) => point.fits
    ? html`<circle${point.gpus === now ? html` class="now"` : ""} cx="${x(point.gpus)}" cy="${
        y(point.efficiency)}" r="${point.gpus === now ? 6 : 3.5}"><title>${pointSaid(point)}</title></circle>`
    : html`<svg x="${x(point.gpus)}" y="100%" class="cross${point.gpus === now ? " now" : ""}"><title>${
        pointSaid(point)}</title><path d="M-4-12l8 8m-8 0l8-8"/></svg>`);
  const apart = Math.ceil(points.length / 6);
  const shares = [0, 0.5, 1].filter((share) => share < top);
  return html`
    <div class="curve" role="img" aria-label="${points.map(pointSaid).join("; ")}">
      <div class="up">${shares.map((share) => html`<span style="top:${y(share)}">${percent(share)}</span>`)}</div>
      <svg>
        ${shares.map((share) => html`<line class="grid" x1="0" x2="100%" y1="${y(share)}" y2="${y(share)}"/>`)}
        ${upright(scaling.stops_paying, "more do not pay")}${
          upright(scaling.most_gpus, "largest useful batch")}${lines}${marks}
      </svg>
      <div class="along">${points.filter((_, index) => index % apart === 0).map((point) => html`
        <span style="left:${x(point.gpus)}">${count(point.gpus)}</span>`)}</div>
    </div>`;
}

function pointSaid(point) {
  return `${count(point.gpus)} GPUs ${point.fits ? percent(point.efficiency) : "do not fit"}`;
}

export function slug(name) {
  return name.toLowerCase().replace(/[^a-z0-9]+/g, "-");
}

// Intervals [start, end] apart from each other and in order; a gap up to `gap` is closed.
function joined(spans, gap = 0) {
  const found = [];
  for (const { start, end } of [...spans].sort((one, other) => one.start - other.start)) {
    if (found.length && start <= found.at(-1)[1] + gap) {
      found.at(-1)[1] = Math.max(found.at(-1)[1], end);
    } else {
      found.push([start, end]);
    }
  }
  return found;
}

function without([start, end], intervals) {
  const left = [];
  for (const [from, to] of intervals) {
    if (to <= start || from >= end) continue;
    if (from > start) left.push([start, from]);
    start = Math.max(start, to);
  }
  return start < end ? [...left, [start, end]] : left;
}

// About four round numbers from 0 on.
function ticks(end) {
  const power = 10 ** Math.floor(Math.log10(end / 3));
  const apart = [1, 2, 5, 10].map((factor) => factor * power).find((each) => end / each <= 5);
  return Array.from({ length: Math.floor(end / apart + 1e-9) + 1 }, (_, index) => index * apart);
}
