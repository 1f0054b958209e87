// Requests to the server that the page came from: JSON, and streams of server-sent events.

/** What an answer without success says: the message of OpenAI's error shape, or all of it. */
async function failure(response) {
  const text = await response.text();
  let message;
  try {
    message = JSON.parse(text).error?.message;
  } catch { /* not JSON */ }
  const error = new Error(message ?? `${response.status} ${text.slice(0, 200) || response.statusText}`);
  return Object.assign(error, { status: response.status });
}

export class Client {
  constructor() {
    this.key = ""; // kept in memory alone
  }

  async #fetch(path, body, signal) {
    const headers = {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw await failure(response);
    return response;
  }

  async json(path, body, signal) {
    return (await this.#fetch(path, body, signal)).json();
  }

  /** The JSON of each event of a stream, up to "[DONE]". */
  async *events(path, body, signal) {
    const response = await this.#fetch(path, body, signal);
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
    throw new Error("The answer broke off before its end.");
  }
}

/** The data of each server-sent event in a stream of bytes. */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      rest += value;
      // A carriage return at the end may be half a line end: wait for what follows.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
