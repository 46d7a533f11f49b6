"""``--custom-weight-loader module.function``: turns tensors that a trainer sends into tensors of
the checkpoint, in a process of its own: ``-m radixlm.weights.custom_loader PATH FOLDER FILE``.

    def function(named_tensors: list[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


def convert(path: str, folder: Path, file: Path) -> None:
    """Write to ``file`` what the function at ``path`` makes of the tensors in ``folder``.
    ImportError or AttributeError without such a function; what it raises; TypeError for other
    results."""
    module, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    given: list[tuple[str, Tensor]] = []
    for part in sorted(folder.glob("*.safetensors")):
        given += load_file(part).items()
    made = dict(function(given))
    bad = [n for n, tensor in made.items() if type(n) is not str or not isinstance(tensor, Tensor)]
    if bad or not made:
        raise TypeError(f"expected pairs of a name and a tensor, got {bad[:1] or 'none'}")
    save_file({n: tensor.detach().contiguous().clone() for n, tensor in made.items()}, file)


def main(argv: Sequence[str]) -> int:
    """The exit status; the last line of stderr says what was wrong."""
    path, folder, file = argv
    sys.path.insert(0, "")
    try:
        convert(path, Path(folder), Path(file))
    except (ImportError, AttributeError, TypeError, ValueError, KeyError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    except (OSError, SafetensorError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
