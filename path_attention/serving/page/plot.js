// Curves by distance, on a logarithmic axis that has a place for 0.

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [340, 150, 34, 8, 8, 22];

function shape(name, attributes, text = "") {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/** At most four round numbers from low to high. */
function ticks(low, high) {
  const raw = (high - low) / 3 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

/**
 * Draw lines into an <svg>.
 * distances: of each point; lines: [{ name, values }]; low, high: ends of the vertical axis.
 */
export function draw(svg, distances, lines, low, high) {
  const last = Math.log1p(distances.at(-1)) || 1;
  const x = (distance) => LEFT + (Math.log1p(distance) / last) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  const parts = [];
  for (const value of ticks(low, high)) {
    parts.push(shape("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    const label = String(Number(value.toPrecision(3))).replace("-", "−");
    parts.push(shape("text", { x: LEFT - 4, y: y(value) + 3, "text-anchor": "end" }, label));
  }
  for (const distance of [0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000]) {
    if (distance > distances.at(-1)) break;
    const at = x(distance);
    parts.push(shape("line", { class: "axis", x1: at, x2: at, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
    parts.push(shape("text", { x: at, y: HEIGHT - 7, "text-anchor": "middle" }, String(distance)));
  }
  for (const { name, values } of lines) {
    const points = values.map((value, n) => `${x(distances[n]).toFixed(1)},${y(value).toFixed(1)}`);
    if (points.length === 1) points.push(`${WIDTH - RIGHT},${y(values[0]).toFixed(1)}`);
    parts.push(shape("polyline", { class: `line ${name}`, points: points.join(" ") }));
  }
  svg.replaceChildren(...parts);
  const ends = lines.map(({ name, values }) => `${name} ${values[0].toFixed(2)} to ${values.at(-1).toFixed(2)}`);
  svg.setAttribute("aria-label", `By distance 0 to ${distances.at(-1)}: ${ends.join(", ")}`);
}

/** Say why there is nothing to draw. */
export function leaveEmpty(svg, why) {
  const middle = { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" };
  svg.replaceChildren(shape("text", middle, why));
  svg.setAttribute("aria-label", why);
}
