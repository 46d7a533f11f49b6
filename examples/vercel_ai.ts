// The Vercel AI SDK: a text, a stream, an object, a tool. `npm install ai @ai-sdk/openai-compatible zod tsx`, then
// `npx tsx vercel_ai.ts`.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.env.RADIXLM_URL ?? "http://127.0.0.1:30000";
const radixlm = createOpenAICompatible({
  name: "radixlm", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = radixlm("radix-tiny");

const whole = await generateText({ model, prompt: "What is 17 + 25?", temperature: 0 });
console.log(whole.text, whole.usage);
assert.equal(whole.text, "42");

let text = "";
for await (const part of streamText({ model, prompt: "What is 17 + 25?", temperature: 0 }).textStream) text += part;
assert.equal(text, "42");

const { object } = await generateObject({
  model, temperature: 0,
  schema: z.object({ name: z.string(), age: z.number().int() }),
  prompt: "Anna is 31 years old. Return the name and the age as JSON.",
});
console.log(object);
assert.deepEqual(object, { name: "Anna", age: 31 });

const get_weather = tool({
  description: "Get the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `20 degrees in ${city}`,
});
const called = await generateText({
  model, temperature: 0, tools: { get_weather }, toolChoice: "required", stopWhen: stepCountIs(1), prompt: "What is the weather in Paris?",
});
console.log(called.toolCalls[0].input, called.toolResults[0].output);
assert.equal(called.toolResults[0].output, "20 degrees in Paris");
