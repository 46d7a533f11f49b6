// The bug report: what helps to find a mistake, without prompts and keys.

const SECRET = /key|secret|password|passwd|token(?!iz|s\b)|credential|authorization/i;

/** A value without secrets: of URLs the user's part, of JSON and key=value lists what is named as one. */
export function scrub(value) {
  if (typeof value !== "string") return value;
  const named = /((?:[\w-]*(?:key|secret|password|passwd|credential|authorization|token)[\w-]*)"?\s*[:=]\s*"?)([^"',;&\s}]+)/gi;
  return value.replace(/(\w+:\/\/)[^/@\s]+@/g, "$1***@").replace(named, "$1***");
}

/** Whether an option's value is not shown at all. */
const isSecret = (option) => option.value === "***" || (SECRET.test(option.name) && typeof option.value === "string" && !/_file$|tokenizer/.test(option.name));

/** @param {any} details /server_details @param {any} info /server_info @returns {string} Markdown */
export function report(details, info) {
  const { model, machine, packages } = details;
  const changed = details.options.filter((one) => one.is_given || !one.is_default);
  const lines = [
    `RadixLM ${details.version}`,
    "",
    "| | |", "|---|---|",
    `| model | ${model.architecture} (${model.type}), ${model.layers} layers, vocabulary ${model.vocab}, context ${model.context_len} |`,
    `| weights | ${model.stored ? `${model.stored.bytes} bytes; ${Object.keys(model.stored.bytes_by_dtype).join(", ")}` : "–"} |`,
    `| machine | ${machine.processor}, ${machine.cores} cores, ${Math.round(machine.memory_bytes / 2 ** 30)} GiB; ${machine.platform} |`,
    `| kernels | ${kernels(info)} |`,
    `| KV cache | ${info.max_total_num_tokens} tokens, pages of ${info.engine?.kv_page_size ?? "–"} |`,
    `| state | ${info.status}, up ${Math.round(info.uptime_s)} s |`,
    `| Python | ${machine.python} |`,
    `| packages | ${Object.entries(packages).map(([name, version]) => `${name} ${version}`).join(", ")} |`,
    "", "Options that are not the defaults:", "",
    ...changed.map((one) => {
      const value = isSecret(one) ? "***" : scrub(typeof one.value === "string" ? one.value : JSON.stringify(one.value));
      return `- \`${one.flag} ${value}\`${one.is_given ? "" : ` (${one.reason ?? "set by the server"})`}`;
    }),
  ];
  return `${lines.join("\n")}\n`;
}

/** The kernels of the engine, in words. */
export function kernels(info) {
  const { kernels: cpu, gpu, threads } = info.engine ?? {};
  if (gpu) return gpu;
  return cpu?.available ? `${cpu.isa}, ${threads} threads` : `torch on the CPU, ${threads ?? "–"} threads`;
}
