// Gauges of the engine, from the newest frames of the feed.

import { figure } from "./answer.js";

/** milliseconds that rates are taken over, and between two updates of the numbers */
const RATE_MS = 1000;
const UPDATE_MS = 250;
const PAGES = ["private", "fenced", "cached", "free"];

/** Rates and shares from two frames, the older one first. */
export function ratesOf(before, after) {
  const seconds = (after.t - before.t) / 1e6;
  const rate = (name) => (seconds > 0 ? (after.stats[name] - before.stats[name]) / seconds : 0);
  return { tokens: rate("output_tokens"), prompt: rate("prefill_tokens"), steps: rate("steps") };
}

export class Gauges {
  #frames = [];
  #updated = -Infinity;
  #tiles = {};
  #pages = {};

  constructor(list) {
    for (const [name, label] of [
      ["tokens", "Output"],
      ["running", "Running"],
      ["queue", "Queue"],
      ["pages", "KV pages"],
      ["hits", "Prefix cache"],
      ["lag", "Loop lag"],
      ["device", "Device"],
    ]) {
      this.#tiles[name] = tile(list, name, label);
    }
    const bar = document.createElement("span");
    bar.className = "stack";
    bar.setAttribute("aria-hidden", "true");
    for (const state of PAGES) {
      this.#pages[state] = document.createElement("i");
      this.#pages[state].className = `pages-${state}`;
      bar.append(this.#pages[state]);
    }
    this.#tiles.pages.note.before(bar);
  }

  add(frame, first) {
    if (first) this.#frames = [];
    this.#frames.push(frame);
    while (this.#frames.length > 2 && frame.t - this.#frames[1].t > 1000 * RATE_MS) this.#frames.shift();
    const now = performance.now();
    if (now - this.#updated < UPDATE_MS) return;
    this.#updated = now;
    this.#show(frame.stats, ratesOf(this.#frames[0], frame));
  }

  #show(stats, rates) {
    this.#set("tokens", `${figure(rates.tokens)} tok/s`, `${figure(rates.steps)} steps/s`);
    this.#set("running", stats.running, `${stats.prefilling} in prefill, ${stats.decoding} in decode`);
    this.#set("queue", stats.waiting + stats.arriving, `${stats.policy}, ${stats.waiting_tokens} tokens`);
    const used = stats.pages_private + stats.pages_fenced;
    const counts = PAGES.slice(0, 3).map((state) => `${stats[`pages_${state}`]} ${state}`);
    this.#set("pages", `${used} of ${stats.pages_total}`, counts.join(", "));
    for (const state of PAGES) {
      this.#pages[state].style.flexGrow = stats[`pages_${state}`];
    }
    const hits = stats.queried_tokens ? stats.cached_tokens / stats.queried_tokens : 0;
    this.#set("hits", `${Math.round(100 * hits)} %`, `${stats.cached_tokens} tokens found`);
    this.#set("lag", milliseconds(stats.loop_lag), `${milliseconds(stats.loop_lag_worst)} at worst`);
    this.#set("device", `${Math.round(100 * stats.overlap_ratio)} %`, "busy between steps");
  }

  #set(name, value, note) {
    const found = this.#tiles[name];
    found.value.textContent = value;
    found.note.textContent = note;
  }
}

function milliseconds(seconds) {
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 0)} ms`;
}

function tile(list, name, label) {
  const box = document.createElement("div");
  const title = document.createElement("dt");
  const value = document.createElement("dd");
  const note = document.createElement("dd");
  box.dataset.gauge = name;
  title.textContent = label;
  value.className = "value";
  value.textContent = "–";
  note.className = "note";
  box.append(title, value, note);
  list.append(box);
  return { value, note };
}
