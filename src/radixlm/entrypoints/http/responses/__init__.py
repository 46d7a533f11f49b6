"""OpenAI's Responses API. ``tool_loop.py`` runs a response, ``events.py`` writes its events,
``store.py`` keeps it, ``toolbox.py`` and ``tool_servers.py`` call MCP tools.
"""
