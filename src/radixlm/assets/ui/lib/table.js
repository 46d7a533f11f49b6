/** Tables, and the tables that stand in for charts. */
import { html, useState } from "../vendor/preact.js";

/**
 * @typedef {{key: string, label: string, num?: boolean, sort?: boolean, text?: boolean,
 *   format?: (value: any, row: any) => any}} Column `num`: right-aligned figures; `sort`: its
 *   heading sorts; `text`: may be long, and breaks into lines
 */

/** @param {(string|Column)[]} columns @returns {Column[]} */
const named = (columns) => columns.map((one) => (typeof one === "string" ? { key: one, label: one } : one));
const cell = (row, column, index) => (Array.isArray(row) ? row[index] : row[column.key]);

function compare(one, two) {
  if (one == null || two == null) return (one == null ? 1 : 0) - (two == null ? 1 : 0);
  return one < two ? -1 : one > two ? 1 : 0;
}

function Heading({ column, sorted, onSort }) {
  const mine = sorted?.key === column.key;
  const order = mine ? (sorted.down ? "descending" : "ascending") : undefined;
  const arrow = mine ? (sorted.down ? " ↓" : " ↑") : "";
  return html`<th scope="col" class=${column.num ? "num" : ""} aria-sort=${order}>
    ${column.sort
      ? html`<button type="button" class="sort" onClick=${() => onSort({ key: column.key, down: mine ? !sorted.down : true })}>
          ${column.label}<span aria-hidden="true">${arrow}</span>
        </button>`
      : column.label}
  </th>`;
}

/**
 * A table with a caption; scrolls inside itself and is reached by keyboard.
 * @param {{caption: string, columns: (string|Column)[], rows: any[], empty?: string,
 *   onRow?: (row: any) => void, rowLabel?: (row: any) => string, selected?: (row: any) => boolean,
 *   hideCaption?: boolean, rowKey?: (row: any) => any}} props
 *   rows: objects by column key or arrays in the order of the columns; `onRow`: the first cell
 *   becomes a button named by `rowLabel`
 */
export function DataTable({ caption, columns, rows, empty, onRow, rowLabel, selected, hideCaption, rowKey }) {
  const [sorted, setSorted] = useState(null);
  const all = named(columns);
  let shown = rows;
  if (sorted) {
    const index = all.findIndex((one) => one.key === sorted.key);
    const sign = sorted.down ? -1 : 1;
    shown = [...rows].sort((one, two) => sign * compare(cell(one, all[index], index), cell(two, all[index], index)));
  }
  const body = shown.map((row, line) => {
    const cells = all.map((column, index) => {
      const value = cell(row, column, index);
      const text = column.format ? column.format(value, row) : (value ?? "–");
      const inner =
        index === 0 && onRow
          ? html`<button type="button" class="link" aria-label=${rowLabel?.(row)} onClick=${() => onRow(row)}>${text}</button>`
          : text;
      return html`<td class=${column.num ? "num" : column.text ? "long" : ""}>${inner}</td>`;
    });
    return html`<tr key=${rowKey ? rowKey(row) : line} aria-current=${selected?.(row) ? "true" : undefined}>${cells}</tr>`;
  });
  return html`<div class="table-scroll" tabindex="0" role="group" aria-label=${caption}>
    <table class="data">
      <caption class=${hideCaption ? "visually-hidden" : ""}>${caption}</caption>
      <thead><tr>${all.map((column) => html`<${Heading} column=${column} sorted=${sorted} onSort=${setSorted} />`)}</tr></thead>
      <tbody>${rows.length ? body : html`<tr><td class="muted" colspan=${all.length}>${empty ?? "–"}</td></tr>`}</tbody>
    </table>
  </div>`;
}

/**
 * A chart with its twin: one line that sums it up, and a button that shows it as a table.
 * @param {{caption: string, summary?: string, label?: string, tools?: any, children?: any,
 *   table: () => {columns: (string|Column)[], rows: any[], onRow?: any, rowLabel?: any, empty?: string}}} props
 *   `table` is called only while the table is shown
 */
export function Twin({ caption, summary, label = "Show as table", tools, table, children }) {
  const [shown, setShown] = useState(false);
  return html`<div class="twin">
    <div class="twin-bar">
      <p class="summary">${summary}</p>
      <div class="tools">
        ${tools}
        <button type="button" class="small" aria-pressed=${shown ? "true" : "false"} aria-label=${`${label}: ${caption}`} onClick=${() => setShown(!shown)}>
          ${label}
        </button>
      </div>
    </div>
    ${shown ? html`<${DataTable} caption=${caption} hideCaption=${true} ...${table()} />` : children}
  </div>`;
}
