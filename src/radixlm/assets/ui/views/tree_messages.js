// Texts of the tree view.
import { addMessages } from "../messages.js";

addMessages({
  "tree.title": "Prefix cache", "tree.wait": "Waiting for the tree …", "tree.empty": "The prefix cache is empty.",
  "tree.summary": "{tokens} tokens in {nodes} nodes, {depth} deep; {locked} nodes locked",
  "tree.label": "Radix tree of cached prefixes. Arrows move, Enter shows a node over the whole width, Escape goes back.",
  "tree.caption": "Nodes of the prefix cache", "tree.more": "{nodes} more, {tokens} tokens", "tree.nodes": "nodes",
  "tree.item": "{name} · {tokens} tokens, {path} from the root, {hits} hits, {rate} a minute{locked}{tomb}",
  "tree.locked": ", locked", "tree.tombs": ", window tombstone",
  "tree.hot": "Hot prefixes", "tree.node": "node", "tree.depth": "depth", "tree.tokens": "tokens", "tree.path": "tokens from the root", "tree.hits": "hits", "tree.rate": "hits/min",
  "tree.locks": "locks", "tree.age": "last use", "tree.bytes": "bytes", "tree.share": "share of prefill saved", "tree.tomb": "tombstone", "tree.text": "text", "tree.yes": "yes", "tree.no": "no",
  "tree.search": "Prompt that begins with", "tree.find": "Find", "tree.clear": "Clear", "tree.found": "{tokens} tokens of it are cached, in {nodes} nodes", "tree.nothing": "Nothing of it is cached.",
  "tree.back": "Whole tree", "tree.heat0": "no hit", "tree.heat1": "under 1", "tree.heat2": "1 to 5", "tree.heat3": "5 to 20", "tree.heat4": "20 to 100", "tree.heat5": "100 and more hits a minute",
  "tree.hatch": "hatched: locked by running requests", "tree.dashed": "dashed border: window tombstone", "tree.marked": "thick border: matches the search",
});
