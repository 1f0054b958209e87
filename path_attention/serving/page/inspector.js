// Inside a token: what each head attends, what its scores are made of, and how coherence falls.

import { element, tokenElement } from "./chat.js";
import { draw, leaveEmpty } from "./plot.js";

const ROWS = 10;
const KEPT = 64; // answers of the server
const PAUSE = 90; // milliseconds in which another key may follow

const number = (value) => {
  if (value === undefined || value === null) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 10000) ? value.toExponential(1) : value.toFixed(3);
  return text.replace("-", "−");
};
const SIGNS = { " ": "·", "\n": "↵", "\t": "⇥" };

/** A text in one line in which blanks and control characters can be seen. */
const visible = (text) =>
  text.replace(/[\s\p{C}]/gu, (c) => SIGNS[c] ?? `\\u{${c.codePointAt(0).toString(16)}}`);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

export class Inspector {
  constructor(client, parts) {
    this.client = client;
    this.parts = parts;
    this.sequence = null;
    this.place = 0;
    this.layer = 0;
    this.head = 0;
    this.found = null;
    this.spans = [];
    this.kept = new Map();
    this.loading = null;
    parts.layer.addEventListener("change", () => this.setLayer(Number(parts.layer.value)));
    parts.head.addEventListener("change", () => this.setHead(Number(parts.head.value)));
    this.#leaveEmpty();
  }

  /** Look inside a token, at once or, while keys follow each other, a moment later. */
  choose(sequence, place, { pause = false, focus = true } = {}) {
    this.#mark(false);
    if (sequence !== this.sequence) this.kept.clear();
    this.sequence = sequence;
    this.place = place;
    this.#mark(true, focus);
    return this.#load(pause);
  }

  /** Choose the token some places on, or the answer's first (−Infinity) or last one (Infinity). */
  move(step, { focus = true } = {}) {
    if (!this.sequence) return;
    const places = [...this.sequence.elements.keys()];
    const place = Math.min(Math.max(this.place + step, places[0]), places.at(-1));
    if (place !== this.place) this.choose(this.sequence, place, { pause: true, focus });
  }

  setLayer(layer) {
    if (!this.found || layer < 0 || layer >= this.found.layers) return;
    this.layer = layer;
    this.parts.layer.value = layer;
    this.#load(true);
  }

  setHead(head) {
    if (!this.found || head < 0 || head >= this.found.heads.length) return;
    this.head = head;
    this.parts.head.value = head;
    this.#showHead();
  }

  clear() {
    this.loading?.abort();
    this.#mark(false);
    this.sequence = this.found = null;
    this.#leaveEmpty();
  }

  #mark(chosen, focus) {
    const token = this.sequence?.elements.get(this.place);
    if (!token) return;
    token.toggleAttribute("aria-current", chosen);
    if (!chosen) return;
    token.setAttribute("aria-current", "true");
    for (const other of this.sequence.elements.values()) other.tabIndex = -1;
    token.tabIndex = 0;
    if (focus) token.focus({ preventScroll: true });
    const box = token.closest("#log");
    const [inner, outer] = [token.getBoundingClientRect(), box.getBoundingClientRect()];
    if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 8;
    if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 8;
  }

  async #load(pause) {
    this.loading?.abort();
    const controller = new AbortController();
    this.loading = controller;
    const { sequence, place, layer, parts } = this;
    const places = [...sequence.elements.keys()];
    parts.previous.disabled = place <= places[0];
    parts.next.disabled = place >= places.at(-1);
    parts.chosen.textContent = `${place}: ${visible(this.#text(place))}`;
    const name = `${place} ${layer}`;
    let found = this.kept.get(name);
    if (!found) {
      parts.view.setAttribute("aria-busy", "true");
      try {
        if (pause) await new Promise((done) => setTimeout(done, PAUSE));
        if (controller.signal.aborted) return;
        const body = { token_ids: sequence.ids.slice(0, place + 1), position: place, layer, top: ROWS };
        found = await this.client.json("inspect", body, controller.signal);
      } catch (error) {
        if (!controller.signal.aborted) this.#fail(error.message);
        return;
      }
      if (this.kept.size >= KEPT) this.kept.delete(this.kept.keys().next().value);
      this.kept.set(name, found);
    }
    if (controller.signal.aborted) return;
    this.found = found;
    this.#show();
  }

  #text(place) {
    const name = this.sequence.names[place];
    return name === undefined ? this.sequence.texts[place] : `⟨${name}⟩`;
  }

  #fail(message) {
    this.parts.view.setAttribute("aria-busy", "false");
    this.parts.told.className = "error";
    this.parts.told.textContent = message;
    this.parts.status.textContent = message;
  }

  #show() {
    const { found, parts } = this;
    parts.view.setAttribute("aria-busy", "false");
    this.#fill(parts.layer, found.layers, this.layer);
    this.head = Math.min(this.head, found.heads.length - 1);
    this.#fill(parts.head, found.heads.length, this.head);
    parts.told.className = "hint";
    const names = `transport ${found.transport}, decay ${found.decay}, ${found.normalizer}`;
    parts.told.textContent = `Predicted by the query at place ${found.query}. Layer ${found.layer}: ${names}.`;
    const spans = [];
    for (let place = 0; place < this.place; place++) spans.push(tokenElement(this.sequence, place));
    const target = tokenElement(this.sequence, this.place);
    target.classList.add("target");
    parts.context.replaceChildren(...spans, target);
    parts.context.scrollTop = parts.context.scrollHeight;
    this.spans = spans;
    this.#showHead();
  }

  #fill(select, count, chosen) {
    if (select.options.length !== count) {
      const options = Array.from({ length: count }, (_, n) => element("option", { value: n }, String(n)));
      select.replaceChildren(...options);
    }
    select.value = chosen;
  }

  #showHead() {
    const { found, head, parts } = this;
    const { shades, scale, largest } = found.heads[head];
    this.spans.forEach((span, place) => {
      span.style.setProperty("--shade", Math.sqrt(Math.abs(shades[place])).toFixed(3));
      span.classList.toggle("minus", shades[place] < 0);
      span.title = `weight ${number(shades[place] * scale)}, ${this.place - 1 - place} back`;
    });
    this.#showMasses();
    this.#showLargest(largest);
    const { distances, norm, cosine, decay } = found.curves;
    if (norm) {
      const lines = [{ name: "norm", values: norm[head] }, { name: "cosine", values: cosine[head] }];
      draw(parts.coherence, distances, lines, Math.min(...cosine[head]) < -0.005 ? -1 : 0, 1);
    } else {
      leaveEmpty(parts.coherence, "This transport's route isn't known here.");
    }
    const lowest = Math.min(...decay[head]);
    if (lowest < 0) draw(parts.decay, distances, [{ name: "decay", values: decay[head] }], lowest, 0);
    else leaveEmpty(parts.decay, "Nothing decays with distance.");
    const best = largest[0];
    parts.status.textContent =
      `Layer ${found.layer}, head ${head}: most to ${JSON.stringify(this.#text(best.position))}, ` +
      `${found.query - best.position} back, weight ${number(best.weight)}`;
  }

  #showMasses() {
    const { masses } = this.found;
    const from = (band) => (band.from === band.to ? `${band.from}` : `${band.from}–${band.to}`);
    const names = ["Tokens back", ...masses.map(from)];
    const shares = ["Share of weight", ...masses.map((band) => percent(band.shares[this.head]))];
    this.parts.masses.replaceChildren(table(names, [shares]));
  }

  #showLargest(largest) {
    const { normalizer, query } = this.found;
    const stick = normalizer === "stick_breaking";
    const last = { softmax: "Logit", stick_breaking: "Left", linear: "e^decay" }[normalizer];
    const names = ["Token", "Back", "Weight", "Match", "Unmoved", "Decay", last];
    const rows = largest.map((row) => {
      const lastOne = { softmax: row.logit, stick_breaking: row.left, linear: Math.exp(row.decay) }[normalizer];
      return [
        visible(this.#text(row.position)),
        String(query - row.position),
        ...[row.weight, row.match, row.untransported, row.decay, lastOne].map(number),
      ];
    });
    const made = table(names, rows);
    [...made.tBodies[0].rows].forEach((row, n) => {
      const span = this.spans[largest[n].position];
      row.addEventListener("mouseenter", () => span.classList.add("here"));
      row.addEventListener("mouseleave", () => span.classList.remove("here"));
    });
    this.parts.largest.replaceChildren(made);
    this.parts.formula.textContent = stick
      ? "weight = σ(match) · what later keys left"
      : normalizer === "linear" ? "weight = match · e^decay" : "logit = match + decay; weight = softmax";
  }

  #leaveEmpty() {
    const { parts } = this;
    parts.chosen.textContent = "No token chosen";
    parts.context.replaceChildren();
    parts.masses.replaceChildren();
    parts.largest.replaceChildren();
    parts.previous.disabled = parts.next.disabled = true;
    for (const svg of [parts.coherence, parts.decay]) leaveEmpty(svg, "");
  }
}

function table(names, rows) {
  const made = element("table");
  const head = made.createTHead().insertRow();
  for (const name of names) head.append(element("th", { scope: "col" }, name));
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const cell of row) line.append(element("td", {}, cell));
  }
  return made;
}
