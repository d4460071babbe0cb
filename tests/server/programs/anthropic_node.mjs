// @anthropic-ai/sdk over messages.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is 20 + 22?" }];
const request = { model: "tiny-chat", messages, max_tokens: 50, temperature: 0 };

const whole = await client.messages.create(request);
console.log("run", whole.content[0].text);
const stream = client.messages.stream(request);
let text = "";
stream.on("text", (delta) => (text += delta));
const final = await stream.finalMessage();
console.log("stream", text, final.stop_reason, final.usage.output_tokens === whole.usage.output_tokens);
const count = await client.messages.countTokens({ model: "tiny-chat", messages });
const usage = final.usage;
console.log("run", count.input_tokens === usage.input_tokens + usage.cache_read_input_tokens);
const called = [];
const weather = betaZodTool({
  name: "weather",
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
  run: async ({ city }) => { called.push(city); return "rain"; },
});
const runner = client.beta.messages.toolRunner({
  ...request, max_tokens: 200, tools: [weather], tool_choice: { type: "any" }, max_iterations: 2,
});
const last = await runner;
console.log("tools", called.length > 0, last.type);
const models = [];
for await (const model of client.models.list()) models.push([model.id, model.type, model.display_name]);
console.log("models", models.join());
