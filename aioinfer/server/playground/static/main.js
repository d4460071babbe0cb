// The page: its panes, the message for all of them, the key, and the section of the engine.

import { EngineSection } from "./engine.js";
import { Pane } from "./pane.js";
import { Refusal, headersOf } from "./stream.js";

const KEY = "aioinfer.key";
const find = (id) => document.getElementById(id);
const { api, steps } = document.body.dataset;
const absolute = (path) => new URL(path, document.baseURI).href;

const server = {
  key: stored(),
  model: "",
  diffusion: false,
  url: (path) => absolute(`${api}/${path}`),
};
const panes = [];
let compared = false;
let engine = null;

// -- the key: in this tab only ---------------------------------------------------------------------

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // the browser keeps nothing; then neither does this page
  }
}

function setKey(key) {
  server.key = key.trim();
  try {
    if (server.key) sessionStorage.setItem(KEY, server.key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // as above
  }
  connect();
  engine?.look(true);
}

// -- the model -------------------------------------------------------------------------------------

async function connect() {
  try {
    const response = await fetch(server.url("models"), { headers: headersOf(server.key) });
    if (!response.ok) throw await Refusal.of(response);
    const [model] = (await response.json()).data;
    server.model = model.id;
    server.diffusion = model.block_size !== undefined;
    const context = model.max_model_len ? `, context ${model.max_model_len.toLocaleString("en-US")}` : "";
    const blocks = server.diffusion ? `, blocks of ${model.block_size}` : "";
    find("model").textContent = `${model.id}${context}${blocks}`;
    find("access").classList.remove("wanted");
  } catch (error) {
    const known = error instanceof Refusal;
    find("model").textContent = known ? error.message : "The server cannot be reached.";
    if (known && error.status === 401) {
      find("access").classList.add("wanted");
      find("access").open = true;
      find("key").focus();
    }
  }
  for (const pane of panes) pane.refresh();
}

// -- panes -----------------------------------------------------------------------------------------

const shown = () => (compared ? panes : panes.slice(0, 1));

function addPane(name) {
  const pane = new Pane(find("pane-template"), name, server, update);
  panes.push(pane);
  find("panes").append(pane.element);
  pane.refresh();
  return pane;
}

function compare() {
  compared = !compared;
  if (compared && panes.length === 1) addPane("B").values = panes[0].values;
  if (!compared) panes[1].stop();
  panes[1].element.hidden = !compared;
  find("panes").classList.toggle("two", compared);
  find("compare").setAttribute("aria-pressed", String(compared));
}

function update() {
  const running = panes.some((pane) => pane.running);
  // A button that is disabled loses the focus to nowhere.
  if (!running && document.activeElement === find("stop")) find("prompt").focus();
  find("stop").disabled = !running;
  find("send").disabled = running;
}

async function send() {
  const prompt = find("prompt");
  const text = prompt.value.trim();
  if (!text || panes.some((pane) => pane.running)) return;
  prompt.value = "";
  say("Answering.");
  const asked = shown();
  const answers = await Promise.all(asked.map((pane) => pane.send(text)));
  if (answers.some((answer) => answer === null || answer.state === "failed") && !prompt.value) {
    prompt.value = text;
  }
  say(answers.map((answer) => summary(answer)).join(" "));
}

function summary(answer) {
  if (answer === null) return "Not sent: a parameter is wrong.";
  if (answer.error) return answer.error;
  const tokens = answer.usage ? `, ${answer.usage.completion_tokens} tokens` : "";
  return `Answer ${answer.state}${tokens}.`;
}

function say(text) {
  find("status").textContent = text;
}

const stop = () => panes.forEach((pane) => pane.stop());

// -- what the reader does --------------------------------------------------------------------------

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("stop").addEventListener("click", stop);
find("compare").addEventListener("click", compare);
find("clear").addEventListener("click", () => {
  panes.forEach((pane) => pane.clear());
  update();
  find("prompt").focus();
});
find("key").value = server.key;
find("key").addEventListener("change", (event) => setKey(event.target.value));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape") {
    if (find("access").open && !panes.some((pane) => pane.running)) {
      find("access").open = false;
      find("access").querySelector("summary").focus();
    }
    stop();
  }
});

addPane("A");
if (steps) engine = new EngineSection(absolute(steps), () => server.key);
else find("engine").hidden = true;
connect();
find("prompt").focus();
