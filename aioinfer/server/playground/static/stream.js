// Server-sent events over fetch, which can send a key and a body; EventSource can send neither.

/** Cuts text that arrives in pieces of any size into the data of events. */
export class EventParser {
  #rest = "";
  #data = [];

  /** The data of the events that `text` completes. */
  push(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const found = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
      // Comments, which keep the connection alive, and fields that this server does not send.
    }
    return found;
  }
}

/** The data of the events of a response, as they arrive. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** An error that the server describes. */
export class Refusal extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super(typeof error.message === "string" ? error.message : `The server answered with status ${status}.`);
    this.status = status;
    this.param = typeof error.param === "string" ? error.param : null;
  }

  static async of(response) {
    return new Refusal(response.status, await response.json().catch(() => null));
  }
}

/** The headers of a request. */
export function headersOf(key, json = false) {
  const headers = json ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  return headers;
}
