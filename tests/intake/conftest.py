from __future__ import annotations

from pathlib import Path

import pytest

from radixlm.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes import toy_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("toy")
    return load_tokenizer(toy_tokenizer.save(toy_tokenizer.build("byte_level"), folder))
