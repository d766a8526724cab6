// The form, from the engine's schema: nothing here knows a field by its name.

import { html } from "./html.mjs";

const YES = ["yes", "true", "on", "1"];

export function form(schema) {
  const groups = [...new Set(schema.map((field) => field.group))];
  return groups.map((group) => html`
    <fieldset disabled>
      <legend>${group[0].toUpperCase()}${group.slice(1)}</legend>
      ${schema.filter((field) => field.group === group).map(row)}
    </fieldset>`);
}

function row(field) {
  const hidden = Object.keys(field.needs).length > 0;
  return html`
    <div class="field${field.kind === "choice" ? " wide" : ""}" id="row-${field.name}"${hidden ? html` hidden` : ""}>
      <label for="field-${field.name}">${field.label}${unit(field)}</label>
      ${control(field)}
      <p class="why" id="why-${field.name}" hidden></p>
      <p class="help" id="help-${field.name}">${field.help}</p>
    </div>`;
}

function unit({ label, unit }) {
  return unit && !label.includes(unit) && html` <span class="unit">in ${unit}</span>`;
}

function control(field) {
  const common = html`id="field-${field.name}" name="${field.name}"
    aria-describedby="why-${field.name} help-${field.name}"`;
  const value = field.default ?? "";
  if (field.kind === "flag") {
    return html`<input type="checkbox" ${common}${value ? html` checked` : ""}>`;
  }
  if (field.kind === "choice") {
    return html`<select ${common} autocomplete="off">${Object.entries(field.choices).map(([choice, label]) => html`
      <option value="${choice}"${choice === value ? html` selected` : ""}>${label}</option>`)}</select>`;
  }
  // Text, not a number's input: the engine says what is wrong with any text, in its own words.
  return html`<input type="text" ${common} value="${value}" autocomplete="off" spellcheck="false"
    inputmode="${field.kind === "whole" ? "numeric" : "decimal"}">`;
}

// Fills the form with what the address gives, and each other field with what the engine last said:
// a default may follow from other fields. Before the engine has said anything, with the usual one.
export function fill(form, schema, given, values = {}) {
  for (const field of schema) {
    const input = form.elements[field.name];
    const value = given.get(field.name) ?? text(values[field.name] ?? field.default);
    if (field.kind === "flag") {
      input.checked = YES.includes(value.toLowerCase());
    } else if (input !== document.activeElement) {
      if (field.kind === "choice") offer(input, field, value);
      input.value = value;
    }
    form.querySelector(`#row-${field.name}`).hidden = !isAsked(form, field);
  }
}

// What an address gives, with the new value of one input, and without what the form does not ask.
export function changed(form, schema, given, input) {
  const names = schema.filter((field) => isAsked(form, field)).map((field) => field.name);
  const found = new URLSearchParams([...given].filter(([name]) => names.includes(name)));
  found.set(input.name, input.type === "checkbox" ? (input.checked ? "yes" : "no") : input.value.trim());
  return found;
}

function isAsked(form, field) {
  return Object.entries(field.needs).every(([name, value]) => form.elements[name].value === value);
}

// A value that is no choice stays in the form, so that the engine can say what is wrong with it.
function offer(select, field, value) {
  select.querySelector("[data-unknown]")?.remove();
  if (value in field.choices) return;
  select.insertAdjacentHTML("beforeend", html`<option data-unknown>${value}</option>`);
}

// Sets each error beside its field, and returns those whose field the form does not have or show.
export function showErrors(form, schema, errors) {
  for (const field of schema) {
    const why = errors.filter((error) => error.field === field.name).map((error) => error.why);
    const place = form.querySelector(`#why-${field.name}`);
    if (place.textContent !== why.join(" ")) place.textContent = why.join(" ");
    place.hidden = !why.length;
    const input = form.elements[field.name];
    if (why.length) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
  const seen = new Set(schema.filter((field) => isAsked(form, field)).map((field) => field.name));
  return errors.filter((error) => !seen.has(error.field));
}

function text(value) {
  return typeof value === "boolean" ? (value ? "yes" : "no") : String(value ?? "");
}
