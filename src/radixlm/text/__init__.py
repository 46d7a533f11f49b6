"""Everything between text and token ids: tokenizer, detokenizer, chat templates, stop strings,
tool-call parsers (``tools/``) and reasoning parsers (``reasoning/``). No torch.

Read first: ``tokenizer.py``, ``chat.py``, ``tools/table.py``.
"""
