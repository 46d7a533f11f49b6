// Every sampling field of /v1/chat/completions: its kind and the default that an empty field means.

/** @type {[string, [string, "number" | "integer" | "boolean" | "text" | "json" | "lines" | "integers", string][]][]} */
export const FIELDS = [
  ["length", [
    ["max_completion_tokens", "integer", "to the end of the context"],
    ["min_tokens", "integer", "0"],
    ["stop", "lines", "none; one a line"],
    ["stop_token_ids", "integers", "none; with commas"],
    ["stop_regex", "lines", "none; one a line"],
    ["ignore_eos", "boolean", "false"],
    ["no_stop_trim", "boolean", "false"],
    ["n", "integer", "1"],
  ]],
  ["sampling", [
    ["temperature", "number", "1 (or the model's)"],
    ["top_p", "number", "1 (or the model's)"],
    ["top_k", "integer", "-1: all (or the model's)"],
    ["min_p", "number", "0"],
    ["seed", "integer", "drawn for each answer"],
    ["logit_bias", "json", '{"1234": -100}'],
    ["allowed_token_ids", "integers", "all"],
    ["bad_words", "lines", "none; one a line"],
  ]],
  ["penalties", [
    ["frequency_penalty", "number", "0"],
    ["presence_penalty", "number", "0"],
    ["repetition_penalty", "number", "1 (or the model's)"],
  ]],
  ["output", [
    ["skip_special_tokens", "boolean", "true"],
    ["spaces_between_special_tokens", "boolean", "true"],
    ["stream_interval", "integer", "the server's"],
    ["reasoning_effort", "text", "the template's"],
    ["separate_reasoning", "boolean", "true"],
    ["parallel_tool_calls", "boolean", "true"],
    ["continue_final_message", "boolean", "false"],
    ["structural_tag", "json", "none"],
    ["custom_params", "json", "none"],
  ]],
  ["request", [
    ["priority", "integer", "0"],
    ["timeout", "number", "none, in seconds"],
    ["lora_path", "text", "none"],
    ["cache_salt", "text", "none"],
    ["chat_template_kwargs", "json", "{}"],
  ]],
];

/** What a field's text means; undefined: empty. Throws Error with what is wrong. */
export function read(kind, text) {
  const trimmed = text.trim();
  if (!trimmed) return undefined;
  if (kind === "boolean") return trimmed === "true";
  if (kind === "text") return trimmed;
  if (kind === "lines") return text.split("\n").filter(Boolean);
  if (kind === "json") return JSON.parse(trimmed);
  const numbers = trimmed.split(kind === "integers" ? "," : /$^/).map(Number);
  if (numbers.some((n) => Number.isNaN(n) || (kind !== "number" && !Number.isInteger(n)))) {
    throw new Error(kind === "number" ? "a number" : "an integer");
  }
  return kind === "integers" ? numbers : numbers[0];
}

/** The text of a field's value. */
export function write(kind, value) {
  if (value === undefined || value === null) return "";
  if (kind === "json") return JSON.stringify(value);
  if (Array.isArray(value)) return value.join(kind === "lines" ? "\n" : ", ");
  return String(value);
}
