// The live feed of an engine: connected only while someone looks.

import { Refusal, eventsOf, headersOf } from "./stream.js";

const RETRY_MS = 3000;

export class Feed {
  #url;
  #key;
  #frame;
  #state;
  #wanted = false;
  #running = null;
  #retry = 0;

  /** `frame` gets every frame, `state` a sentence about the connection ("" while it is fine). */
  constructor(url, key, frame, state) {
    this.#url = url;
    this.#key = key;
    this.#frame = frame;
    this.#state = state;
  }

  /** Connect or disconnect; connects anew if it is connected and `again`. */
  want(wanted, again = false) {
    if (wanted === this.#wanted && !again) return;
    this.#wanted = wanted;
    clearTimeout(this.#retry);
    this.#running?.abort();
    this.#running = null;
    if (wanted) this.#connect();
  }

  async #connect() {
    const running = (this.#running = new AbortController());
    try {
      const response = await fetch(this.#url, { headers: headersOf(this.#key()), signal: running.signal });
      if (!response.ok) throw await Refusal.of(response);
      this.#state("");
      let first = true;
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") break;
        this.#frame(JSON.parse(data), first);
        first = false;
      }
      if (!running.signal.aborted) this.#state("The engine has closed the feed.");
    } catch (error) {
      if (running.signal.aborted) return;
      this.#state(error instanceof Refusal ? error.message : "The server cannot be reached.");
      // Another key connects anew.
      if (error.status === 401 || error.status === 403) return;
    }
    if (this.#running === running) this.#retry = setTimeout(() => this.#connect(), RETRY_MS);
  }
}
