// Markup as template literals. What is put in is escaped, unless it is markup itself.

class Markup {
  constructor(text) {
    this.text = text;
  }

  toString() {
    return this.text;
  }
}

const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

export function html(strings, ...values) {
  return new Markup(String.raw({ raw: strings }, ...values.map(inserted)));
}

function inserted(value) {
  if (value instanceof Markup) return value.text;
  if (Array.isArray(value)) return value.map(inserted).join("");
  if (value === null || value === undefined || value === false) return "";
  return String(value).replace(/[&<>"']/g, (sign) => ENTITIES[sign]);
}
