// The AI SDK with its providers sends drawings: as data, as a data URI, and as a file part.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { readFileSync } from "node:fs";

const [url, path] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "aioinfer", baseURL: `${url}/v1` });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const bytes = readFileSync(path);
const parts = [
  { type: "image", image: bytes },
  { type: "image", image: `data:image/png;base64,${bytes.toString("base64")}` },
  { type: "file", data: bytes, mediaType: "image/png" },
];
const text = { type: "text", text: "Describe the image." };

for (const model of [
  openai("tiny-vision"), openai.chat("tiny-vision"), compatible("tiny-vision"), anthropic("tiny-vision"),
]) {
  for (const part of parts) {
    const messages = [{ role: "user", content: [part, text] }];
    const common = { model, messages, temperature: 0, maxRetries: 0 };
    console.log("run", (await generateText(common)).text);
    let streamed = "";
    for await (const piece of streamText(common).textStream) streamed += piece;
    console.log("stream", streamed);
  }
}
