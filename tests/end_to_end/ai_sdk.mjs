// The Vercel AI SDK: text, streams, objects and tools through three of its models.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const settings = { baseURL: process.argv[2], apiKey: "x" };
const compatible = createOpenAICompatible({
  ...settings, name: "radix", includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI(settings);
const record = z.object({ city: z.string().max(8), grade: z.number().int().min(0).max(9) });
const weather = tool({
  description: "the weather", inputSchema: z.object({ city: z.string() }), execute: async () => 20,
});
const asked = { prompt: "What is the weather in Paris?", temperature: 0, maxOutputTokens: 100 };
const onError = ({ error }) => { throw error; };

for (const name of ["compatible", "chat", "responses"]) {
  const model = name === "compatible" ? compatible("radix-tiny") : openai[name]("radix-tiny");
  const body = { ...asked, model };
  const whole = await generateText(body);
  assert(whole.usage.inputTokens > 0 && whole.finishReason === "stop", name);
  const parts = streamText({ ...body, onError });
  let text = "";
  for await (const part of parts.textStream) text += part;
  assert.equal(text, whole.text);
  assert.equal((await parts.usage).outputTokens, whole.usage.outputTokens);
  const object = (await generateObject({ ...body, schema: record })).object;
  assert(record.safeParse(object).success);
  const stream = streamObject({ ...body, schema: record, onError });
  for await (const _ of stream.partialObjectStream);
  assert.deepEqual(await stream.object, object);
  for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
    const tools = { tools: { weather }, toolChoice, stopWhen: stepCountIs(1) };
    const called = await generateText({ ...body, ...tools });
    assert(called.toolCalls[0].input.city && called.toolResults.length === 1);
    const streamed = streamText({ ...body, ...tools, onError });
    await streamed.consumeStream();
    assert.deepEqual((await streamed.toolCalls).map((call) => call.input),
      called.toolCalls.map((call) => call.input));
  }
}
console.log("done");
