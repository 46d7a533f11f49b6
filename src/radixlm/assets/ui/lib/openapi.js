// Reads an OpenAPI document: routes by tag, fields of schemas, examples.

const METHODS = ["get", "post", "put", "delete", "patch"];

/**
 * @typedef {{method: string, path: string, tag: string, summary: string, operation: any}} Route
 * @param {any} document @returns {Map<string, Route[]>} by tag
 */
export function routesByTag(document) {
  const groups = new Map();
  for (const [path, operations] of Object.entries(document.paths ?? {})) {
    for (const method of METHODS.filter((one) => one in operations)) {
      const operation = operations[method];
      const tag = operation.tags?.[0] ?? "other";
      const summary = operation.description ?? operation.summary ?? "";
      groups.set(tag, [...(groups.get(tag) ?? []), { method, path, tag, summary, operation }]);
    }
  }
  return groups;
}

/** The schema that a `$ref` names, or the schema itself. */
export function resolve(document, schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? (document.components?.schemas?.[name] ?? {}) : (schema ?? {});
}

/** A type in words: "string or list of string". @returns {string} */
export function typeOf(document, schema, depth = 0) {
  if (!schema || depth > 4) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const options = schema.anyOf ?? schema.oneOf;
  if (options) {
    const words = options.filter((one) => one.type !== "null").map((one) => typeOf(document, one, depth + 1));
    return [...new Set(words)].join(" or ");
  }
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.type === "array") return `list of ${typeOf(document, schema.items, depth + 1)}`;
  const bounds = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]];
  const told = bounds.filter(([name]) => schema[name] !== undefined).map(([name, sign]) => ` ${sign} ${schema[name]}`);
  return (schema.type ?? "any") + told.join(",");
}

/** Rows of a table of fields. */
export function fieldsOf(document, schema) {
  const whole = resolve(document, schema);
  const required = new Set(whole.required ?? []);
  return Object.entries(whole.properties ?? {}).map(([name, one]) => ({
    name,
    type: typeOf(document, one),
    default: required.has(name) ? null : JSON.stringify(one.default ?? null),
    what: one.description ?? "",
  }));
}

/** The schema of a route's JSON body, and an example of it as text. */
export function bodyOf(document, operation) {
  const media = operation.requestBody?.content?.["application/json"];
  if (!media) return null;
  const schema = resolve(document, media.schema);
  const required = Object.fromEntries((schema.required ?? []).map((name) => [name, sample(document, schema.properties?.[name])]));
  return { schema, example: JSON.stringify(media.example ?? schema.example ?? required, null, 2) };
}

function sample(document, schema) {
  const whole = resolve(document, schema);
  const one = whole.anyOf?.find((option) => option.type !== "null") ?? whole;
  if (one.const !== undefined) return one.const;
  if (one.enum) return one.enum[0];
  return { string: "", integer: 1, number: 1, boolean: false, array: [], object: {} }[one.type] ?? null;
}

/** The schema of a 200 with JSON. */
export const answerOf = (document, operation) => resolve(document, operation.responses?.["200"]?.content?.["application/json"]?.schema);
