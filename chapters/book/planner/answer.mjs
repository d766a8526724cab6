// An answer of the engine as markup, by section. Used in the page, and by fragment.mjs at build time.

import { memoryBar, scalingCurves, slug, timeline } from "./charts.mjs";
import { amount, bytes, count, percent, seconds, short } from "./format.mjs";
import { html } from "./html.mjs";

export const SECTIONS = {
  head: null,
  recommendation: "Which strategy, and why",
  scaling: "How many GPUs",
  published: "What others reached",
  run: "Failures and checkpoints",
  memory: "Memory of one GPU",
  step: "One step in time",
  traffic: "Traffic",
  launch: "To start it",
  assumed: "What is assumed",
  basis: "What this rests on",
};

// What is no prediction: the others wear the badge that says that they are.
export const TOLD = ["published", "launch", "assumed", "basis"];
export const FOLDED = ["run", "memory", "step", "traffic", "launch", "assumed", "basis"];
const AGAIN = { none: "", selective: ", partly recomputed", full: ", recomputed" };

export function planSections(answer) {
  const { plan } = answer;
  return {
    head: head(plan),
    brief: html`${plan.name} · ${bytes(plan.memory.total)} of ${bytes(plan.memory.limit)} · ${
      plan.runs ? `${days(likely(plan))} days` : "does not run"}`,
    published: published(plan),
    run: run(plan),
    memory: memory(plan.memory),
    step: step(plan.step),
    traffic: traffic(plan.traffic),
    launch: launch(plan),
    assumed: assumed(plan),
    basis: basis(plan),
  };
}

export function summary(plan) {
  return `${plan.title}: ${called(plan)}, ${bytes(plan.memory.total)} of ${
    bytes(plan.memory.limit)} memory, ${plan.runs ? `${days(likely(plan))} days` : "does not run"}`;
}

function called({ name, recompute }) {
  return `${name}${AGAIN[recompute]}`;
}

// What runs like this one reached, or where there are none what kernels allow.
function likely({ rent }) {
  return rent.middle ?? rent.allowed;
}

function days(found) {
  return amount(found.days);
}

function spread(rent, what) {
  return rent.middle ? `${amount(rent.high[what])} to ${amount(rent.low[what])}` : "as kernels allow";
}

function head(plan) {
  const { memory, rent, batch, speeds } = plan;
  const paid = rent && rent.price !== null ? "money" : "gpu_hours";
  return html`
    <h2 id="plan-title">${plan.title} ${lens()}</h2>
    <p class="verdict${plan.runs ? "" : " bad"}">${verdict(plan)}</p>
    <dl class="tiles">
      <div><dt>Strategy</dt><dd>${called(plan)}
        <small>${count(batch.accumulation)} × ${count(batch.micro)} sequences on a GPU</small></dd></div>
      <div class="${memory.fits ? "" : "bad"}"><dt>Memory of a GPU</dt><dd>${bytes(memory.total)}
        <small>${memory.fits ? "fits:" : "does not fit:"} limit ${bytes(memory.limit)}</small></dd></div>
      <div><dt>Days</dt><dd>${rent ? html`${days(likely(plan))}
        <small>${spread(rent, "days")}</small>` : "–"}</dd></div>
      <div><dt>${paid === "money" ? "Cost" : "GPU-hours"}</dt><dd>${rent ? html`${amount(likely(plan)[paid])}
        <small>${spread(rent, paid)}</small>` : "–"}</dd></div>
    </dl>
    ${speeds && html`<p class="speeds">${speeds.middle ? html`Runs like yours reached
      <strong>${short(speeds.middle)}</strong> tokens/s (${short(speeds.low)} to ${short(speeds.high)}).`
      : plan.range} What kernels allow: ${short(speeds.allowed)} tokens/s.</p>`}
    ${plan.warnings.length > 0 && html`<ul class="warnings">${
      plan.warnings.map((line) => html`<li>${line}</li>`)}</ul>`}`;
}

function verdict({ runs, starved, memory, rent }) {
  if (!memory.fits) return "Does not fit into memory.";
  if (!runs) return starved ? "Does not run: some GPUs have no sequence." : "Does not run.";
  return `Fits. For ${short(rent.tokens)} tokens:`;
}

export function adviceSections({ recommendation: found, fields }) {
  return { recommendation: recommendation(found), scaling: scaling(found.scaling, fields) };
}

function recommendation(found) {
  const best = found.options.find((option) => option.best);
  return html`
    <div class="scroll"><table class="options">
      <caption class="unseen">The strategies for this model, cluster and batch</caption>
      <thead><tr><th scope="col">strategy</th><th scope="col" class="number">memory</th>
        <th scope="col" class="number">tokens/s, as kernels allow</th>
        <th scope="col" class="number">MFU, bound by</th></tr></thead>
      <tbody>${found.options.map((option) => html`
        <tr class="${[option.best && "best", !option.fits && "no-fit"].filter(Boolean).join(" ")}">
          <th scope="row">${called(option)}${mark(option)}
            <small>${option.what}; ${count(option.accumulation)} × ${count(option.micro)} sequences</small></th>
          <td class="number">${bytes(option.bytes)}${option.fits ? "" : html` <small class="bad">does not
            fit</small>`}</td>
          ${option.seconds ? html`<td class="number">${short(option.tokens_per_second)}</td>
            <td class="number">${percent(option.mfu)} <small>${option.bound}</small></td>`
            : html`<td class="number">–</td><td class="number">–</td>`}
        </tr>`)}</tbody></table></div>
    ${best ? "" : html`<p class="bad">No strategy runs.</p>`}
    <ul class="advice">${found.advice.map((line) => html`<li>${line}</li>`)}</ul>`;
}

function mark(option) {
  return html`${option.mark && html` <span class="mark${option.best ? " best" : ""}">${
    option.mark}</span>`}${option.planned && html` <span class="mark">planned</span>`}`;
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
  if (!found) return html`<p>The plan does not run, so it has no step.</p>`;
  const most = Math.max(...found.savings.map((saving) => saving.seconds), 0);
  return html`
    <p>A step takes <strong>${seconds(found.seconds)}</strong>, as kernels allow, for ${
      count(found.global_tokens)} tokens. It is bound by <strong>${found.bound}</strong>. Computing takes ${seconds(found.compute_seconds)}; communication that
      nothing hides takes ${seconds(found.exposed_seconds)}.</p>
    <p>Drawn is the last micro-batch of a step, with the update.</p>
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

function scaling(found, { gpus, price }) {
  const money = price !== null;
  if (!found.points.some((point) => point.runs)) {
    return html`<p>The plan does not run, on up to ${count(found.points.at(-1).gpus)} GPUs.</p>`;
  }
  return html`
    <p>The same global batch with ${found.strategy} on other numbers of GPUs. ${
      found.stops_paying ? html`Beyond <strong>${count(found.stops_paying)} GPUs</strong>, more do not
      pay: each brings less than half of what the first ones do.`
        : "More GPUs still pay where the curve ends."} A bar is the range of runs like it; a cross does
      not run.</p>
    ${scalingCurves(found, Number(gpus), money)}
    <details id="scaling-numbers"><summary>The same as numbers</summary>
      <div class="scroll"><table class="parts">
        <thead><tr><th scope="col">GPUs</th><th scope="col" class="number">tokens/s</th>
          <th scope="col" class="number">range</th><th scope="col" class="number">days</th>
          <th scope="col" class="number">${money ? "cost" : "GPU-hours"}</th></tr></thead>
        <tbody>${found.points.map((point) => html`
          <tr><th scope="row">${count(point.gpus)}</th>
            ${point.runs ? html`<td class="number">${short(point.middle ?? point.allowed)}</td>
              <td class="number">${point.middle ? `${short(point.low)} to ${short(point.high)}` : "–"}</td>
              <td class="number">${days(point)}</td>
              <td class="number">${amount(money ? point.money : point.gpu_hours)}</td>`
              : html`<td class="bad" colspan="4">does not run</td>`}</tr>`)}
        </tbody></table></div></details>`;
}

function published({ nearest, other_ways: others, range }) {
  return html`<p>${range}</p>${runs(nearest)}
    ${others.length > 0 && html`<h4>Without FSDP alone</h4><p>Tensor (TP), pipeline (PP) and context
      (CP) parallelism split layers or sequences too; they are not simulated here.</p>${runs(others)}`}`;
}

function runs(rows) {
  return html`<div class="scroll"><table class="parts">
    <thead><tr><th scope="col">run</th><th scope="col" class="number">GPUs</th>
      <th scope="col" class="number">tokens/s of a GPU</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr><th scope="row">${row.what}, ${row.how}
      <small>${row.source}</small></th><td class="number">${count(row.ranks)} × ${row.gpu}</td>
      <td class="number">${count(row.rate)}</td></tr>`)}</tbody></table></div>`;
}

function run({ rent }) {
  if (!rent) return html`<p>The plan does not run.</p>`;
  return html`<p>Expect ${amount(rent.failures_a_day)} failures a day. A checkpoint has ${
    bytes(rent.checkpoint_bytes)} and holds training up for ${seconds(rent.save_seconds)}. Save every ${
    amount(rent.save_every / 60)} minutes: ${(100 * rent.goodput).toFixed(1)}% of the time then goes into
    training that lasts.</p>`;
}

const LAUNCH = {
  torchrun: "The command",
  torch: "The settings in torch",
  deepspeed: "What comes nearest in DeepSpeed",
};

function launch({ launch: found, runs: does }) {
  const first = html`<p class="${does ? "" : "bad"}">${found.notes[0]}</p>`;
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
  return listed(lines);
}

function basis({ basis, stand_ins: standIns }) {
  return html`
    ${standIns.length > 0 && html`<h4>Not measured: ${
      count(standIns.length)} rates, for which the nearest stands in</h4>${listed(standIns)}`}
    <h4>Measured by others</h4>${listed(basis.filter((line) => !standIns.includes(line)))}`;
}

export function lens() {
  return html`<span class="lens" title="Computed from a model of the hardware; nothing was run.">prediction</span>`;
}
