// The page's parts put together, and its keys.

import { Chat, element } from "./chat.js";
import { Client } from "./client.js";
import { Inspector } from "./inspector.js";

const part = (id) => document.getElementById(id);
const parts = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));
const client = new Client();
const inspector = new Inspector(client, parts);
const chat = new Chat(client, part("log"), (sequence, place) => {
  inspector.choose(sequence, place);
  if (matchMedia("(max-width: 860px)").matches) part("inspector").scrollIntoView({ block: "start" });
});

async function listModels() {
  try {
    const { data } = await client.json("v1/models");
    part("model").replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    // A model that knows no chats goes on with texts.
    if (data[0]?.path_attention?.chat_template === "plain") part("mode").value = "text";
  } catch (error) {
    part("model").replaceChildren(element("option", { value: "" }, error.message));
    if (error.status === 401) part("settings").open = true; // where the key goes
  }
}

function options() {
  const chosen = { model: part("model").value };
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"], ["seed", "seed"]]) {
    if (part(id).value !== "") chosen[name] = part(id).valueAsNumber;
  }
  return chosen;
}

async function send() {
  const text = part("prompt").value;
  if (!text.trim() || chat.busy || !part("ask").reportValidity()) return;
  part("welcome")?.remove();
  part("prompt").value = "";
  part("send").disabled = true;
  part("stop").disabled = false;
  try {
    await chat.ask(text, part("mode").value, options());
  } finally {
    part("send").disabled = false;
    part("stop").disabled = true;
  }
}

part("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
part("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
part("stop").addEventListener("click", () => chat.stop());
part("clear").addEventListener("click", () => {
  chat.clear();
  inspector.clear();
  part("prompt").focus();
});
part("key").addEventListener("change", () => {
  client.key = part("key").value;
  listModels();
});
part("previous").addEventListener("click", () => inspector.move(-1, { focus: false }));
part("next").addEventListener("click", () => inspector.move(1, { focus: false }));
part("help-open").addEventListener("click", () => part("help").showModal());

/** What a key does, outside of fields. */
const KEYS = {
  ArrowLeft: () => inspector.move(-1),
  ArrowRight: () => inspector.move(1),
  Home: () => inspector.move(-Infinity),
  End: () => inspector.move(Infinity),
  "[": () => inspector.setLayer(inspector.layer - 1),
  "]": () => inspector.setLayer(inspector.layer + 1),
  ",": () => inspector.setHead(inspector.head - 1),
  ".": () => inspector.setHead(inspector.head + 1),
  "/": () => part("prompt").focus(),
  "?": () => part("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  const typed = event.getModifierState("AltGraph"); // some layouts have [ and ] there
  if (part("help").open || (!typed && (event.ctrlKey || event.metaKey || event.altKey))) return;
  if (event.key === "Escape") {
    chat.stop();
    return;
  }
  if (event.target.closest("input, textarea, select")) return;
  const act = KEYS[event.key];
  const scrolls = /^(Arrow|Home|End)/.test(event.key) && event.target.closest("#context");
  if (!act || scrolls) return;
  event.preventDefault();
  act();
});

listModels();
part("prompt").focus();
