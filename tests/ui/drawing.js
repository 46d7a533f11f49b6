// Milliseconds of one drawing of all rows of the waterfall: the median of 30.
async () => {
  const { drawWaterfall } = await import("./lib/waterfall.js");
  const { model } = await import("./views/live.js");
  const canvas = Object.assign(document.createElement("canvas"), { width: 1600, height: 4900 });
  const ctx = canvas.getContext("2d");
  const now = model.serverNow();
  const scene = {
    width: 1600, height: 4900, rowHeight: 24, top: 0, gutter: 150, from: now - 60, to: now + 2, now,
    rows: model.newest(), focus: 3, hover: -1, opened: null, slow: null, nameOf: (row) => row.id, phaseNames: {},
  };
  const times = [];
  for (let at = 0; at < 30; at += 1) {
    const begun = performance.now();
    drawWaterfall(ctx, scene);
    ctx.getImageData(0, 0, 1, 1); // waits until it is drawn
    times.push(performance.now() - begun);
  }
  return times.sort((one, two) => one - two)[15];
}
