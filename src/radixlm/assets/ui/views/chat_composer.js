// Where a message is written: text, files by button, paste and drop.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { t } from "../messages.js";
import { Media } from "./chat_message.js";

/** base64 adds a third, and the server takes 64 MiB unless told otherwise. */
const MAX_MB = 45;

/** @param {File} file @returns {Promise<import("./chat_model.js").Part>} */
function part(file) {
  const kind = /** @type {any} */ (file.type.split("/")[0]);
  if (!["image", "video", "audio"].includes(kind)) throw new Error(t("chat.bad_file", { name: file.name }));
  const mb = Math.ceil(file.size / 1e6);
  if (mb > MAX_MB) throw new Error(t("chat.large_file", { name: file.name, mb, limit: MAX_MB }));
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ kind, name: file.name || kind, url: String(reader.result) });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** @param {{onSend: (text: string, parts: any[]) => void, onStop: () => void, isRunning: boolean, tell: (text: string) => void}} props */
export function Composer({ onSend, onStop, isRunning, tell }) {
  const [text, setText] = useState("");
  const [parts, setParts] = useState([]);
  const [isOver, setOver] = useState(false);
  const area = useRef(null);
  const picker = useRef(null);
  useEffect(() => area.current.focus({ preventScroll: true }), []);
  const take = async (files) => {
    for (const file of files) {
      try {
        const made = await part(file);
        setParts((before) => [...before, made]);
      } catch (error) {
        tell(error.message);
      }
    }
  };
  const send = () => {
    if (isRunning || (!text.trim() && !parts.length)) return;
    onSend(text, parts);
    setText("");
    setParts([]);
  };
  const press = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const paste = (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    take(files);
  };
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    take([...event.dataTransfer.files]);
  };
  const over = (event) => {
    event.preventDefault();
    setOver(true);
  };
  const remove = (i) => setParts(parts.filter((_, place) => place !== i));
  const submit = (event) => {
    event.preventDefault();
    send();
  };
  return html`<form class=${`composer ${isOver ? "over" : ""}`} onSubmit=${submit} onDrop=${drop}
      onDragOver=${over} onDragLeave=${() => setOver(false)}>
    ${parts.length > 0 && html`<${Media} parts=${parts} onRemove=${remove} />`}
    <textarea ref=${area} rows="1" aria-label=${t("chat.input")}
      placeholder=${isOver ? t("chat.drop") : t("chat.placeholder")} value=${text}
      onInput=${(e) => setText(e.currentTarget.value)} onKeyDown=${press} onPaste=${paste}></textarea>
    <div class="row">
      <input ref=${picker} type="file" hidden multiple accept="image/*,video/*,audio/*" aria-label=${t("chat.attach")}
        onChange=${(e) => { take([...e.currentTarget.files]); e.currentTarget.value = ""; }} />
      <button type="button" class="quiet" onClick=${() => picker.current.click()}>${t("chat.attach")}</button>
      <span class="grow"></span>
      ${isRunning
        ? html`<button key="stop" type="button" onClick=${onStop}>${t("chat.stop")}</button>`
        : html`<button key="send" class="primary" disabled=${!text.trim() && !parts.length}>${t("chat.send")}</button>`}
    </div>
  </form>`;
}
