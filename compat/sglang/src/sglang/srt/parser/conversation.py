"""``chat_templates``: the prompt formats by name, with their placeholders for media."""

from __future__ import annotations

from copy import copy

from radixlm.text.conversations import CONVERSATIONS
from radixlm.text.conversations import Conversation as Format


class Conversation:
    """A prompt format. The placeholders are empty where it has none."""

    def __init__(self, name: str, found: Format) -> None:
        self.name = name
        self.system_message, self.stop_str = found.default_system, list(found.stops)
        self.image_token = found.media.get("image", "")
        self.video_token = found.media.get("video", "")
        self.audio_token = found.media.get("audio", "")

    def copy(self) -> Conversation:
        """Another object that is alike."""
        return copy(self)


chat_templates = {name: Conversation(name, found) for name, found in CONVERSATIONS.items()}
