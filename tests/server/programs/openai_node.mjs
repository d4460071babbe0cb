// openai of npm over chats, completions and responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const Sign = z.object({ sign: z.enum(["plus", "minus"]) });
const question = "What is 20 + 22?";
const model = "tiny-chat";
const greedy = { model, temperature: 0 };
const messages = [{ role: "user", content: question }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

async function chats() {
  const chat = await client.chat.completions.create({ ...greedy, messages });
  console.log("run", chat.choices[0].message.content);
  const stream = client.chat.completions.stream({
    ...greedy, messages, stream_options: { include_usage: true },
  });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  console.log("stream", text, final.usage.completion_tokens === chat.usage.completion_tokens);
  const typed = await client.chat.completions.parse({
    ...greedy, messages, response_format: zodResponseFormat(Sign, "sign"),
  });
  console.log("typed", Object.keys(typed.choices[0].message.parsed).join());
  const called = [];
  const runner = client.chat.completions.runTools({
    ...greedy, messages, tool_choice: { type: "function", function: { name: "weather" } }, max_tokens: 200,
    tools: [{ type: "function", function: {
      name: "weather", parameters, parse: JSON.parse,
      function: ({ city }) => { called.push(city); return "rain"; },
    } }],
  });
  await runner.done();
  console.log("tools", called.length);
}

async function completions() {
  const prompt = "20 + 22 =";
  const whole = await client.completions.create({ ...greedy, prompt, max_tokens: 8 });
  let text = "";
  for await (const chunk of await client.completions.create({ ...greedy, prompt, max_tokens: 8, stream: true }))
    text += chunk.choices[0]?.text ?? "";
  console.log("stream", text === whole.choices[0].text, whole.usage.completion_tokens);
}

async function responses() {
  const answer = await client.responses.create({ ...greedy, input: question });
  console.log("run", answer.output_text);
  const stream = client.responses.stream({ ...greedy, input: question });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  console.log("stream", text || (await stream.finalResponse(), text), (await stream.finalResponse()).status);
  const typed = await client.responses.parse({
    ...greedy, input: question, text: { format: zodTextFormat(Sign, "sign") },
  });
  console.log("typed", Object.keys(typed.output_parsed).join());
  const called = await client.responses.create({
    ...greedy, input: question, max_output_tokens: 200, tool_choice: "required",
    tools: [{ type: "function", name: "weather", parameters, strict: true }],
  });
  const call = called.output.find((item) => item.type === "function_call");
  const input = [
    { role: "user", content: question }, ...called.output,
    { type: "function_call_output", call_id: call.call_id, output: "rain" },
  ];
  const last = await client.responses.create({ ...greedy, input });
  console.log("tools", call.name, last.status);
}

const models = await client.models.list();
console.log("models", models.data.map((each) => each.id).join());
await chats();
await completions();
await responses();
