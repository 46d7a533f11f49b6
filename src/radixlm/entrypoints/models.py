"""``radixlm pull`` and ``radixlm models``: downloads, and what lies on this machine."""

import json
import shutil
import time
from pathlib import Path

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.log import set_up_logging
from radixlm.base.nearest import suggestion
from radixlm.base.units import format_bytes
from radixlm.config.model import LOAD_FORMATS
from radixlm.config.verb_parser import VerbParser
from radixlm.hub.huggingface import cache_top
from radixlm.hub.inventory import LocalModel, local_models
from radixlm.hub.locate import HUBS, SCHEMES, Wanted, scheme_of, split_repo


def pull(argv: list[str]) -> int:
    """Download models, or what is new of them."""
    parser = VerbParser("radixlm pull", pull.__doc__)
    parser.add_argument(
        "name", nargs="+", help="org/model, org/model@revision, org/model:Q4_K_M of GGUF files"
    )
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--include", nargs="+", default=(), help="patterns of files, not the usual")
    parser.add_argument("--exclude", nargs="+", default=(), help="patterns of files to leave out")
    parser.add_argument("--download-dir", help="folder in place of the hub's cache")
    parser.add_argument("--load-format", default="auto", choices=LOAD_FORMATS)
    args = parser.parse_args(argv)
    set_up_logging("pull")
    for name in args.name:
        wanted = Wanted(
            flag="pull",
            revision=args.revision,
            folder=args.download_dir,
            load_format=args.load_format,
            include=tuple(args.include),
            exclude=tuple(args.exclude),
        )
        found = scheme_of(name)
        if found is None or found[0] not in HUBS:
            raise ConfigError(f"pull {name}: give the name of a model on a hub, such as org/model")
        module = SCHEMES[found[0]].partition(":")[0]
        print(load(f"{module}:pull")(found[1], wanted))
    return 0


def main(argv: list[str]) -> int:
    """List the models that were downloaded, or remove one."""
    parser = VerbParser("radixlm models", main.__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--download-dir", help="folder in place of the hub's cache")
    verbs = parser.add_subparsers(dest="verb", metavar="rm")
    remove = verbs.add_parser("rm", help="remove the files of a model from this machine")
    remove.add_argument("name", help="as the list shows it")
    args = parser.parse_args(argv)
    models = local_models(args.download_dir)
    if args.verb == "rm":
        return _remove(args.name, models, args.download_dir)
    if args.json:
        keys = LocalModel.__struct_fields__
        rows = [{key: getattr(one, key) for key in keys} for one in models]
        print(json.dumps([row | {"can_serve": not row["problem"]} for row in rows], indent=2))
        return 0
    _print(models)
    return 0


def _print(models: list[LocalModel]) -> None:
    if not models:
        print("no models here; radixlm pull org/model downloads one")
        return
    rows = [("NAME", "SIZE", "DTYPE", "ARCHITECTURE", "USED", "SERVED")]
    for one in models:
        days = int((time.time() - one.used_s) / 86400)
        used = "today" if days < 1 else f"{days} d ago"
        kind = one.quantization or one.dtype or "-"
        served = f"no: {one.problem}" if one.problem else "yes"
        size = format_bytes(one.num_bytes)
        rows.append((one.name, size, kind, one.architecture or "-", used, served))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[5]]).rstrip())


def _plain(name: str) -> str:
    """A name without revision and file."""
    scheme, mark, rest = name.rpartition("://")
    return scheme + mark + split_repo(rest, None).name


def _remove(name: str, models: list[LocalModel], download_dir: str | None) -> int:
    known = [one for one in models if name in (one.name, _plain(one.name))]
    if not known:
        near = suggestion(name, [one.name for one in models])
        raise ConfigError(f"models rm {name}: it is not here{near}; see radixlm models")
    folders = {one.folder: one.source for one in known}
    size = sum(one.num_bytes for one in models if one.folder in folders)
    commits = [Path(folder).name for folder, source in folders.items() if source == "huggingface"]
    if commits:
        scan = load("huggingface_hub:scan_cache_dir")(cache_top(download_dir))
        scan.delete_revisions(*commits).execute()
    for folder, source in folders.items():
        if source == "modelscope":
            shutil.rmtree(folder)
    print(f"removed {name}: {format_bytes(size)}")
    return 0
