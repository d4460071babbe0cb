// A pane: a conversation with parameters of its own.

import { Answer, DONE, FAILED, STOPPED } from "./answer.js";
import { FieldError, bodyOf, chosen, fieldOf } from "./request.js";
import { Refusal, eventsOf, headersOf } from "./stream.js";
import { View, question } from "./view.js";

export class Pane {
  #server;
  #name;
  #log;
  #fields;
  #parameters;
  #stop;
  #turns = [];
  #running = null;
  #changed;

  /** `server` has url, key, model and diffusion; `changed` is called when an answer begins or ends. */
  constructor(template, name, server, changed) {
    this.#server = server;
    this.#name = name;
    this.#changed = changed;
    this.element = template.content.cloneNode(true).firstElementChild;
    this.element.setAttribute("aria-label", `Pane ${name}`);
    this.element.querySelector(".name").textContent = name;
    this.#log = this.element.querySelector(".log");
    this.#log.setAttribute("aria-label", `Conversation ${name}`);
    this.#parameters = this.element.querySelector(".parameters");
    this.#fields = [...this.element.querySelectorAll("[name]")];
    this.#stop = this.element.querySelector(".stop-one");
    this.#stop.setAttribute("aria-label", `Stop ${name}`);
    this.#stop.addEventListener("click", () => this.stop());
    this.#parameters.addEventListener("input", () => this.#describe());
  }

  get running() {
    return this.#running !== null;
  }

  /** The fields by name: texts, and booleans of check boxes. */
  get values() {
    const values = { diffusion: this.#server.diffusion };
    for (const field of this.#fields) {
      // A number field that holds no number has an empty value, which must not pass for the default.
      const text = field.validity.badInput ? "not a number" : field.value;
      values[field.name] = field.type === "checkbox" ? field.checked : text;
    }
    return values;
  }

  set values(values) {
    for (const field of this.#fields) {
      if (field.type === "checkbox") field.checked = values[field.name];
      else field.value = values[field.name];
    }
    this.#describe();
  }

  /** Show the fields of diffusion models, or not. */
  refresh() {
    for (const each of this.element.querySelectorAll(".diffusion")) each.hidden = !this.#server.diffusion;
  }

  clear() {
    this.stop();
    // What still arrives of the answer belongs to no conversation.
    this.#running = null;
    this.#stop.disabled = true;
    this.#turns = [];
    this.#log.replaceChildren();
  }

  stop() {
    this.#running?.abort();
  }

  /** Send a message and show the answer. Resolves at its end with the answer; null: nothing was sent. */
  async send(text) {
    this.#forgetErrors();
    const turns = [...this.#turns, { role: "user", content: text }];
    const values = this.values;
    let body;
    try {
      body = bodyOf(values, turns, this.#server.model);
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this.#showError(error.field, error.message);
      return null;
    }
    question(this.#log, text);
    const view = new View(this.#log, this.#server.model || "Model", values.diffusion && values.draft);
    const answer = new Answer(performance.now());
    const running = (this.#running = new AbortController());
    running.signal.addEventListener("abort", () => view.hurry());
    this.#stop.disabled = false;
    this.#changed();
    await this.#run(body, answer, view, running);
    const kept = answer.text && answer.state !== FAILED;
    if (kept && this.#running === running) {
      this.#turns = [...turns, { role: "assistant", content: answer.text }];
    }
    if (answer.state !== DONE) view.hurry();
    await view.finish(answer);
    if (this.#running === running) {
      this.#running = null;
      this.#stop.disabled = true;
    }
    this.#changed();
    return answer;
  }

  async #run(body, answer, view, running) {
    try {
      const response = await fetch(this.#server.url("chat/completions"), {
        method: "POST",
        headers: headersOf(this.#server.key, true),
        body: JSON.stringify(body),
        signal: running.signal,
      });
      if (!response.ok) throw await Refusal.of(response);
      for await (const data of eventsOf(response)) {
        if (running.signal.aborted) break;
        if (data === "[DONE]") {
          answer.end(DONE);
          return;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refusal(response.status, chunk);
        const shown = answer.take(chunk, performance.now());
        if (shown) view.add(shown);
      }
      if (running.signal.aborted) answer.end(STOPPED);
      else answer.end(FAILED, "The stream ended before the answer did.");
    } catch (error) {
      if (running.signal.aborted) answer.end(STOPPED);
      else this.#failed(answer, error);
    }
  }

  #failed(answer, error) {
    const refused = error instanceof Refusal;
    answer.end(FAILED, refused ? error.message : "The server cannot be reached.");
    const field = refused ? fieldOf(error.param, error.message) : null;
    if (field) this.#showError(field, error.message);
  }

  #describe() {
    this.element.querySelector(".chosen").textContent = chosen(this.values);
  }

  #showError(name, message) {
    const field = this.#fields.find((each) => each.name === name);
    if (!field) return;
    const note = document.createElement("p");
    note.className = "field-error";
    note.id = `error-${this.#name}-${name}`;
    note.textContent = message;
    field.closest(".field").append(note);
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-describedby", note.id);
    this.#parameters.open = true;
    field.focus();
  }

  #forgetErrors() {
    for (const note of this.element.querySelectorAll(".field-error")) note.remove();
    for (const field of this.#fields) {
      field.removeAttribute("aria-invalid");
      field.removeAttribute("aria-describedby");
    }
  }
}
