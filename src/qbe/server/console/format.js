// Numbers as a person reads them.

// An amount of money, never with an exponent: "$12.34", "$0.042", "$0.0000031".
export function money(amount, currency) {
  const digits = amount === 0 ? { maximumFractionDigits: 0 } : amount < 0.01 ? { maximumSignificantDigits: 2 }
    : { minimumFractionDigits: 2, maximumFractionDigits: amount < 1 ? 3 : 2 };
  try {
    return new Intl.NumberFormat("en", { style: "currency", currency, ...digits }).format(amount);
  } catch { // a currency of the operator's own
    return `${new Intl.NumberFormat("en", digits).format(amount)} ${currency}`;
  }
}

export const bits = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

export const count = (value) => new Intl.NumberFormat("en").format(value);

export const seconds = (value) => (value < 60 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`);

export function element(tag, className, ...inside) {
  const found = document.createElement(tag);
  if (className) found.className = className;
  found.append(...inside);
  return found;
}

// A blueprint: bits of each layer, with their colours.
export function fillStrip(strip, layers, average) {
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `${layers.length} layers from ${Math.min(...layers.map(([b]) => b))} to ${Math.max(...layers.map(([b]) => b))} bits`);
  strip.title = `${layers.length} layers, ${bits(average)} bits on average`;
  strip.replaceChildren(...layers.map(([, colour]) => {
    const cell = document.createElement("i");
    cell.style.background = colour;
    return cell;
  }));
  strip.hidden = false;
}
