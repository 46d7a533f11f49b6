// Texts of the API view.

import { addMessages } from "../messages.js";

addMessages({
  "docs.about": "All routes of this server, read from its OpenAPI document. Nothing is loaded from elsewhere.",
  "docs.filter": "Filter routes",
  "docs.count": "{shown} of {all} routes",
  "docs.fields": "Fields of the body",
  "docs.parameters": "Parameters",
  "docs.answer": "Fields of the answer",
  "docs.field": "Field",
  "docs.type": "Type",
  "docs.default": "Default",
  "docs.what": "What",
  "docs.required": "required",
  "docs.try": "Try it",
  "docs.body": "Body as JSON",
  "docs.send": "Send {method} {path}",
  "docs.sends": "This changes the server: it is sent as soon as you press the button.",
  "docs.stop": "Stop",
  "docs.status": "{status} in {ms} ms",
  "docs.response": "Answer",
  "docs.curl": "As curl",
  "docs.cut": "… cut at {size}",
});
