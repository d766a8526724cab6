// The page: form to address to worker to sections. What the numbers are, the engine alone knows.

import { adviceSections, planSections, summary } from "./answer.mjs";
import { changed, fill, showErrors } from "./form.mjs";
import { html } from "./html.mjs";
import { Python } from "./python.mjs";

const page = document.getElementById("planner");
const form = document.getElementById("planner-form");
const state = document.getElementById("planner-state");
const said = document.getElementById("planner-said");
const schema = JSON.parse(document.getElementById("planner-schema").textContent);

const IN_A_TERMINAL = html`In a terminal, <code>dplab plan</code> computes a plan without a browser.`;

let asked = location.search.slice(1); // the newest query; answers to older ones are thrown away
let given = new URLSearchParams(asked); // the same, as the form shows it
let values = {}; // of all fields, as the engine last said
let computing = true; // until Python has started
let shownQuery = null; // of the plan that the page shows; null: the stored one
let telling; // the timer of what a screen reader will be told

const python = new Python({ ready, failed: giveUp });
page.answer = (query, part = "all") => python.ask(query, part); // for tests, and for the curious

fill(form, schema, given);
for (const part of form.querySelectorAll("fieldset, button")) part.disabled = false;
page.classList.toggle("stale", asked !== "");
say(html`${stored()} Python is starting in this page …`);

form.addEventListener("input", ({ target }) => take(changed(form, schema, given, target)));
form.addEventListener("focusout", () => fill(form, schema, given, values));
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", (event) => {
  event.preventDefault();
  values = {};
  take(new URLSearchParams());
});
page.addEventListener("click", copy);

function ready() {
  computing = false;
  compute();
}

function take(query) {
  given = query;
  asked = query.toString();
  fill(form, schema, given, values);
  compute();
}

// Python takes one question at a time: what was typed meanwhile overtakes what nobody wants any more.
async function compute() {
  if (computing) return;
  computing = true;
  try {
    for (let query = null; query !== asked;) {
      query = asked;
      const answer = await answerTo(query, "plan");
      if (query !== asked || !answer) continue;
      show(answer);
      query = asked; // which is shorter now
      const advice = answer.plan && await answerTo(query, "recommendation");
      if (query === asked && advice) draw(adviceSections(advice));
    }
  } finally {
    computing = false;
  }
}

async function answerTo(query, part) {
  try {
    return JSON.parse(await python.ask(query, part));
  } catch (error) {
    page.classList.add("stale");
    say(html`The engine failed, which is a mistake of this page: ${error.message}`, "failed");
    return null;
  }
}

function show(answer) {
  const elsewhere = showErrors(form, schema, answer.errors);
  const list = document.getElementById("planner-errors");
  list.hidden = !elsewhere.length;
  list.innerHTML = elsewhere.map(({ field, why }) => html`<li>${field && html`<b>${field}</b>: `}${why}</li>`).join("");
  if (!answer.errors.length) {
    asked = answer.query; // shorter: without what is the default anyway
    given = new URLSearchParams(asked);
  }
  values = answer.fields;
  fill(form, schema, given, values);
  remember(asked);
  page.classList.toggle("stale", answer.errors.length > 0);
  if (answer.errors.length) {
    const names = answer.errors.map(({ field }) => (
      schema.find(({ name }) => name === field)?.label ?? "the address"));
    const kept = shownQuery === null ? "the stored one" : "the last one without an error";
    say(`The plan below is ${kept}. Something is wrong with: ${[...new Set(names)].join(", ")}.`, "error");
    tell(`No plan: ${answer.errors[0].why}`);
  } else {
    say("Computed in this page, by the course's own package.", "live");
  }
  if (!answer.plan) return;
  if (shownQuery !== answer.query) tell(summary(answer.plan));
  shownQuery = answer.query;
  draw(planSections(answer));
}

// Replaces only what has changed, and leaves open what is open, and the focus where it is.
function draw(sections) {
  for (const [name, markup] of Object.entries(sections)) {
    const place = page.querySelector(`[data-section="${name}"]`);
    const text = String(markup);
    if (place.drawn === text) continue;
    const open = [...place.querySelectorAll("details[open]")].map((each) => each.id);
    const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
    place.innerHTML = text;
    place.drawn = text;
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }
}

function remember(query) {
  const address = `${location.pathname}${query ? `?${query}` : ""}${location.hash}`;
  history.replaceState(history.state, "", address);
}

function giveUp(why) {
  for (const part of form.querySelectorAll("fieldset, button")) part.disabled = true;
  say(html`Python could not start in this page (${why}). ${stored()} ${IN_A_TERMINAL}`, "failed");
}

function stored() {
  return asked ? "The plan below is a stored one, for other settings than those of the form."
    : "The plan below was stored for the settings of the form.";
}

function say(words, kind = "") {
  state.innerHTML = html`${words}`;
  state.dataset.state = kind;
}

// To a screen reader, once the typing has stopped.
function tell(words) {
  clearTimeout(telling);
  telling = setTimeout(() => { said.textContent = words; }, 600);
}

async function copy({ target }) {
  const button = target.closest("button");
  const code = button?.dataset.copies && document.getElementById(button.dataset.copies);
  if (!code && button?.id !== "copy-link") return;
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText(code ? code.textContent : location.href);
    button.textContent = "Copied";
  } catch {
    if (code) getSelection().selectAllChildren(code);
    button.textContent = code ? "Selected" : "See the address";
  }
  tell(button.textContent);
  setTimeout(() => { button.textContent = words; }, 1500);
}
