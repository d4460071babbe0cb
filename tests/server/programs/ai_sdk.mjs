// The AI SDK with its providers: openai (whose default are responses), openai-compatible, anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "aioinfer", baseURL: `${url}/v1`, supportsStructuredOutputs: true, includeUsage: true,
});
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const models = [
  openai("tiny-chat"), openai.chat("tiny-chat"), compatible("tiny-chat"), anthropic("tiny-chat"),
];
const prompt = "What is 20 + 22?";
const Sign = z.object({ sign: z.enum(["plus", "minus"]) });
const common = { prompt, temperature: 0, maxRetries: 0 };

for (const model of models) {
  const plain = await generateText({ ...common, model });
  console.log("run", plain.text);
  const stream = streamText({ ...common, model, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const part of stream.textStream) text += part;
  const usage = await stream.usage;
  console.log("stream", text, await stream.finishReason, usage.outputTokens === plain.usage.outputTokens);
  const typed = await generateText({ ...common, model, output: Output.object({ schema: Sign }) });
  console.log("typed", Object.keys(typed.output).join());
  const called = [];
  const weather = tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
    execute: async ({ city }) => { called.push(city); return "rain"; },
  });
  const first = (step) => (step.stepNumber === 0 ? { toolChoice: "required" } : { toolChoice: "none" });
  const tools = { ...common, model, tools: { weather }, maxOutputTokens: 200, prepareStep: first };
  const agent = await generateText({ ...tools, stopWhen: stepCountIs(2) });
  console.log("tools", called.length > 0, agent.steps.length);
  const streamed = streamText({ ...tools, stopWhen: stepCountIs(2), onError: ({ error }) => { throw error; } });
  await streamed.consumeStream();
  console.log("tools", (await streamed.steps)[0].toolCalls.length > 0, (await streamed.steps).length);
}
const completion = await generateText({ ...common, model: openai.completion("tiny-chat"), maxOutputTokens: 8 });
console.log("run", completion.usage.outputTokens);
