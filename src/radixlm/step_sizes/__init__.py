"""How much a step computes, by measured times: tokens of prompts, and tokens decoded in turn."""
