// Numbers as text, with their units: bytes and seconds come as plain numbers.

function scaled(value, digits, units) {
  const [factor, unit] = units.find(([least]) => Math.abs(value) >= 0.99995 * least) ?? units.at(-1);
  return `${significant(value / factor, digits)} ${unit}`;
}

function significant(value, digits) {
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 9 });
}

export function bytes(value) {
  return scaled(value, 4, [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
}

export function seconds(value) {
  if (value === 0) return "0 s";
  return scaled(value, 3, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
}

export function count(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

export function short(value) {
  if (Math.abs(value) < 1e6) return significant(value, 3);
  return scaled(value, 3, [[1e12, "trillion"], [1e9, "billion"], [1e6, "million"]]);
}

// Three digits, or all that stand before the point.
export function amount(value) {
  return Math.abs(value) >= 99.5 ? count(value) : significant(value, 3);
}

export function percent(share) {
  return `${(100 * share).toFixed(share >= 0.0995 || share === 0 ? 0 : 1)}%`;
}
