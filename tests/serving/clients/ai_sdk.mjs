// What the AI SDK makes of a server: node ai_sdk.mjs PACKAGES URL prints one JSON object, from the
// name of each API to what came of it.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [packages, url] = process.argv.slice(2);
const require = createRequire(`${packages}/package.json`);
const { generateText, streamText, jsonSchema, tool, stepCountIs } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

globalThis.AI_SDK_LOG_WARNINGS = false;
const known = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(known);
const models = {
  chat: openai.chat("scripted"),
  completions: openai.completion("scripted"),
  responses: openai.responses("scripted"),
  messages: createAnthropic(known)("scripted"),
  compatible: createOpenAICompatible({ ...known, name: "m" })("scripted"),
};
const read = tool({
  description: "Read a file.",
  inputSchema: jsonSchema({ type: "object", properties: { path: { type: "string" } } }),
  execute: async ({ path }) => readFileSync(path, "utf8"),
});
const long = " =".repeat(210_000);

async function tried(name, model) {
  const given = { model, maxRetries: 0, providerOptions: { openai: { store: false } } };
  const found = { question: (await generateText({ ...given, prompt: "What is 2+2?" })).text };
  const stream = streamText({ ...given, prompt: "What is 2+2?" });
  found.streamed = "";
  for await (const piece of stream.textStream) found.streamed += piece;
  found.usage = (await stream.usage).inputTokens;
  if (name !== "completions") {
    const steps = { tools: { read }, stopWhen: stepCountIs(3), prompt: "Read note.txt." };
    const called = await generateText({ ...given, ...steps });
    found.called = called.text;
    found.inputs = called.steps.flatMap((step) => step.toolCalls.map((call) => call.input));
    const again = streamText({ ...given, ...steps });
    found.streamedCall = await again.text;
  }
  try {
    await generateText({ ...given, prompt: long });
  } catch (error) {
    const told = error.data?.error;
    found.tooLong = [error.statusCode, told?.code ?? told?.type];
  }
  return found;
}

const result = {};
for (const [name, model] of Object.entries(models)) result[name] = await tried(name, model);
console.log(JSON.stringify(result));
