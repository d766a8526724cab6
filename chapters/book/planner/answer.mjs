// An answer of the engine as markup, by section. Used in the page, and by fragment.mjs at build time.

import { memoryBar, scalingCurve, slug, timeline } from "./charts.mjs";
import { bytes, count, percent, seconds, short } from "./format.mjs";
import { html } from "./html.mjs";

export const SECTIONS = {
  head: null,
  recommendation: "Which strategy, and why",
  memory: "Memory of one GPU",
  step: "One step in time",
  traffic: "Traffic",
  scaling: "More GPUs",
  launch: "To start it",
  assumed: "What is assumed",
  basis: "What this rests on",
};

// What is no prediction: the others wear the badge that says that they are.
export const TOLD = ["launch", "assumed", "basis"];

export function planSections(answer) {
  const { plan, fields } = answer;
  return {
    head: head(plan),
    brief: html`${plan.name} · ${bytes(plan.memory.total)} of ${bytes(plan.memory.limit)} · ${
      plan.step ? seconds(plan.step.seconds) : "does not fit"}`,
    memory: memory(plan.memory),
    step: step(plan.step),
    traffic: traffic(plan.traffic),
    scaling: scaling(plan, Number(fields.gpus)),
    launch: launch(plan),
    assumed: assumed(plan),
    basis: basis(plan),
  };
}

export function summary(plan) {
  return `${plan.title}: ${called(plan)}, ${bytes(plan.memory.total)} of ${
    bytes(plan.memory.limit)} memory, ${plan.step ? `${seconds(plan.step.seconds)} a step` : "does not fit"}`;
}

function range({ fast, slow }) {
  return `${seconds(fast)} to ${seconds(slow)}`;
}

function called({ name, recompute }) {
  return recompute === "none" ? name : `${name}, recomputed`;
}

function head(plan) {
  const { memory, step } = plan;
  return html`
    <h2 id="plan-title">${plan.title} ${lens()}</h2>
    <dl class="tiles">
      <div><dt>Strategy</dt><dd>${plan.name}
        <small>${plan.recompute === "none" ? "all activations kept" : "blocks recomputed"}</small></dd></div>
      <div class="${memory.fits ? "" : "bad"}"><dt>Memory of a GPU</dt><dd>${bytes(memory.total)}
        <small>${memory.fits ? "fits:" : "does not fit:"} limit ${bytes(memory.limit)}</small></dd></div>
      <div><dt>One step</dt><dd>${step ? html`${seconds(step.seconds)}
        <small>${range(step)}</small>` : "–"}</dd></div>
      <div><dt>Speed</dt><dd>${step ? html`${short(step.tokens_per_second)}
        <small>tokens/s, ${percent(step.mfu)} MFU</small>` : "–"}</dd></div>
    </dl>`;
}

export function recommendation(found) {
  const best = found.options.find((option) => option.best);
  return html`
    <div class="scroll"><table class="options">
      <caption class="unseen">The strategies for this model, cluster and batch</caption>
      <thead><tr><th scope="col">strategy</th><th scope="col" class="number">memory</th>
        <th scope="col" class="number">a step</th>
        <th scope="col" class="number">MFU, bound by</th></tr></thead>
      <tbody>${found.options.map((option) => html`
        <tr class="${[option.best && "best", !option.fits && "no-fit"].filter(Boolean).join(" ")}">
          <th scope="row">${option.name}${mark(option)}${option.recompute === "none" ? "" : html`
            <small>blocks recomputed</small>`}</th>
          <td class="number">${bytes(option.bytes)}${option.fits ? "" : html` <small class="bad">does not
            fit</small>`}</td>
          ${option.fits ? html`<td class="number">${seconds(option.seconds)} <small>${
              range(option)}</small></td>
            <td class="number">${percent(option.mfu)} <small>${option.bound}</small></td>`
            : html`<td class="number">–</td><td class="number">–</td>`}
        </tr>`)}</tbody></table></div>
    ${best ? "" : html`<p class="bad">No strategy fits.</p>`}
    <ul class="advice">${found.advice.map((line) => html`<li>${line}</li>`)}</ul>
    ${found.unknown.map((line) => html`<p class="unknown">${line}.</p>`)}`;
}

function mark(option) {
  return html`${option.best ? html` <span class="mark best">recommended</span>`
    : option.tie && html` <span class="mark">as fast</span>`}${
    option.planned && html` <span class="mark">planned</span>`}`;
}

function memory(found) {
  const margin = bytes(Math.abs(found.margin));
  return html`
    <p>${found.fits ? html`The plan leaves ${margin} below the limit.`
      : html`<strong class="bad">The plan is ${margin} over the limit.</strong>`}
      ${found.uncertain && "That is within what this prediction may be off: try it."}
      The limit leaves ${percent(1 - found.limit / found.gpu)} of the GPU's ${bytes(found.gpu)} to
      the allocator and the libraries. The peak is at: ${found.moment}.</p>
    ${memoryBar(found)}
    <div class="scroll"><table class="parts"><caption class="unseen">Memory by part</caption>
      <tbody>${found.parts.filter((part) => part.bytes > 0).map((part) => html`
        <tr><th scope="row"><i class="swatch ${slug(part.name)}"></i>${part.name}</th>
          <td class="number">${bytes(part.bytes)}</td>
          <td class="number">${percent(part.bytes / found.total)}</td></tr>`)}
        <tr class="sum"><th scope="row">together</th><td class="number">${bytes(found.total)}</td>
          <td class="number"></td></tr></tbody></table></div>`;
}

function step(found) {
  if (!found) return html`<p>The plan does not fit into memory, so it has no step.</p>`;
  const most = Math.max(...found.savings.map((saving) => saving.seconds), 0);
  return html`
    <p>A step takes <strong>${seconds(found.seconds)}</strong> (${range(found)}) for ${
      count(found.global_tokens)} tokens. It is bound by <strong>${found.bound}</strong>. Computing takes ${seconds(found.compute_seconds)}; communication that
      nothing hides takes ${seconds(found.exposed_seconds)}.</p>
    <p>${found.note}</p>
    ${timeline(found)}
    ${most > 0 && html`
      <h4>How much shorter a step would be if this took no time</h4>
      <table class="savings"><caption class="unseen">Seconds saved by resource</caption>
        <tbody>${found.savings.map((saving) => html`
          <tr><th scope="row">${saving.resource}</th>
            <td class="bar"><i style="width:${(100 * saving.seconds / most).toFixed(1)}%"></i></td>
            <td class="number">${seconds(saving.seconds)}</td></tr>`)}</tbody></table>`}`;
}

function traffic(found) {
  if (!found.parts.length) return html`<p>One GPU sends nothing.</p>`;
  const places = found.parts.some((part) => part.where);
  return html`
    <p>Each GPU sends <strong>${bytes(found.sent_bytes)}</strong> in a step.</p>
    <div class="scroll"><table class="parts">
      <caption class="unseen">Bytes that a GPU sends in a step</caption>
      <thead><tr><th scope="col">collective</th><th scope="col" class="number">calls</th>
        <th scope="col" class="number">GPUs</th>${places && html`<th scope="col">where</th>`}
        <th scope="col" class="number">sent</th></tr></thead>
      <tbody>${found.parts.map((part) => html`
        <tr><th scope="row">${part.name}</th>
          <td class="number">${part.calls === null ? "by bucket" : count(part.calls)}</td>
          <td class="number">${count(part.ranks)}</td>${places && html`<td>${part.where}</td>`}
          <td class="number">${bytes(part.bytes)}</td></tr>`)}
      </tbody></table></div>`;
}

function scaling(plan, now) {
  const found = plan.scaling;
  if (!found.points.some((point) => point.fits)) {
    return html`<p>The plan does not fit into memory, on up to ${
      count(found.points.at(-1).gpus)} GPUs.</p>`;
  }
  return html`
    <p>Tokens/s of each GPU with ${called({ ...plan, name: plan.strategy })} and the same
      batch on it, relative to the fewest GPUs that fit. ${
      found.stops_paying ? html`From <strong>${count(found.stops_paying)} GPUs</strong> on, more do not pay.`
        : "More GPUs still pay where the curve ends."} ${
      found.points.some((point) => !point.fits) && "A cross: does not fit into memory."} ${
      found.most_gpus !== null && (found.most_gpus ? html`With this batch on each, ${
        count(found.most_gpus)} GPUs reach the largest useful global batch.`
        : "The largest useful global batch is smaller than that of one GPU.")}</p>
    <p>${found.note}</p>
    ${scalingCurve(found, now)}
    <p class="axis-title">number of GPUs, logarithmic</p>
    <details id="scaling-numbers"><summary>The same as numbers</summary>
      <div class="scroll"><table class="parts">
        <thead><tr><th scope="col">GPUs</th><th scope="col" class="number">tokens/s</th>
          <th scope="col" class="number">efficiency</th>
          <th scope="col" class="number">a step</th></tr></thead>
        <tbody>${found.points.map((point) => html`
          <tr><th scope="row">${count(point.gpus)}</th>
            ${point.fits ? html`<td class="number">${short(point.tokens_per_second)}</td>
              <td class="number">${percent(point.efficiency)}</td>
              <td class="number">${seconds(point.seconds)}</td>`
              : html`<td class="bad" colspan="3">does not fit</td>`}</tr>`)}
        </tbody></table></div></details>`;
}

const LAUNCH = {
  torchrun: "The command",
  torch: "The settings in torch",
  deepspeed: "What comes nearest in DeepSpeed",
};

function launch({ launch: found, memory }) {
  const first = html`<p class="${memory.fits ? "" : "bad"}">${found.notes[0]}</p>`;
  return html`${first}${Object.entries(LAUNCH).filter(([name]) => found[name]).map(([name, words]) => html`
    <div class="code"><h4 id="title-${name}">${words}</h4>
      <button type="button" id="copy-${name}" data-copies="code-${name}" aria-describedby="title-${
        name}">Copy</button>
      <pre id="code-${name}" tabindex="0" aria-labelledby="title-${name}">${found[name]}</pre></div>`)}
    ${found.notes.slice(1).map((note) => html`<p>${note}</p>`)}`;
}

function listed(lines) {
  return html`<ul>${lines.map((line) => html`<li>${line}</li>`)}</ul>`;
}

function assumed({ assumed: lines }) {
  return html`<details id="assumed"><summary>How the model is trained, what MFU is, and
    what is left out</summary>${
    listed(lines)}</details>`;
}

function basis({ basis, stand_ins: standIns }) {
  return html`
    ${standIns.length > 0 && html`<details id="basis-stand-ins"><summary>Not measured: ${
      count(standIns.length)} rates, for which the nearest stands in</summary>${listed(standIns)}</details>`}
    <details id="basis-measured"><summary>Measured by others</summary>${
      listed(basis.filter((line) => !standIns.includes(line)))}</details>`;
}

export function lens() {
  return html`<span class="lens" title="Computed from a model of the hardware; nothing was run.">prediction</span>`;
}
