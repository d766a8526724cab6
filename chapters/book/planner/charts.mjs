// The drawings. Lengths are per cent of what the page gives, so that text keeps its size.

import { bytes, count, seconds, short } from "./format.mjs";
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

// Tokens/s, and what that costs, over the number of GPUs; both axes logarithmic. A cross: does not run.
export function scalingCurves(scaling, now, money) {
  const cost = money ? "money" : "gpu_hours";
  return html`
    ${curve("tokens/s", scaling, now, (point) => point.middle ?? point.allowed,
      (point) => point.middle && [point.low, point.high])}
    ${curve(money ? "cost" : "GPU-hours", scaling, now, (point) => point[cost],
      (point) => point.middle && [point.high, point.low].map(
        (end) => point[cost] * point.middle / end))}
    <p class="axis-title">number of GPUs, logarithmic</p>`;
}

function curve(title, { points, stops_paying: stops }, now, value, range) {
  const running = points.filter((point) => point.runs);
  const values = running.flatMap((point) => [value(point), ...(range(point) || [])]);
  const [least, most] = [0.8 * Math.min(...values), 1.25 * Math.max(...values)];
  const [first, last] = [points[0].gpus, points.at(-1).gpus];
  const x = (gpus) => `${(last > first ? 93 * Math.log(gpus / first) / Math.log(last / first) + 2 : 50).toFixed(2)}%`;
  const y = (amount) => `${(100 - 100 * Math.log(amount / least) / Math.log(most / least)).toFixed(2)}%`;
  const lines = running.slice(1).map((point, index) => html`<line x1="${x(running[index].gpus)}"
    y1="${y(value(running[index]))}" x2="${x(point.gpus)}" y2="${y(value(point))}"/>`);
  const bars = running.filter(range).map((point) => html`<line class="range" x1="${x(point.gpus)}"
    x2="${x(point.gpus)}" y1="${y(range(point)[0])}" y2="${y(range(point)[1])}"/>`);
  const marks = points.map((point) => point.runs
    ? html`<circle${point.gpus === now ? html` class="now"` : ""} cx="${x(point.gpus)}" cy="${
        y(value(point))}" r="${point.gpus === now ? 6 : 3.5}"><title>${count(point.gpus)} GPUs: ${
        short(value(point))} ${title}</title></circle>`
    : html`<svg class="cross" x="${x(point.gpus)}" y="97%"><title>${count(point.gpus)} GPUs: does not
        run</title><path d="M-4 -4L4 4M-4 4L4 -4"/></svg>`);
  const apart = Math.ceil(points.length / 6);
  return html`
    <h4>${title}</h4>
    <div class="curve" role="img" aria-label="${title}: ${running.map((point) =>
      `${count(point.gpus)} GPUs ${short(value(point))}`).join(", ")}.">
      <div class="up">${decades(least, most).map((tick) => html`<span style="top:${y(tick)}">${
        short(tick)}</span>`)}</div>
      <svg>${decades(least, most).map((tick) => html`<line class="grid" x1="0" x2="100%" y1="${
        y(tick)}" y2="${y(tick)}"/>`)}
        ${stops && html`<line class="upright" x1="${x(stops)}" x2="${x(stops)}" y1="0" y2="100%"/>
        <text x="${x(stops)}" y="12%" dx="-6">more do not pay</text>`}${bars}${lines}${marks}
      </svg>
      <div class="along">${points.filter((_, index) => index % apart === 0).map((point) => html`
        <span style="left:${x(point.gpus)}">${count(point.gpus)}</span>`)}</div>
    </div>`;
}

// 1, 2 and 5 times powers of ten, as few as there is room for.
function decades(least, most) {
  const steps = Math.log10(most / least) > 1.5 ? [1] : [1, 2, 5];
  const powers = Array.from({ length: 40 }, (_, index) => 10 ** (index - 6));
  return powers.flatMap((power) => steps.map((step) => step * power))
    .filter((tick) => tick > least && tick < most);
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
