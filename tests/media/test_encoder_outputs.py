"""Which images each text token attends to, against the mask of Hugging Face's processor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.media.encoder_outputs import stretches

mllama = pytest.importorskip("transformers.models.mllama.processing_mllama")
IMAGE = 7


@given(st.lists(st.booleans(), min_size=1, max_size=24))
@settings(max_examples=100, derandomize=True)
def test_visible_images_equal_the_mask(is_image: list[bool]) -> None:
    ids = [IMAGE if one else 0 for one in is_image]
    places = [i for i, one in enumerate(ids) if one == IMAGE]
    seen = [set[int]() for _ in ids]
    for start, end, images in stretches(places):
        for place in range(start, len(ids) if end is None else end):
            assert not seen[place], "a token is in one stretch"
            seen[place] = set(images)
    runs = mllama.get_cross_attention_token_mask(ids, IMAGE)
    for place in range(len(ids)):
        allowed = {
            i
            for i, (start, end) in enumerate(runs)
            if start <= place < (len(ids) if end < 0 else end)
        }
        # before the first image the mask is empty, and an empty mask excludes nothing
        assert seen[place] == (allowed or set(range(len(places))))
