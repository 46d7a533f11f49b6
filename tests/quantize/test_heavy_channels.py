"""`radixlm calibrate double-sparsity` on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.quantize.test_quantize import TINY

from radixlm.arch.hf import describe
from radixlm.attention.double_sparsity import load_sparsity
from radixlm.base.errors import ConfigError
from radixlm.config.execute import ExecuteConfig
from radixlm.models.kv_groups import kv_groups
from radixlm.quantize import heavy_channels
from radixlm.quantize.heavy_channels import _Watched, main
from radixlm.step.batch import AttentionSite

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 4


def test_a_file_that_a_server_reads(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "channels.json"
    text.write_text(TEXT)
    assert main(["double-sparsity", str(TINY), "--text", str(text), "-o", str(out)]) == 0
    listed = json.loads(out.read_text())
    spec = describe(json.loads((Path(TINY) / "config.json").read_text()))
    groups = kv_groups(spec)
    assert len(listed) == 3 * len(spec.blocks)
    for lists in listed.values():
        assert [sorted(one) for one in lists] == [list(range(groups[0].head_dim))] * len(lists)
    config = ExecuteConfig(enable_double_sparsity=True, ds_channel_config_path=str(out))
    num_heads = groups[0].kv_heads
    heads = dict.fromkeys(range(len(spec.blocks)), (num_heads, 0, num_heads))
    sparsity = load_sparsity(config, groups, heads)
    assert sparsity is not None
    assert sparsity.width(groups[0]) == 32


def test_channels_are_sorted_by_the_mean_product() -> None:
    group = kv_groups(describe(json.loads((Path(TINY) / "config.json").read_text())))[0]
    sums: dict[int, dict[str, torch.Tensor]] = {group.layers[1]: {}}
    watched = _Watched((group,), sums)
    site = AttentionSite(1, 0, heads=4, kv_heads=2, head_dim=6, v_dim=6, scale=1.0)
    q, k = torch.randn(9, 4, 6), torch.randn(9, 2, 6)
    watched.run(q[:5], k[:5], k[:5], site)
    watched.run(q[5:], k[5:], k[5:], site)
    wanted = (q.view(9, 2, 2, 6).abs().mean(2) * k.abs()).sum(0)
    torch.testing.assert_close(sums[group.layers[1]]["qk"].float(), wanted)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "nowhere.txt", "-o", "out.json"], "--text nowhere.txt: No such file"),
        (["--text", "empty.txt", "-o", "out.json"], "holds no token"),
        (["--text", "text.txt", "-o", "no/folder/out.json"], "-o no/folder"),
        (["--text", "text.txt", "-o", "out.json", "--length", "0"], "use 1 or more"),
    ],
)
def test_mistakes_are_named(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("text.txt").write_text("a")
    if "no/folder/out.json" in more:
        monkeypatch.setattr(heavy_channels, "calibrate", lambda *_: {})
    with pytest.raises(ConfigError, match=message):
        main(["double-sparsity", str(TINY), *more])
