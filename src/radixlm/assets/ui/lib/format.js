/** Numbers as people read them. Times are seconds unless the name says milliseconds. */

const DASH = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** 1234567 -> "1.23M". @param {number|null|undefined} value */
export function count(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return size >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(2);
}

/** 0.0123 -> "12.3 ms". @param {number|null|undefined} value */
export function seconds(value) {
  if (!known(value)) return DASH;
  if (value < 0.0995) return `${(value * 1e3).toPrecision(value < 0.001 ? 2 : 3)} ms`;
  if (value < 99.5) return `${value.toPrecision(3)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** @param {number|null|undefined} value milliseconds */
export const millis = (value) => (known(value) ? `${value.toFixed(value < 10 ? 2 : 1)} ms` : DASH);

/** 0.123 -> "12.3%". @param {number|null|undefined} value */
export const percent = (value) => (known(value) ? `${(value * 100).toFixed(1)}%` : DASH);

/** @param {number|null|undefined} value */
export function bytes(value) {
  if (!known(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  let size = value;
  for (; size >= 1024 && step < 4; step += 1) size /= 1024;
  return `${step && size < 100 ? size.toFixed(1) : size.toFixed(0)} ${units[step]}`;
}

/** Time of day of a Unix time. @param {number} unix */
export const clock = (unix) => new Date(unix * 1e3).toLocaleTimeString([], { hour12: false });
