// The conversation: messages, streamed answers, and the tokens that an answer is made of.

export function element(name, attributes = {}, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/** What stands for a token: its text, or its name where it has none. */
export function tokenElement(sequence, place) {
  const name = sequence.names[place];
  const made = element("span", name === undefined ? {} : { class: "named" });
  made.textContent = name === undefined ? sequence.texts[place] : `⟨${name}⟩`;
  made.dataset.place = place;
  return made;
}

export class Chat {
  /** onChoose(sequence, place): a token of an answer was chosen. */
  constructor(client, log, onChoose) {
    this.client = client;
    this.log = log;
    this.onChoose = onChoose;
    this.messages = [];
    this.running = null;
  }

  get busy() {
    return this.running !== null;
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
  }

  /** Ask, and show the answer as it comes. options: the request's fields beside the prompt. */
  async ask(text, mode, options) {
    const controller = new AbortController();
    this.running = controller;
    const asker = mode === "chat" ? ["user", "You"] : ["user plain", "Text"];
    this.#add(...asker).textContent = text;
    const shown = this.#add("assistant", "Model");
    this.log.setAttribute("aria-busy", "true");
    const asked = [...this.messages, { role: "user", content: text }];
    const body = { ...options, stream: true, return_token_ids: true };
    const path = mode === "chat" ? "v1/chat/completions" : "v1/completions";
    Object.assign(body, mode === "chat" ? { messages: asked } : { prompt: text });
    const answer = { text: "", ids: null, prompt: null };
    try {
      for await (const event of this.client.events(path, body, controller.signal)) {
        this.#take(answer, event, shown, mode);
      }
    } catch (error) {
      const stopped = controller.signal.aborted;
      this.#note(shown, stopped ? "Stopped." : error.message, !stopped);
    } finally {
      if (mode === "chat" && answer.text && shown.isConnected) {
        this.messages = [...asked, { role: "assistant", content: answer.text }];
      }
      this.log.setAttribute("aria-busy", "false");
      if (this.running === controller) this.running = null;
    }
    if (!shown.isConnected) return;
    if (answer.ids?.length) {
      const start = answer.prompt.length;
      await this.#split(shown, "inspect/spell", { token_ids: [...answer.prompt, ...answer.ids], start });
    } else if (answer.text) {
      // The server tells tokens at an answer's end alone: cut anew what was stopped before.
      const prompt = mode === "chat" ? asked : text;
      await this.#split(shown, "inspect/cut", { prompt, answer: answer.text });
    }
  }

  #take(answer, event, shown, mode) {
    const choice = event.choices?.[0];
    const piece = (mode === "chat" ? choice?.delta?.content : choice?.text) ?? "";
    if (piece) {
      answer.text += piece;
      const low = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
      shown.append(piece); // a text node: nothing in it is markup
      if (low) this.log.scrollTop = this.log.scrollHeight;
    }
    const told = event.path_attention;
    if (told) Object.assign(answer, { ids: told.token_ids, prompt: told.prompt_token_ids });
  }

  #add(kind, who) {
    const message = element("div", { class: `message ${kind}` });
    const text = element("div", { class: "text" });
    message.append(element("div", { class: "who" }, who), text);
    this.log.append(message);
    this.log.scrollTop = this.log.scrollHeight;
    return text;
  }

  #note(shown, text, wrong) {
    shown.after(element("p", wrong ? { class: "error", role: "alert" } : { class: "hint" }, text));
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Put the answer's tokens in place of its text: each can be focused and chosen. */
  async #split(shown, path, body) {
    let spelt;
    try {
      spelt = await this.client.json(path, body);
    } catch (error) {
      this.#note(shown, `Its tokens can't be looked into: ${error.message}`, true);
      return;
    }
    const sequence = { ids: spelt.token_ids, ...spelt, elements: new Map() };
    const tokens = element("span", { role: "group", "aria-label": "Tokens of the answer" });
    for (let place = Math.max(sequence.start, 1); place < sequence.ids.length; place++) {
      const token = tokenElement(sequence, place);
      token.classList.add("token");
      token.setAttribute("role", "button");
      token.tabIndex = sequence.elements.size ? -1 : 0;
      if (!token.textContent.trim()) token.setAttribute("aria-label", JSON.stringify(token.textContent));
      sequence.elements.set(place, token);
      tokens.append(token);
    }
    const choose = (event) => {
      const token = event.target.closest(".token");
      if (token) this.onChoose(sequence, Number(token.dataset.place));
    };
    tokens.addEventListener("click", choose);
    tokens.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(event);
    });
    shown.replaceChildren(tokens);
  }
}
