// Prints the page's static part: the form and the stored answer of the default plan.
//
//     node fragment.mjs < {"schema": …, "answer": …}  > fragment.html

import { readFileSync } from "node:fs";

import { adviceSections, FOLDED, lens, planSections, SECTIONS, TOLD } from "./answer.mjs";
import { form } from "./form.mjs";
import { html } from "./html.mjs";

const { schema, answer } = JSON.parse(readFileSync(0, "utf8"));
const drawn = { ...planSections(answer), ...adviceSections(answer) };

function section([name, title]) {
  if (!title) return "";
  const heading = html`<h3 id="title-of-${name}">${title} ${TOLD.includes(name) ? "" : lens()}</h3>`;
  const body = html`<div data-section="${name}">${drawn[name]}</div>`;
  return html`
    <section aria-labelledby="title-of-${name}">
      ${FOLDED.includes(name) ? html`<details id="fold-${name}"><summary>${heading}</summary>${
        body}</details>` : html`${heading}${body}`}
    </section>`;
}

const page = html`<link rel="stylesheet" href="planner/colors.css">
<link rel="stylesheet" href="planner/planner.css">
<div id="planner">
  <p class="state" id="planner-state">This is the plan for the settings shown, as it was stored. To
    change them, open the page from a web server, with JavaScript on; in a terminal,
    <code>dplab plan</code> gives the same.</p>
  <p class="unseen" role="status" aria-live="polite" id="planner-said"></p>
  <div class="columns">
    <div class="top" data-section="head">${drawn.head}</div>
    <form id="planner-form" aria-label="What is to be trained, and on what" autocomplete="off">
      <ul class="elsewhere" id="planner-errors" hidden></ul>
      ${form(schema)}
      <p class="actions"><button type="button" id="copy-link" disabled>Copy link</button>
        <button type="reset" disabled>Start over</button></p>
      <p class="brief" data-section="brief" aria-hidden="true">${drawn.brief}</p>
    </form>
    <div class="plan">${Object.entries(SECTIONS).map(section)}</div>
  </div>
</div>
<script type="application/json" id="planner-schema">`;
process.stdout.write(`${page}${JSON.stringify(schema).replaceAll("<", "\\u003c")}</script>
<script type="module" src="planner/planner.mjs"></script>
`);
