// From the fields of a pane to the body of a request, and from errors back to fields.

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** A field whose value cannot be sent. */
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** The body of a chat request. Empty fields are left out, so the model's own values apply.
 *
 * `values` has the texts of the fields by name, and booleans of the check boxes. Throws FieldError.
 */
export function bodyOf(values, turns, model) {
  const system = values.system ? [{ role: "system", content: values.system }] : [];
  const body = {
    model,
    messages: [...system, ...turns],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) {
    if (values[name] !== "") body[name] = numberOf(name, values[name]);
  }
  const stops = values.stop.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  if (values.schema.trim()) {
    body.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", schema: schemaOf(values.schema) },
    };
  }
  if (values.logprobs) body.logprobs = true;
  if (values.diffusion) {
    body.diffusion = { draft: values.draft };
    if (values.algorithm) body.diffusion.algorithm = values.algorithm;
    for (const name of ["steps", "threshold"]) {
      if (values[name] !== "") body.diffusion[name] = numberOf(name, values[name]);
    }
  }
  return body;
}

function numberOf(name, text) {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value)) throw new FieldError(name, "This is not a number.");
  if (name === "seed" && !Number.isSafeInteger(value)) {
    throw new FieldError(name, "This is not an integer that a browser can send exactly.");
  }
  return value;
}

function schemaOf(text) {
  try {
    const schema = JSON.parse(text);
    if (schema !== null && typeof schema === "object" && !Array.isArray(schema)) return schema;
  } catch (error) {
    throw new FieldError("schema", `This is not JSON: ${error.message}`);
  }
  throw new FieldError("schema", "A schema is a JSON object.");
}

/** The field that an error of the server is about, or null. */
export function fieldOf(param, message = "") {
  if (!param) return null;
  if (param.startsWith("response_format") || param === "grammar") return "schema";
  if (param === "max_completion_tokens") return "max_tokens";
  if (param === "diffusion") {
    return ["threshold", "steps", "algorithm"].find((name) => message.includes(name)) ?? "draft";
  }
  return [...NUMBERS, "stop", "logprobs"].includes(param) ? param : null;
}

/** The parameters that are set, for the line above a conversation. */
export function chosen(values) {
  const parts = NUMBERS.filter((name) => values[name] !== "").map((name) => `${name} ${values[name]}`);
  if (values.system) parts.unshift("system prompt");
  if (values.stop) parts.push("stop");
  if (values.schema.trim()) parts.push("schema");
  if (values.diffusion) {
    if (values.algorithm) parts.push(values.algorithm);
    for (const name of ["steps", "threshold"]) if (values[name] !== "") parts.push(`${name} ${values[name]}`);
  }
  return parts.join(", ");
}
