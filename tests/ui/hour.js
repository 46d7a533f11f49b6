// Applies `count` frames of a tenth of a second to the live view as fast as they go.
async ({ frames, count }) => {
  const { model } = await import("./views/live.js");
  const names = Object.keys(frames.columns);
  const base = model.serverNow();
  const first = model.steps.last("index") + 1;
  for (let at = 0; at < count; at += 1) {
    const t = base + at / 10;
    const index = Array.from({ length: 8 }, (_, line) => first + at * 8 + line);
    const value = (name, line) => (name === "start_s" ? t + line / 100 : (line + at) % 7);
    const columns = Object.fromEntries(names.map((name) => [name, index.map((_, line) => value(name, line))]));
    model.apply("steps", { replica: 0, first: index[0], index, columns });
    const row = structuredClone(frames.row);
    row.id = `r${first + Math.floor(at / 5)}`;
    row.begun_s = t - 1;
    model.apply("requests", { rows: [row] });
    if (at % 10 === 0) model.apply("head", { ...structuredClone(frames.head), t });
    if (at % 50 === 0) model.apply("log", { lines: [[t, "INFO", "engine", `line ${at}`]] });
    if (at % 300 === 0) await new Promise((done) => setTimeout(done, 0));
  }
  return { rows: model.rows.size, steps: model.steps.length, last: model.steps.last("index") };
}
