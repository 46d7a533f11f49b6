"""OpenAI's completions and chat. ``conversation.py`` is the chat session that the Anthropic, Ollama
and Responses routes use too; ``generate.py`` runs requests.
"""
