// The section of the engine: feed, gauges and timeline, at work only while it is open and seen.

import { Feed } from "./feed.js";
import { Gauges } from "./gauges.js";
import { Timeline, spanOf } from "./timeline.js";
import { figure } from "./answer.js";

const SUMMARY_MS = 1000;
const find = (id) => document.getElementById(id);

export class EngineSection {
  #details = find("engine-details");
  #calm = matchMedia("(prefers-reduced-motion: reduce)");
  #gauges = new Gauges(find("gauges"));
  #timeline = new Timeline(find("canvas"), this.#calm);
  #feed;
  #paused = false;
  #drawing = false;
  #summarized = -Infinity;
  #leftOut = false;

  constructor(url, key) {
    const state = (text) => (find("feed-state").textContent = text);
    this.#feed = new Feed(url, key, (frame, first) => this.#take(frame, first), state);
    this.#details.addEventListener("toggle", () => this.look());
    document.addEventListener("visibilitychange", () => this.look());
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"]) {
      matchMedia(query).addEventListener("change", () => this.#recolor());
    }
    new ResizeObserver(() => this.#draw()).observe(find("canvas"));
    this.#controls();
    this.#recolor();
    // A phone has no room for it, until it is asked for.
    this.#details.open = matchMedia("(min-width: 761px)").matches;
  }

  /** Connect if someone looks; `again`: with another key. */
  look(again = false) {
    this.#feed.want(this.#details.open && !document.hidden, again);
    this.#animate();
  }

  #take(frame, first) {
    this.#leftOut = frame.left_out > 0;
    this.#gauges.add(frame, first);
    this.#timeline.add(frame, first);
    if (this.#calm.matches && !this.#paused && performance.now() - this.#summarized >= SUMMARY_MS) this.#draw();
    else this.#animate();
  }

  #animate() {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      if (!this.#details.open || this.#paused || this.#calm.matches || document.hidden) return;
      this.#draw();
      this.#animate();
    });
  }

  #draw() {
    if (!this.#details.open) return;
    const seen = this.#timeline.draw();
    const now = performance.now();
    if (now - this.#summarized < SUMMARY_MS && !this.#paused) return;
    this.#summarized = now;
    const percent = (share) => `${Math.round(100 * share)} %`;
    find("timeline-summary").textContent =
      `${seen.steps} steps in ${figure(this.#timeline.span)} ms. At work: device ${percent(seen.device)}, ` +
      `loop ${percent(seen.loop)}, launch thread ${percent(seen.launch)}. ` +
      `Overlap: ${percent(seen.hidden)} of the loop's work` +
      (this.#leftOut ? ". There are more steps than are sent." : "");
  }

  #recolor() {
    this.#timeline.readColors();
    this.#draw();
  }

  #controls() {
    const pause = find("pause");
    const position = find("position");
    pause.addEventListener("click", () => {
      this.#paused = !this.#paused;
      pause.setAttribute("aria-pressed", String(this.#paused));
      position.disabled = !this.#paused;
      position.value = position.max;
      this.#timeline.pause(this.#paused);
      this.#draw();
      this.#animate();
    });
    position.addEventListener("input", () => {
      this.#timeline.move(position.value / position.max);
      this.#draw();
    });
    const span = find("span");
    const zoom = () => {
      this.#timeline.span = spanOf(Number(span.value));
      find("span-value").textContent = `${figure(this.#timeline.span)} ms`;
      this.#summarized = -Infinity;
      this.#draw();
    };
    span.addEventListener("input", zoom);
    zoom();
    this.#pointer(find("canvas"));
  }

  #pointer(canvas) {
    let dragged = null;
    canvas.addEventListener("pointerdown", (event) => {
      dragged = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => (dragged = null));
    canvas.addEventListener("pointermove", (event) => {
      find("timeline-event").textContent = this.#timeline.at(event.offsetX, event.offsetY);
      if (dragged === null || !this.#paused) return;
      this.#timeline.shift(((dragged - event.offsetX) / canvas.clientWidth) * this.#timeline.span);
      dragged = event.offsetX;
      this.#draw();
    });
  }
}
