"""A .gguf file, or several parts of one, as a checkpoint folder: config.json and tokenizer made of
its metadata, the weights by a link."""

from pathlib import Path
from typing import Any

from radixlm.arch.families.gguf import config_of
from radixlm.arch.gguf import read_header
from radixlm.base.errors import CheckpointError
from radixlm.engine.kept_folder import keep_folder
from radixlm.text.gguf_tokenizer import tokenizer_files
from radixlm.text.tokenizer import TOKENIZER_PROBLEM

WEIGHTS, PART = "model.gguf", "model-{:05d}-of-{:05d}.gguf"


def unpacked(file: Path) -> Path:
    """The folder of a file; CheckpointError if the file is broken or of an unknown kind."""
    file = file.absolute()  # where a link leads to, names may say nothing of parts
    header = read_header(file)
    files: dict[str, Any] = {"config.json": config_of(header)}
    try:
        files |= tokenizer_files(header.metadata, str(file)) or {}
    except CheckpointError as error:  # --tokenizer-path may be given: said when it is missed
        files[TOKENIZER_PROBLEM] = str(error)
    count = len(header.files)
    name = PART if count > 1 else WEIGHTS
    links = {name.format(number, count): part for number, part in enumerate(header.files, 1)}
    return keep_folder("gguf", header.path, files, links)
